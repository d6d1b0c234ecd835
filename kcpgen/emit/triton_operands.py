"""The rows and columns of the scores, as the backward sees them: whole vectors, one variable each."""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from kcpgen.emit.triton_prologue import (
    apply_rewrites,
    load_inputs,
    load_params,
    load_sums,
    masked,
    printer,
)
from kcpgen.plan import KernelPlan
from kcpgen.spec import Param, TokenInput


def operands(plan: KernelPlan) -> dict[str, sympy.Expr]:
    """The row and column operands of the pairs, whole: read, erase_i, write_j."""
    rows = {"read": plan.read.full, **{f"erase_{i}": row.full for i, row in plan.erase.items()}}
    return {**rows, **{f"write_{j}": plan.bases[base] for j, base in enumerate(plan.write)}}


def row_names(plan: KernelPlan) -> list[str]:
    return ["read", *(f"erase_{i}" for i in plan.erasing)]


def column_names(plan: KernelPlan) -> list[str]:
    return [f"write_{j}" for j in plan.terms]


def score_gradients(plan: KernelPlan) -> list[str]:
    """dA_j of what is read and dL_i_j of what is erased, [C, C] each."""
    return [f"dA_{j}" for j in plan.terms] + [f"dL_{i}_{j}" for i in plan.erasing for j in plan.terms]


def score_gradient(row: str, column: int) -> str:
    """The gradient of the score between a row operand and the column operand of a term."""
    return f"dA_{column}" if row == "read" else f"dL_{row.removeprefix('erase_')}_{column}"


def whole_scores(plan: KernelPlan) -> list[str]:
    """Gradients of scores that pass between kernels in fp32: the far end of a gradient that nothing else drowns."""
    return [name for name in score_gradients(plan) if plan.erases_apart and name.startswith("dL")]


def load_score_gradients(plan: KernelPlan) -> Iterator[str]:
    """As operands of products, and turned; those that come whole in two parts."""
    whole = whole_scores(plan)
    for name in score_gradients(plan):
        if name in whole:
            yield f"{name} = tl.load({name}_ptr + score_tile)"
            yield f"{name}_low = {name}.to(LOW)"
            yield f"{name}_rest = ({name} - {name}_low.to(tl.float32)).to(LOW)"
        else:
            yield f"{name}_low = tl.load({name}_ptr + score_tile)"
    yield from (f"{name}_T_low = tl.trans({name}_low)" for name in score_gradients(plan))


def row_of(score: str) -> str:
    """The row operand that a score gradient belongs to."""
    return "read" if score.startswith("dA") else f"erase_{score.split('_')[1]}"


def is_exclusive(plan: KernelPlan, row: str) -> bool:
    """Whether a row operand reads the state before its token's decay."""
    return row != "read" and plan.erase[int(row.removeprefix("erase_"))].exclusive


def scalar_inputs(plan: KernelPlan) -> list[TokenInput | Param]:
    """What has one number per token or head."""
    return [*plan.inputs_on(""), *(p for p in plan.spec.params if not p.axis)]


def load_scalars(plan: KernelPlan) -> Iterator[str]:
    """Sums that the forward left, inputs and parameters of one number, with the options applied."""
    inputs = plan.inputs_on("")
    yield from load_sums(plan)
    yield from load_inputs(plan, inputs)
    yield from load_params(plan, [p for p in plan.spec.params if not p.axis])
    yield from apply_rewrites(plan, [i.name for i in inputs], backward=True)


def load_keys(plan: KernelPlan) -> Iterator[str]:
    """The key axis's own inputs and parameters, with the options applied."""
    inputs = plan.inputs_on("K")
    yield from load_inputs(plan, inputs)
    yield from load_params(plan, [p for p in plan.spec.params if p.axis == "K"])
    yield from apply_rewrites(plan, [i.name for i in inputs], backward=True)


def form_operands(plan: KernelPlan) -> Iterator[str]:
    code = printer(plan)
    for name, expr in operands(plan).items():
        yield f"{name} = {masked(plan, expr, 'K', code.code(expr, 'K'))}"
