"""`summary.py`: the chain of transitions, its loop body being the derived M applied to what came before."""

from __future__ import annotations

from collections.abc import Iterator

from kcpgen.derivation.chunk_form import Equation, Factor
from kcpgen.emit.render import render
from kcpgen.emit.roles import in_roles
from kcpgen.emit.triton_blocks import math, variable
from kcpgen.emit.triton_scratch import field_of, row_decays
from kcpgen.emit.triton_serial import loads
from kcpgen.plan import KernelPlan


def emit_summary(plan: KernelPlan) -> str:
    """For ops that erase; where nothing is erased, M is the product of the chunks' decays and needs no kernel."""
    (transition,) = [e for e in plan.form.summary if e.target.name == "M"]
    operands = loads(plan, list(_operands(transition)), "KP")
    fields = operands.pop("key_operands")
    del operands["low"]
    return render(
        "summary.py.jinja",
        title=plan.spec.title,
        transition=math(transition).removeprefix("M = "),
        **operands,
        operands=fields,
        in_roles=int(in_roles(plan)),
        advance=_advance(plan, transition),
    )


def _operands(transition: Equation) -> Iterator[str]:
    factors = [f for term in transition.terms for f in term.factors if f.name != "decay_out"]
    yield from dict.fromkeys(variable(f) for f in factors)


def _advance(plan: KernelPlan, transition: Equation) -> list[str]:
    """M_T <- M_T M_chunk^T: each product of two matrices is applied factor by factor, the right one first."""
    parts = ["M_T" if plan.decay_axis is None else f"M_T * decay_out{'[None, :]' if plan.decay_axis else ''}"]
    lines = []
    for number, term in enumerate(t for t in transition.terms if t.factors[0].name != "decay_out"):
        left, right = term.factors
        lines.append(f"X_{number}_T = dot_fp32(M_T, {_turned(plan, right)})")
        rows = row_decays(plan).get(left.name)
        seen = f"X_{number}_T * {rows[0]}[None, :]" if rows else f"X_{number}_T"
        parts.append(f"{'-' if term.sign < 0 else '+'} dot_fp32({seen}, {_turned(plan, left)})")
    return [*lines, f"M_T = {' '.join(parts)}"]


def _turned(plan: KernelPlan, factor: Factor) -> str:
    tile = f"{field_of(plan, variable(factor))}_tile"
    return tile if factor.transposed else f"tl.trans({tile})"
