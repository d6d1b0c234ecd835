"""`scan.py` and `reverse.py`: the serial kernels, whose loop bodies are the derived block equations themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kcpgen.derivation.chunk_form import Equation
from kcpgen.emit.render import render
from kcpgen.emit.triton_blocks import BlockPrinter, math, variable
from kcpgen.plan import KernelPlan


def emit_scan(plan: KernelPlan, shared: dict[str, object]) -> str:
    equations = [e for e in plan.form.solved if e.target.name in ("U", "O", "S_next")]
    out = BlockPrinter(accumulators=frozenset({"S", "U"}), rename={"S_next": "S"}, decay=_decay_factor(plan))
    key_operands = ["q_in", *(f"w_out_{j}" for j in plan.terms), *(f"W_{i}" for i in plan.erasing)]
    value_operands = [f"U0_{j}" for j in plan.terms]
    score_operands = [f"A_{j}" for j in plan.terms]
    return render(
        "scan.py.jinja",
        **_only(shared, "title"),
        equations=[math(e) for e in equations],
        operands=[*key_operands, *value_operands, *score_operands, *_decay_operand(plan)],
        key_operands=key_operands,
        value_operands=value_operands,
        score_operands=score_operands,
        corrected=[f"U_{i}" for i in plan.erasing],
        decay_load=_decay_load(plan),
        correct=_corrected(out, equations, "U"),
        output=[out.assign(e) for e in equations if e.target.name == "O"],
        advance=[out.assign(e) for e in equations if e.target.name == "S_next"],
    )


def emit_reverse(plan: KernelPlan, shared: dict[str, object]) -> str:
    equations = plan.form.reverse_scan
    out = BlockPrinter(accumulators=frozenset({"dS_next", "dU"}), rename={"dS": "dS_next"}, decay=_decay_factor(plan))
    key_operands = ["q_in", *(f"w_out_{j}" for j in plan.terms), *(f"W_{i}" for i in plan.erasing)]
    score_operands = [f"A_{j}" for j in plan.terms]
    return render(
        "reverse.py.jinja",
        **_only(shared, "title"),
        equations=[math(e) for e in equations],
        operands=[*key_operands, *score_operands, *_decay_operand(plan)],
        key_operands=key_operands,
        score_operands=score_operands,
        gradients=[f"dU_{j}" for j in plan.terms],
        decay_load=_decay_load(plan),
        correct=_corrected(out, equations, "dU"),
        advance=[out.assign(e) for e in equations if e.target.name == "dS"],
    )


def _only(shared: dict[str, object], *names: str) -> dict[str, object]:
    return {name: shared[name] for name in names}


def _decay_operand(plan: KernelPlan) -> list[str]:
    return [] if plan.decay_axis is None else ["decay_out"]


def _decay_load(plan: KernelPlan) -> list[str]:
    if plan.decay_axis is None:
        return []
    return ["decay_out = tl.load(decay_out_ptr + " + ("at * KP + keys)" if plan.decay_axis else "at)")]


def _decay_factor(plan: KernelPlan) -> str:
    if plan.decay_axis is None:
        return ""
    return "decay_out[:, None]" if plan.decay_axis else "decay_out"


def _corrected(out: BlockPrinter, equations: Iterable[Equation], target: str) -> list[str]:
    wanted: Sequence[Equation] = [e for e in equations if e.target.name == target]
    return [line.replace("LOW", "q_in.dtype") for e in wanted for line in out.corrected(e)]


__all__ = ["emit_reverse", "emit_scan", "variable"]
