"""`far_gradients.py`: states and pairs of tokens far apart in the backward, where every channel decays on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from kcpgen.emit.gluon_far_gradients import in_flight
from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_blocks import math
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_key_axis import (
    EQUATIONS,
    chunk_operands,
    chunk_tensors,
    key_pass,
    key_sums,
    pair_shares,
    rest_shares,
    strings,
)
from kcpgen.emit.triton_operands import (
    column_names,
    form_operands,
    is_exclusive,
    load_keys,
    load_scalars,
    load_score_gradients,
    row_names,
    score_gradient,
    score_gradients,
)
from kcpgen.emit.triton_prologue import in_rows, log_decay, used_arguments
from kcpgen.plan import KernelPlan


def emit_far_gradients(plan: KernelPlan, shared: Mapping[str, Value]) -> str:
    scores, results = score_gradients(plan), [f"d_{name}" for name in (*row_names(plan), *column_names(plan))]
    body: dict[str, list[str]] = {
        "early": [
            *load_scalars(plan),
            *load_score_gradients(plan),
        ],
        "key_start": [f"{name} = tl.zeros((C, BK), tl.float32)" for name in key_sums(plan)]
        + ["d_decay_out = tl.zeros((BK,), tl.float32)"],
        "key_pass": key_pass(plan, rests=True),
        "key_inputs": [*load_keys(plan), log_decay(plan), *form_operands(plan)],
        "borders": list(_borders(plan)),
        "pairs": _pairs(plan),
    }
    whole = list(chain.from_iterable(body.values()))
    sums = ["sums"] if plan.sums else []
    return render(
        "far_gradients.py.jinja",
        title=shared["title"],
        arguments=shared["arguments"],
        keywords=shared["backward_keywords"],
        sizes=shared["sizes"],
        in_flight=int(in_flight(plan)),
        passed=[d.name for d in (*plan.spec.inputs, *plan.spec.params)],
        passed_by_name=[
            *(keyword.partition(":")[0] for keyword in strings(shared["backward_keywords"])),
            *("do", "states", "corrected_gradients", "chunks"),
            *scores,
        ],
        **body,
        used=used_arguments(plan, whole),
        equations=[math(e) for e in plan.form.gradients if e.target.name in EQUATIONS],
        device_functions=device_functions(["load_tile(", "of_block(", *whole]),
        chunk_operands=in_rows(f"{name}_ptr" for name in [*chunk_operands(plan), *sums]),
        launch_operands=in_rows([*chunk_tensors(plan), *(f"prepared.{name}" for name in sums)]),
        score_arguments=[f"{name}: torch.Tensor" for name in scores],
        results=results,
        result_pointers=in_rows(f"{name}_ptr" for name in [*results, "dG_border", "dG_end"]),
        result_tensors=in_rows([*results, "dG_border", "dG_end"]),
    )


def _borders(plan: KernelPlan) -> Iterator[str]:
    """Rows read the state at the chunk's start, columns reach its end."""
    rows = {"read": "dq_in", **{f"erase_{i}": f"da_in_{i}" for i in plan.erasing}}
    yield "decay_parts = in_parts(log_decay, LOW)"
    yield "G = sum_tokens(up_to(rows), decay_parts)"
    if any(is_exclusive(plan, row) for row in rows):
        yield "G_before = G - log_decay"
    yield "G_middle = tl.sum(tl.where((rows < C // 2)[:, None], log_decay, 0.0), axis=0)"
    yield "G_end = tl.sum(log_decay, axis=0)"
    for row, total in rows.items():
        yield f"d_{row} = {total} * tl.exp2({'G_before' if is_exclusive(plan, row) else 'G'})"
    for j in plan.terms:
        yield f"d_write_{j} = dw_out_{j} * tl.exp2(tl.minimum(G_end[None, :] - G, 0.0))"
    leaving = "".join(f" + tl.sum(write_{j} * d_write_{j}, axis=0)" for j in plan.terms)
    yield f"dG_end = tl.exp2(G_end) * d_decay_out{leaving}"


def _pairs(plan: KernelPlan) -> list[str]:
    rows, columns = row_names(plan), column_names(plan)

    def weight(row: str, j: int, turned: str) -> str:
        return f"tl.where(owned{turned}, {score_gradient(row, j)}{turned}_low, 0.0)"

    of_rows, of_columns = pair_shares(plan, weight, "_E")
    rests = rest_shares(plan, lambda score: f"tl.where(owned, {score}_rest, 0.0)", "_E")
    row_shares: list[Value] = [[_row(plan, r), share, rests.get(r, "")] for r, share in zip(rows, of_rows, strict=True)]
    column_shares: list[Value] = [[c, share] for c, share in zip(columns, of_columns, strict=True)]
    return render(
        "decay/pairs_vector.py.jinja",
        rows=[_row(plan, r) for r in rows],
        columns=columns,
        exclusive_rows=[r for r in rows if is_exclusive(plan, r)],
        row_shares=row_shares,
        column_shares=column_shares,
    ).splitlines()


def _row(plan: KernelPlan, row: str) -> Mapping[str, Value]:
    return {"name": row, "suffix": "_before" if is_exclusive(plan, row) else ""}
