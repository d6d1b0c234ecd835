"""What `score_gradients` does, as the first part of a kernel for Hopper that then walks the key axis.

Of a chunk of 64 tokens all values fit beside each other: what only this part reads lies where the first states will,
which are copied once it is read. Gradients of scores never leave the multiprocessor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kcpgen.derivation.chunk_form import Equation, Factor
from kcpgen.emit import solve_in_scan
from kcpgen.emit.gluon_chunks import STATES, awaited, leaving_by_rows, products, value_tile
from kcpgen.emit.render import Value
from kcpgen.emit.triton_blocks import variable
from kcpgen.emit.triton_operands import score_gradients
from kcpgen.emit.triton_prologue import local, pair_decays
from kcpgen.emit.triton_score_gradients import (
    EQUATIONS,
    lines_of,
    mask_scores,
    score_operands,
    value_gradients,
    values_read,
)
from kcpgen.plan import KernelPlan
from kcpgen.spec import TokenInput


def on_both_axes(plan: KernelPlan) -> bool:
    """Whether one kernel can have both axes: of one term, with no more tiles that only values need than states, and
    where nothing is left to be solved."""
    sums = [e for e in plan.form.gradients if e.target.name in EQUATIONS]
    adds = all(term.sign > 0 for e in sums for term in e.terms)
    solved = not plan.erasing or bool(solve_in_scan.handed_back(plan))
    return len(plan.terms) == 1 and solved and adds and in_place_of_states(plan) <= len(STATES)


def in_place_of_states(plan: KernelPlan) -> int:
    """How many tiles lie where states come later."""
    return len([*only_here(plan), *inputs_read(plan)])


def only_here(plan: KernelPlan) -> list[str]:
    """Scratch [tokens, values] that the key axis does not read: dU, but where it is dR."""
    return [f"dU_{p}" for p in plan.pure_writes if f"dU_{p}" in score_operands(plan)]


def inputs_read(plan: KernelPlan) -> list[TokenInput]:
    return [i for i in plan.inputs_on("V") if i.name in values_read(plan)]


def passing_tiles(plan: KernelPlan, barrier: int) -> list[dict[str, Value]]:
    """Scratch that is read here alone."""
    return [value_tile(plan, name, barrier) for name in only_here(plan)]


def places(plan: KernelPlan) -> list[list[str]]:
    """Name and memory of each tile that lies where something comes later."""
    found = []
    tiles = {name: ("[C, VP]", f"{name}.layout") for name in only_here(plan)}
    tiles |= {i.name: ("[1, 1, C, VP]", f"{i.name}_source.layout") for i in inputs_read(plan)}
    for (name, (shape, layout)), state in zip(tiles.items(), STATES, strict=False):
        found.append([name, f"{state}_tile._reinterpret(LOW, {shape}, {layout})"])
    return found


def ways_out(plan: KernelPlan) -> dict[str, str]:
    """By the name of a value input, a tile [C, VP] that its gradient can leave by: its own, or one with a dU."""
    read = [i.name for i in inputs_read(plan)]
    free = [f"{name}_tile" for name in only_here(plan)]
    own = {name: f"{name}_tile.reshape([C, VP])" for name in read}
    return own | dict(zip((i.name for i in plan.inputs_on("V") if i.name not in read), free, strict=False))


def value_axis(plan: KernelPlan) -> dict[str, list[str]]:
    """Lines of a kernel, for a template."""
    inputs, scores = inputs_read(plan), score_gradients(plan)
    gradients, stores = leaving_by_rows([*_values(plan), *lines_of(value_gradients(plan))], ways_out(plan))
    return {
        "of_scores": [line for target in ("dA", "dL") for e in _equations(plan, target) for line in _products(e)],
        "loads": [
            *(f"dU_{p} = dU_{p}_tile.load(of_keys)" for p in plan.pure_writes),
            *(f"{local(plan, i.name)} = by_rows({i.name}_tile, value_inside)" for i in inputs),
        ],
        "gradients": gradients,
        "stores": stores,
        "summed": [awaited(scores)],
        "scores": [
            *(f"{name} = gl.where(live[:, None], {name}, 0.0)" for name in scores if name.startswith("dA_")),
            *_by_pairs([*(pair_decays(plan) if plan.decay_axis is not None else []), *mask_scores(plan)]),
            *(f"{name}_tile.store({name}.to(LOW))" for name in scores),
        ],
    }


def _equations(plan: KernelPlan, target: str) -> list[Equation]:
    return [e for e in plan.form.gradients if e.target.name == target]


def _products(equation: Equation) -> list[str]:
    """The sum of an equation, begun."""
    pairs = [(_tile(left), _tile(right)) for left, right in (term.factors for term in equation.terms)]
    return list(products(variable(equation.target), pairs))


def _tile(factor: Factor) -> str:
    """A tile as it lies: dO as it was copied."""
    name = variable(factor)
    whole = "dO_tile.reshape([C, VP])" if name == "dO" else f"{name}_tile"
    return whole + (".permute([1, 0])" if factor.transposed else "")


def _values(plan: KernelPlan) -> Iterator[str]:
    """dV, fp32: as it came from the serial kernel, solved or without a solve."""
    for e in _equations(plan, "dV"):
        ((factor,),) = (term.factors for term in e.terms)
        given = variable(factor) + ("_tile.load(of_keys)" if factor.name == "dR" else "")
        yield f"{variable(e.target)} = {given}.to(gl.float32)"


def _by_pairs(lines: Iterable[str]) -> Iterator[str]:
    """Tokens as rows and as columns are laid out differently here."""
    for line in lines:
        line = line.replace("up_to(rows)", "rows[:, None] >= earlier[None, :]")
        line = line.replace("before(rows)", "rows[:, None] > earlier[None, :]")
        yield re.sub(r"\b(G\w*)\[None, :\]", r"gl.convert_layout(\1, by_channel)[None, :]", line)
