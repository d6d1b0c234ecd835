"""What the key axis of the backward is made of, whether one kernel walks it or two."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product

from kcpgen.emit.render import Value
from kcpgen.emit.triton_blocks import variable
from kcpgen.emit.triton_operands import (
    column_names,
    operands,
    row_names,
    score_gradient,
    score_gradients,
    whole_scores,
)
from kcpgen.emit.triton_score_gradients import (
    block_printer,
    lines_of,
    score_results,
    summed_over_values,
    tensor_of,
)
from kcpgen.emit.triton_sweeps import Sweeps, start_gradient, store_input, store_param
from kcpgen.plan import KernelPlan
from kcpgen.spec import Param, TokenInput
from kcpgen.tokenwise import names

EQUATIONS = ("da_in", "dq_in", "dw_out", "ddecay_out")


def strings(value: Value) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


def chunk_operands(plan: KernelPlan) -> list[str]:
    """Scratch that the walk over states reads, beside sums."""
    return [*_left_by_values(plan), *score_gradients(plan)]


def chunk_tensors(plan: KernelPlan) -> list[str]:
    """What the launcher passes for `chunk_operands`."""
    return [*(tensor_of(plan, name) for name in _left_by_values(plan)), *score_gradients(plan)]


def _left_by_values(plan: KernelPlan) -> list[str]:
    """Corrected values, and dR in the place of dU."""
    solved = [f"dU_{e}{part}" for part in ("", "_rest") for e in plan.erasing if not part or plan.erases_apart]
    return [*(f"U_{j}" for j in plan.terms), *solved]


def launcher(plan: KernelPlan, shared: Mapping[str, Value], sweeps: Sweeps) -> dict[str, Value]:
    """The parts of the host function `gradients` that do not depend on its kernels."""
    declared: list[TokenInput | Param] = [*plan.spec.inputs, *plan.spec.params]
    on_values = [d for d in declared if d.axis == "V"] + summed_over_values(plan)
    return {
        "title": shared["title"],
        "arguments": shared["arguments"],
        "keywords": shared["backward_keywords"],
        "passed": [keyword.partition(":")[0] for keyword in strings(shared["backward_keywords"])],
        "sizes": shared["sizes"],
        "value_input": shared["value_input"],
        "inputs": [d.name for d in declared],
        "differentiable": [d.name for d in declared],
        "score_results": score_results(plan),
        "value_gradients": [f"d_{d.name}" for d in declared if d in on_values],
        "allocate_values": [_allocated(plan, sweeps, d) for d in declared if d in on_values],
        "allocate_keys": [_allocated(plan, sweeps, d) for d in declared if d not in on_values],
        "of_inputs": [f"(d_{i.name}, {i.name})" for i in plan.spec.inputs],
        "of_params": [f"sum_over_chunks(d_{p.name}, {p.name})" for p in plan.spec.params],
    }


def pair_shares(plan: KernelPlan, weight: Callable[[str, int, str], str], suffix: str) -> tuple[list[str], list[str]]:
    """Products that give the gradients of rows, and of columns, from the pairs of tokens.

    weight(row, term, turned) is the gradient of a score, transposed where turned is "_T"; operands end in `suffix`.
    """
    rows, columns = row_names(plan), column_names(plan)

    def share(row: str, j: int, turned: str, operand: str) -> str:
        return f"dot({weight(row, j, turned)}, {operand}{suffix}, PRECISION)"

    of_rows = [" + ".join(share(r, j, "", c) for j, c in enumerate(columns)) for r in rows]
    return of_rows, [" + ".join(share(r, j, "_T", r) for r in rows) for j in range(len(columns))]


def rest_shares(plan: KernelPlan, weight: Callable[[str], str], suffix: str) -> dict[str, str]:
    """By row: likewise, from what rounding left of the gradients of its scores."""
    whole = whole_scores(plan)
    found: dict[str, list[str]] = {}
    for row, (j, column) in product(row_names(plan), enumerate(column_names(plan))):
        if (score := score_gradient(row, j)) in whole:
            found.setdefault(row, []).append(f"dot({weight(score)}, {column}{suffix}, PRECISION)")
    return {row: " + ".join(products) for row, products in found.items()}


def later_sweeps(sweeps: Sweeps) -> list[dict[str, Value]]:
    """The walks over the key axis after the main one, for a template."""
    return [
        {"condition": condition, "loop": lines_of(loop), "scalars": scalars}
        for condition, loop, scalars in sweeps.later()
    ]


def lines_in(value: Value) -> list[str]:
    """Every line of text in a template's context."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [line for item in value.values() for line in lines_in(item)]
    return [] if isinstance(value, int) else [line for item in value for line in lines_in(item)]


