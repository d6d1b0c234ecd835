"""Which ops have serial kernels in roles (`gluon_serial`)."""

from __future__ import annotations

from kcpgen.emit import triton_values
from kcpgen.plan import KernelPlan


def in_roles(plan: KernelPlan) -> bool:
    """Whether there are such kernels of an op: a product can be added to a sum, not subtracted from it."""
    form = plan.form
    equations = [*form.solved, *form.reverse_scan, *form.summary, *triton_values.equations(plan).values()]
    return all(
        term.sign > 0 for e in equations if e.target.name in ("U", "O", "S_next", "dU", "dS", "M") for term in e.terms
    )
