"""`gradients_hopper.py`: what `triton_gradients` emits, in Gluon, where operands are copied before they are needed.

Tokens are 64, as many rows as the tensor cores multiply: tiles lie as in the portable kernel, whose lines stand here
but for loads of vectors and products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from kcpgen.emit import solve_in_scan
from kcpgen.emit.gluon_chunks import (
    adds_only,
    awaited,
    copy_input,
    copy_value_input,
    in_64_bits,
    laid_out,
    leaving_by_rows,
    nbytes,
    output_gradient,
    products,
    products_with,
    score_tile,
    shared_bytes,
    state_tile,
    value_tile,
    where_solved,
)
from kcpgen.emit.gluon_value_axis import (
    in_place_of_states,
    inputs_read,
    on_both_axes,
    only_here,
    passing_tiles,
    places,
    value_axis,
    ways_out,
)
from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_blocks import math
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_key_axis import EQUATIONS as OF_KEYS
from kcpgen.emit.triton_key_axis import lines_in, strings
from kcpgen.emit.triton_operands import (
    column_names,
    form_operands,
    load_score_gradients,
    row_names,
    score_gradient,
    score_gradients,
)
from kcpgen.emit.triton_prologue import apply_rewrites, in_rows, load_params, local, used_arguments
from kcpgen.emit.triton_score_gradients import EQUATIONS as OF_VALUES
from kcpgen.emit.triton_score_gradients import inverse, score_results
from kcpgen.plan import KernelPlan


def in_flight(plan: KernelPlan) -> bool:
    """Whether there is such a kernel of an op: with chunks of 64, and where gradients of erases pass in one part."""
    apart = plan.exclusive or plan.erases_apart
    return not plan.decay_axis and len(plan.terms) == 1 and not apart and adds_only(plan)


def emit_gradients_hopper(
    plan: KernelPlan,
    launcher: Mapping[str, Value],
    body: Mapping[str, list[str]],
    later: list[dict[str, Value]],
    gradients: list[str],
    more: list[str],
) -> str:
    """launcher, body, later: as of the portable kernel. gradients: that are filled; more: scratch that lines name.

    Where one kernel has both axes, `body` starts every gradient at zero, and those of values are filled too.
    """
    both = on_both_axes(plan)
    inputs, vectors = plan.inputs_on("K"), [*row_names(plan), *column_names(plan)]
    sums = [*products_with(plan, "S", turned=False), *products_with(plan, "dS_next", turned=False)]
    states = [state_tile("S", "states.entering", 1), state_tile("dS_next", "states.leaving", 1)]
    passing = passing_tiles(plan, 0) if both else []
    solved = [value_tile(plan, where_solved(plan, f"dR_{e}"), 0) for e in plan.erasing]
    values = [output_gradient(0), *(value_tile(plan, f"U_{j}", 0) for j in plan.terms)]
    scores = [] if both else [score_tile(name, 0) for name in score_gradients(plan)]
    passed_on, ends = _leaving(plan)
    score_lines = {*load_score_gradients(plan)}  # scores come by tiles
    key_gradients, key_stores = leaving_by_rows(
        body["key_gradients"], {i.name: f"{i.name}_tile.reshape([C, BK])" for i in inputs}
    )
    lines = {
        "early": laid_out(line for line in body["early"] if line not in score_lines),
        "key_inputs": laid_out(_key_inputs(plan)),
        "borders": laid_out([*body["borders"], *_rounded(vectors), *passed_on]),
        "ends": ends,
        "key_gradients": laid_out(key_gradients),
        "key_stores": key_stores,
        "scalars": laid_out(body["scalars"]),
        "stores": laid_out(body["stores"]),
    }
    value_lines = {name: laid_out(found) for name, found in value_axis(plan).items()} if both else {}
    named = [*chain.from_iterable([*value_lines.values(), *lines.values()]), *lines_in(later)]
    sources, value_inputs = [f"{i.name}_source" for i in inputs], inputs_read(plan) if both else []
    value_sources = [f"{i.name}_source" for i in value_inputs]
    state_copies = [str(tile["fetch"]) for tile in states]
    whole = [*passing, *solved, *scores, *values]
    vector_copies = [copy_input(i, 2) for i in inputs]
    late = in_place_of_states(plan) if both else 0
    leaving = {way.partition(".")[0] for way in ways_out(plan).values()} if both else set()
    last = [n for n, tile in enumerate(_lying_there(plan)) if tile in leaving]
    equations = [*(OF_VALUES if both else ()), *OF_KEYS]
    return render(
        "gradients_hopper.py.jinja",
        title=launcher["title"],
        arguments=launcher["arguments"],
        keywords=launcher["keywords"],
        sizes=launcher["sizes"],
        value_input=launcher["value_input"],
        equations=[math(e) for e in plan.form.gradients if e.target.name in equations],
        device_functions=device_functions(named),
        used=in_64_bits(used_arguments(plan, named)),
        sources=[*sources, *value_sources],
        source_tiles=[[f"{i.name}_tile", f"{i.name}_source"] for i in inputs],
        tiles=[*states, *values, *solved, *scores],
        passing=passing,
        places=places(plan) if both else [],
        score_names=score_gradients(plan),
        operand_tiles=[[name, ("S", "dS_next")[n % 2], str(n // 2)] for n, name in enumerate(vectors)],
        state_bytes=nbytes(states),
        vector_bytes=nbytes([], sources),
        first_copies=state_copies[late:],
        late_copies=[line for n, line in enumerate(state_copies[:late]) if n not in last],
        last_copies=[state_copies[n] for n in last],
        state_copies=state_copies,
        vector_copies=vector_copies,
        chunk_bytes=nbytes(whole, value_sources),
        chunk_copies=[*(str(tile["fetch"]) for tile in whole), *(copy_value_input(i, 0) for i in value_inputs)],
        both=int(both),
        solved_before=inverse(plan)[0] if solve_in_scan.handed_back(plan) else "",
        values=value_lines,
        states=[line for name, pairs in sums for line in products(name, pairs)],
        awaited=awaited([name for name, _ in sums]),
        helpers=[
            "barriers",
            "by_rows",
            "fresh_product",
            "in_bf16",
            "laid_by_rows",
            "product",
            *(["running_sum"] if plan.decay_axis is not None else []),
            "store_rows",
        ],
        decays=int(plan.decay_axis is not None),
        placed=list(_placed(vectors)),
        pairs=list(_pairs(plan)),
        sweeps=[
            {**sweep, "loop": laid_out(strings(sweep["loop"])), "scalars": laid_out(strings(sweep["scalars"]))}
            for sweep in later
        ],
        pointers=in_rows(f"{name}_ptr" for name in [*more, *gradients]),
        tensors=in_rows([*(name if name == "d_sums" else f"prepared.{name}" for name in more), *gradients]),
        filled=[f"{name}: torch.Tensor" for name in ([] if both else score_results(plan))]
        + [f"{name}: torch.Tensor | None" for name in gradients],
        key_inputs_names=[i.name for i in inputs],
        value_inputs_names=[i.name for i in value_inputs],
        host_bytes=shared_bytes(plan, len(values) + len(solved), len(score_gradients(plan))),
        **lines,
    )


def _lying_there(plan: KernelPlan) -> list[str]:
    """The tiles that lie where states come later, in the order of these."""
    return [f"{name}_tile" for name in [*only_here(plan), *(i.name for i in inputs_read(plan))]]


def _leaving(plan: KernelPlan) -> tuple[list[str], list[str]]:
    """What the state that leaves has of the one that enters and of what is written, times its gradient: the lines of a
    block of keys, and behind all blocks the sum over tokens, where warps meet."""
    if plan.decay_axis is None:
        return [], []
    inside = ["d_decay_out_so_far += d_decay_out"]
    inside += [f"leaving_so_far += tl.sum(write_{j}_low.to(gl.float32) * d_write_{j}, axis=1)" for j in plan.terms]
    return inside, [
        "dG_end += tl.exp2(G_end) * tl.sum(d_decay_out_so_far, axis=0)",
        "dG_end += tl.sum(leaving_so_far, axis=0)",
    ]


def _key_inputs(plan: KernelPlan) -> Iterator[str]:
    """The key axis's own inputs and parameters, with the options applied, and the operands of pairs."""
    inputs = plan.inputs_on("K")
    yield from (f"{local(plan, i.name)} = by_rows({i.name}_tile, inside)" for i in inputs)
    yield from load_params(plan, [p for p in plan.spec.params if p.axis == "K"])
    yield from apply_rewrites(plan, [i.name for i in inputs], backward=True)
    yield from form_operands(plan)