def _allocated(plan: KernelPlan, sweeps: Sweeps, d: TokenInput | Param) -> str:
    if isinstance(d, Param):
        return f"d_{d.name} = partial_sums({d.name}, layout.chunk_count, HV)"
    carrying = "True" if d in summed_over_values(plan) else sweeps.carrying(d.name)
    return f"d_{d.name} = gradient_buffer({d.name}, HV" + (")" if carrying == "False" else f", {carrying})")


def resumed(d: TokenInput | Param) -> list[str]:
    """The gradient so far, from the value axis."""
    if isinstance(d, TokenInput):
        return [f"d_{d.name} = load_column(d_{d.name}_ptr + token_head, HV, rows, count)"]
    return [start_gradient(d), f"if d_{d.name}_ptr is not None:", f"    d_{d.name} += tl.load(d_{d.name}_ptr + at)"]


def key_sums(plan: KernelPlan) -> list[str]:
    """Sums over the value axis, by key channel: of rows, of columns, of the state's own decay."""
    return ["dq_in", *(f"da_in_{i}" for i in plan.erasing), *(f"dw_out_{j}" for j in plan.terms)]


def key_pass(plan: KernelPlan, *, rests: bool) -> list[str]:
    """One step of the sums over the value axis. rests: with what rounding left of dR, where that is passed on."""
    out = block_printer(plan, whole=rests)
    lines = [
        *(f"U_{j} = tl.load(U_{j}_ptr + value_tile)" for j in plan.terms),
        *(f"dR_{e}_low = tl.load(dU_{e}_ptr + value_tile)  # left there by score_gradients" for e in plan.erasing),
    ]
    if plan.erases_apart and rests:
        lines += _load_rests(plan)
    for e in plan.form.gradients:
        if e.target.name in EQUATIONS[:3]:
            lines.append(f"{variable(e.target)} += {out.right_side(e.terms)}")
    return lines


def key_rests(plan: KernelPlan) -> list[str]:
    """One step of the sums over what rounding left of dR, by themselves: one tile less in flight in `key_pass`."""
    if not plan.erases_apart:
        return []
    out = block_printer(plan, whole=False)
    sums = [
        f"{variable(e.target)} += {out.right_side(e.terms)}" for e in plan.form.gradients if e.target.name == "da_in"
    ]
    return [*_load_rests(plan), *(re.sub(r"\b(dR_\d+)_low\b", r"\1_rest", line) for line in sums)]


def _load_rests(plan: KernelPlan) -> list[str]:
    return [f"dR_{e}_rest = tl.load(dU_{e}_rest_ptr + value_tile)" for e in plan.erasing]


def make_sweeps(plan: KernelPlan) -> Sweeps:
    """Gradients of the operands, carried to the inputs."""
    sweeps = Sweeps(plan=plan)
    for value in plan.values:
        for name in names(value):
            sweeps.complete.setdefault(name, 0)
    for name, expr in operands(plan).items():
        sweeps.pull(expr, f"d_{name}", name, in_loop=True)
    if plan.decay_axis is not None:
        sweeps.pull(plan.decay_log, "d_log_decay", "decay", in_loop=plan.decay_axis == "K")
    sweeps.finish()
    return sweeps


def store_scalars(plan: KernelPlan) -> list[str]:
    """Gradients of what has one number per token or head."""
    lines = [store_input(i) for i in plan.inputs_on("")]
    for p in plan.spec.params:
        if not p.axis:
            lines += [f"if d_{p.name}_ptr is not None:", f"    {store_param(p)}"]
    return lines
