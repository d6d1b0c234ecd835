"""Where the scan itself makes the scores of reads, instead of reading what `prepare` made of them.

    A = tril(since * scale * read write^T)

`prepare` would read the queries for them alone where serial kernels read vectors in place, and hand on [C, C] numbers
that every program of the scan copies. The scan has reads and writes of a chunk anyway; what it lacks are numbers of
tokens, where one number is a token's whole decay. Warps of their own make them, a chunk or two ahead of those that
multiply by the state. Where a backward follows, the programs of one block of columns leave A behind for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from kcpgen.emit.roles import in_roles
from kcpgen.emit.triton_prologue import printer
from kcpgen.plan import KernelPlan


def scores_in_scan(plan: KernelPlan) -> bool:
    """Whether a scan in roles can: of one term, decayed by tokens or not at all."""
    return in_roles(plan) and plan.decays_rows and len(plan.terms) == 1


def fields(plan: KernelPlan) -> dict[str, tuple[str, str]]:
    """Scratch that only such a scan reads, as in `triton_scratch.scratch`: a row of numbers a chunk each."""
    if not scores_in_scan(plan) or plan.decay_axis is None:
        return {}
    found = {"G": "logarithm of what decays from the chunk's start, in powers of two"}
    if plan.read.coefficient != 1:
        found["score_scale"] = "scale of a read"
    where = "where the scan makes A"
    return {name: ("C, dtype=torch.float32", f"[NT, HV, C] fp32, {what}, {where}") for name, what in found.items()}


def condition(plan: KernelPlan, name: str) -> str:
    """Host code: when a field is scratch; "" where nothing hangs on who makes scores."""
    if not scores_in_scan(plan):
        return ""
    return "for_roles" if name in fields(plan) else "keeps_A" if name.startswith("A_") else ""


def store_rows(plan: KernelPlan) -> Iterator[str]:
    names = fields(plan)
    if not names:
        return
    yield "if G_ptr is not None:  # the scan makes A"
    yield "    tl.store(G_ptr + at * C + rows, G)"
    if "score_scale" in names:
        code, coefficient = printer(plan), plan.read.coefficient
        one_each = "" if code.varies_by_token(coefficient) else " * tl.full((C,), 1.0, tl.float32)"
        yield f"    tl.store(score_scale_ptr + at * C + rows, {code.atom(coefficient, '')}{one_each})"


def loads(plan: KernelPlan) -> list[str]:
    """Of numbers of tokens, which the product is scaled by."""
    if not scores_in_scan(plan):
        return []
    columns = [f"{name}_written = {name}_ring.index(stage).load(of_scores)" for name in _since(plan)]
    rows = [*_since(plan), *_scale(plan)]
    return [*(f"{name}_reading = {name}_ring.index(stage).permute([1, 0]).load(of_scores)" for name in rows), *columns]


def numbers(plan: KernelPlan) -> list[str]:
    """The fields that hold these."""
    return [*_since(plan), *_scale(plan)] if scores_in_scan(plan) else []


def lines(plan: KernelPlan) -> list[str]:
    """From the product to what is a right operand.

    What a token would take of later ones, and all that lies behind a sequence's end, is selected away, not multiplied
    by zero: it may be no number, and others may clear it meanwhile.
    """
    if not scores_in_scan(plan):
        return []
    since = [f"A_0 *= gl.exp2({name}_reading - {name}_written)" for name in _since(plan)]
    scaled = [f"A_0 *= {name}_reading" for name in _scale(plan)]
    inside = "(written[None, :] <= reading[:, None]) & (reading < tokens - c * C)[:, None]"
    return [*since, *scaled, f"A_0_low = gl.where({inside}, A_0, 0.0).to(low)"]


def awaited() -> list[str]:
    """What multiplies by them waits for them."""
    return ["mbarrier.wait(scored.index(stage), (c // STAGES) & 1)", "A_0_tile = A_0_ring.index(stage)"]


def equations() -> list[str]:
    return ["A_0 = tril(since scale read write^T)"]


def _since(plan: KernelPlan) -> list[str]:
    return [name for name in fields(plan) if name == "G"]


def _scale(plan: KernelPlan) -> list[str]:
    if plan.read.coefficient == 1:
        return []
    return ["score_scale" if plan.decay_axis == "" else "from_start"]
