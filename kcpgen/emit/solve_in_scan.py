"""Where the scans themselves solve for a chunk's corrected values, instead of reading what `prepare` made of the solve.

    R = strength value + a_in S        what each token writes, before it is told of the chunk's other tokens
    U = T R = R + strict_tril(T) R

    dR = T^T dU = dU + strict_tril(T)^T dU        of the backward
    dS = .. + a_in^T dR

With W = T a_in and B = T strength, which `prepare` would hand on, only one product would wait for another. But W is as
large as the keys: where a chunk erases along the vectors that it writes, the scan has those anyway, decays of tokens
scale rows of a product, and of each chunk 16 KB fewer are read, and as many fewer written where nobody else wants W (32
of 160, at K = V = 128 and 64 tokens): W and B are 24, T is 8. R is also small where a state knows its values:
rounding it loses little of U. T is rounded down its columns, so that sums of its numbers, which are what a state sees,
lose no more than one of them (`hopper_ops.rounded_in_columns`). dU is not small, and dR may be a
difference of many: T and dU enter the reverse scan in two parts each. Only M keeps W.
"""

from __future__ import annotations

from collections.abc import Iterator

from kcpgen.emit import triton_values
from kcpgen.emit.roles import in_roles
from kcpgen.emit.triton_blocks import math
from kcpgen.emit.triton_prologue import printer
from kcpgen.plan import KernelPlan


def solves_in_scan(plan: KernelPlan) -> bool:
    """Whether a scan in roles can: of one term that erases along what it writes, decayed by tokens or not at all."""
    if not in_roles(plan):
        return False
    if not (plan.decays_rows and len(plan.terms) == 1 and triton_values.own_values(plan) == [*plan.terms]):
        return False
    (term,) = plan.terms
    return plan.erase[term].base == plan.write[term] and not triton_values.in_parts(plan)


def fields(plan: KernelPlan) -> dict[str, tuple[str, str]]:
    """Scratch that only such scans read, as in `triton_scratch.scratch`."""
    if not solves_in_scan(plan):
        return {}
    (term,) = plan.terms
    return {
        f"inverse_{term}": ("C, C", "[NT, HV, C, C] (I - L)^-1 below its diagonal, where the scan solves"),
        f"inverse_{term}_rest": ("C, C", "[NT, HV, C, C] what rounding left of it, for the reverse scan"),
        "erase_from_start": (
            "C, dtype=torch.float32",
            "[NT, HV, C] fp32, of an erase: decay from the chunk's start and coefficient, where the scan solves",
        ),
    }


def read_by_scan(plan: KernelPlan) -> list[str]:
    """Of the fields; the reverse scan reads them all."""
    return [name for name in fields(plan) if not name.endswith("_rest")]


def handed_back(plan: KernelPlan) -> dict[str, str]:
    """What the reverse scan leaves where it solves, in the place of what it leaves elsewhere."""
    return {f"dU_{term}": f"dR_{term}" for term in plan.erasing} if solves_in_scan(plan) else {}


def condition(plan: KernelPlan, name: str) -> str:
    """Host code: when a field is scratch; "" where nothing hangs on who solves."""
    if not solves_in_scan(plan):
        return ""
    if name.startswith("T_"):
        return "differentiable and not for_roles"
    if name in fields(plan):
        return "for_roles" if name in read_by_scan(plan) else "differentiable and for_roles"
    return {"B": "not for_roles", "W": "keeps_W"}.get(name.split("_")[0], "")


def store_rows(plan: KernelPlan) -> Iterator[str]:
    """What scales an erase vector that meets the state at the chunk's start."""
    if not solves_in_scan(plan):
        return
    (row,) = plan.erase.values()
    code = printer(plan)
    factors = [] if row.coefficient == 1 else [code.atom(row.coefficient, "")]
    if plan.decay_axis == "":
        factors.append(f"tl.exp2({'G_before' if row.exclusive else 'G'})")
    value = " * ".join(factors) or "1.0"
    if plan.decay_axis is None and not code.varies_by_token(row.coefficient):
        value = f"tl.full((C,), {value}, tl.float32)"
    yield "if erase_from_start_ptr is not None:  # the scan solves"
    yield f"    tl.store(erase_from_start_ptr + at * C + rows, {value})"


def equations(plan: KernelPlan) -> list[str]:
    """As the scan works them out, for a person."""
    (term,) = plan.terms
    scale = f"strength_{term} " if f"strength_{term}" in triton_values.strengths(plan) else ""
    return [f"R_{term} = {scale}value_{term} + a_in_{term} S", f"U_{term} = R_{term} + inverse_{term} R_{term}"]


def reverse_equations(plan: KernelPlan) -> list[str]:
    """Those of the reverse scan, likewise."""
    (term,) = plan.terms
    corrected, advance = (math(e) for e in plan.form.reverse_scan)
    solved = f"dR_{term} = dU_{term} + inverse_{term}^T dU_{term}"
    return [corrected, solved, advance.replace(f"W_{term}^T dU_{term}", f"a_in_{term}^T dR_{term}")]
