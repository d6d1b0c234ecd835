"""`scan.py` and `reverse.py`: the serial kernels, whose loop bodies are the derived block equations themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kcpgen.derivation.chunk_form import Equation
from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_blocks import BlockPrinter, math
from kcpgen.plan import KernelPlan

LOW = "q_in_tile.dtype"


def emit_scan(plan: KernelPlan) -> str:
    equations = [e for e in plan.form.solved if e.target.name in ("U", "O", "S_next")]
    values = {e.target.index[0]: e for e in equations if e.target.name == "U"}
    out = _printer(plan, {"S", "U"}, {"S_next": "S"})
    whole = _in_halves(out, "S") if plan.reads_state_alone else out
    return render(
        "scan.py.jinja",
        **_operands(plan, value_operands=[f"U0_{j}" for j in plan.terms]),
        equations=[math(e) for e in equations],
        corrected=[[f"U_{i}", f"U0_{i}"] for i in plan.erasing],
        written=_corrected(out, [values[p] for p in plan.pure_writes], "U"),
        correct=_corrected(whole, [values[e] for e in plan.erasing], "U"),
        output=_assigned(out, equations, "O"),
        advance=_assigned(out, equations, "S_next"),
    )


def emit_states(plan: KernelPlan) -> str:
    (advance,) = (e for e in plan.form.solved if e.target.name == "S_next")
    out = _printer(plan, {"S"}, {"S_next": "S"})
    named = replace(out, rename={**out.rename, **{f"U_{j}": f"U0_{j}" for j in plan.terms}})
    operands = _operands(plan, value_operands=[f"U0_{j}" for j in plan.terms])
    keys = [f"w_out_{j}" for j in plan.terms]
    operands |= {"key_operands": keys, "operands": [*keys, *(f"U0_{j}" for j in plan.terms)]}
    del operands["score_operands"]
    return render("states.py.jinja", **operands, next=math(advance).partition(" = ")[2], advance=named.assign(advance))


def emit_reverse(plan: KernelPlan) -> str:
    equations = plan.form.reverse_scan
    out = _printer(plan, {"dS_next", "dU"}, {"dS": "dS_next"})
    operands = _operands(plan, value_operands=[])
    del operands["value_operands"]
    return render(
        "reverse.py.jinja",
        **operands,
        equations=[math(e) for e in equations],
        gradients=[f"dU_{j}" for j in plan.terms],
        solved=[f"dU_{e}" for e in plan.erasing],
        correct=_corrected(_in_halves(out, "dS_next"), equations, "dU"),
        advance=_assigned(out, equations, "dS"),
    )


def _printer(plan: KernelPlan, accumulators: set[str], rename: dict[str, str]) -> BlockPrinter:
    return BlockPrinter(
        accumulators=frozenset({*accumulators, *rename.values(), *rename}),
        rename=rename,
        tile_suffix="_tile",
        transposed=True,
        decay="" if plan.decay_axis is None else "decay_out",
        decay_axis=plan.decay_axis or "",
    )


def _operands(plan: KernelPlan, value_operands: list[str]) -> dict[str, Value]:
    key_operands = ["q_in", *(f"w_out_{j}" for j in plan.terms), *(f"W_{i}" for i in plan.erasing)]
    score_operands = [f"A_{j}" for j in plan.terms]
    decay = [] if plan.decay_axis is None else ["decay_out"]
    return {
        "title": plan.spec.title,
        "operands": [*key_operands, *value_operands, *score_operands],
        "key_operands": key_operands,
        "value_operands": value_operands,
        "score_operands": score_operands,
        "decay_operand": decay,
        "decay_load": [f"{d} = tl.load({d}_ptr + at{' * KP + keys' if plan.decay_axis else ''})" for d in decay],
    }


def _in_halves(out: BlockPrinter, state: str) -> BlockPrinter:
    return replace(out, kept_whole=frozenset({state}))


def _corrected(out: BlockPrinter, equations: Sequence[Equation], target: str) -> list[str]:
    return [line for e in equations if e.target.name == target for line in out.corrected(e, LOW)]


def _assigned(out: BlockPrinter, equations: Sequence[Equation], target: str) -> list[str]:
    return [out.assign(e) for e in equations if e.target.name == target]