def _rounded(vectors: Iterable[str]) -> Iterator[str]:
    yield from (f"{name}_low = in_bf16({name})" for name in vectors)


def _placed(vectors: Iterable[str]) -> Iterator[str]:
    yield from (f"{name}_tile.store({name}_low)" for name in vectors)


def _pairs(plan: KernelPlan) -> Iterator[str]:
    """Rows take from columns, and columns from rows, in the same registers as what passes the chunk's borders."""
    rows, columns = row_names(plan), column_names(plan)
    for r in rows:
        for j, c in enumerate(columns):
            yield f"d_{r} = product({score_gradient(r, j)}_tile, {c}_tile, d_{r})"
    for j, c in enumerate(columns):
        for r in rows:
            yield f"d_{c} = product({score_gradient(r, j)}_tile.permute([1, 0]), {r}_tile, d_{c})"
    yield awaited([f"d_{name}" for name in [*rows, *columns]])
    if plan.decay_axis is not None:
        yield from _decayed(rows, columns)


def _decayed(rows: list[str], columns: list[str]) -> Iterator[str]:
    """Rows add to dG, columns take back. Both as they were multiplied, rounded: what a pair adds at the later token it
    takes back at the earlier one, and what leaves the chunk is not what tokens before its write decay."""
    for n, name in enumerate([*rows, *columns]):
        sign = "" if n == 0 else "-" if name in columns else "+"
        yield f"of_decays {sign}= {name}_tile.load(of_keys).to(gl.float32) * d_{name}"
    yield "dG += tl.sum(of_decays, axis=1)"
