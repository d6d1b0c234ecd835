"""`pair_gradients.py`: near pairs of tokens in the backward, where every channel decays on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_operands import (
    column_names,
    form_operands,
    is_exclusive,
    load_keys,
    load_scalars,
    row_names,
    score_gradient,
    score_gradients,
)
from kcpgen.emit.triton_prologue import in_rows, log_decay, used_arguments
from kcpgen.plan import KernelPlan


def emit_pair_gradients(plan: KernelPlan, shared: Mapping[str, Value]) -> str:
    row_operands = [*load_scalars(plan), *load_keys(plan), log_decay(plan), *form_operands(plan)]
    rows, columns, scores = row_names(plan), column_names(plan), score_gradients(plan)
    pointers = [*scores, *(["sums"] if plan.sums else [])]
    pair = list(_pair(plan))
    results = [f"d_{name}" for name in (*rows, *columns)]
    sizes = shared["sizes"]
    assert isinstance(sizes, list)
    return render(
        "pair_gradients.py.jinja",
        title=shared["title"],
        arguments=shared["arguments"],
        keywords=shared["backward_keywords"],
        sizes=[sizes[0], sizes[1].replace("HV, V =", "HV =").replace("shape[2:]", "shape[2]")],
        value_input=shared["value_input"],
        used=used_arguments(plan, row_operands),
        device_functions=device_functions([*row_operands, *pair]),
        row_operands=row_operands,
        rows=rows,
        erases=rows[1:],
        columns=columns,
        scores=scores,
        own_pairs=[[c, score_gradient("read", j)] for j, c in enumerate(columns)],
        own_read=" + ".join(f"{score_gradient('read', j)} * {c}s[t]" for j, c in enumerate(columns)),
        before=plan.exclusive,
        pair=pair,
        operand_pointers=in_rows(f"{name}_ptr" for name in pointers),
        operand_tensors=in_rows([*scores, *(["prepared.sums"] if plan.sums else [])]),
        score_arguments=[f"{name}: torch.Tensor" for name in scores],
        result_names=results,
        result_pointers=in_rows(f"{name}_ptr" for name in results),
        result_tensors=in_rows(results),
    )


def _pair(plan: KernelPlan) -> Iterator[str]:
    """Tokens t > s: what arrives of column s at row t, and the other way round."""
    rows = row_names(plan)
    kinds = {decay: [r for r in rows if is_exclusive(plan, r) == late] for decay, late in _decays(plan)}
    for j, column in enumerate(column_names(plan)):
        for decay, chosen in kinds.items():
            yield f"arriving = {column}s[s] * {decay}"
            yield from (f"d_{row} += {score_gradient(row, j)} * arriving" for row in chosen)
        shares = (
            f"({' + '.join(f'{score_gradient(row, j)} * {row}s[t]' for row in chosen)}) * {decay}"
            for decay, chosen in kinds.items()
        )
        grown = f"d_{column}s[s] + {' + '.join(shares)}"
        yield f"d_{column}s = replaced(d_{column}s, s, {grown})"


def _decays(plan: KernelPlan) -> list[tuple[str, bool]]:
    return [("decay", False), *([("decay_before", True)] if plan.exclusive else [])]
