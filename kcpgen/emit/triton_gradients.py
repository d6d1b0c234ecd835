"""`gradients.py` where the decay between two tokens is one factor, or none: one kernel walks the key axis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain

from kcpgen.emit.gluon_gradients import emit_gradients_hopper, in_flight
from kcpgen.emit.gluon_value_axis import on_both_axes
from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_blocks import math
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_key_axis import (
    EQUATIONS,
    chunk_operands,
    chunk_tensors,
    key_pass,
    key_rests,
    key_sums,
    later_sweeps,
    launcher,
    lines_in,
    make_sweeps,
    pair_shares,
    rest_shares,
    resumed,
    store_scalars,
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
    scalar_inputs,
    score_gradient,
)
from kcpgen.emit.triton_prologue import decay_sums, decayed, in_rows, used_arguments
from kcpgen.emit.triton_score_gradients import lines_of, score_results, start_sums, summed_over_values
from kcpgen.emit.triton_sweeps import key_inputs, key_params, start_gradient
from kcpgen.plan import KernelPlan
from kcpgen.spec import Param, TokenInput


def emit_gradients(plan: KernelPlan, shared: Mapping[str, Value]) -> dict[str, str]:
    """File name -> source: the portable kernel, and the one for Hopper where an op has it."""
    sweeps = make_sweeps(plan)
    body: dict[str, list[str]] = {
        "early": _early(plan),
        "key_start": [f"{name} = tl.zeros((C, BK), tl.float32)" for name in key_sums(plan)]
        + (["d_decay_out = tl.zeros((BK,), tl.float32)"] if plan.decay_axis is not None else []),
        "key_pass": key_pass(plan, rests=False),
        "key_rests": key_rests(plan),
        "key_inputs": [*load_keys(plan), *form_operands(plan)],
        "borders": [*_borders(plan), *_border_sums(plan)],
        "pairs": _pairs(plan),
        "key_gradients": lines_of(sweeps.key_gradients()),
        "scalars": [*_decay_gradient(plan), *sweeps.sweeps[0].scalars],
        "stores": store_scalars(plan),
    }
    later = later_sweeps(sweeps)
    whole = [*chain.from_iterable(body.values()), *lines_in(later)]
    filled: list[TokenInput | Param] = [*scalar_inputs(plan), *key_inputs(plan), *key_params(plan)]
    named = set(re.findall(r"\w+", " ".join(whole)))
    more = [name for name in ("to_end", "sums", "d_sums") if f"{name}_ptr" in named]
    host = launcher(plan, shared, sweeps)
    gradients = [f"d_{d.name}" for d in filled]
    both = in_flight(plan) and on_both_axes(plan)
    of_values = strings(host["value_gradients"]) if both else []
    of_hopper = [*(name for name in of_values if name not in gradients), *gradients]
    hopper = {}
    if in_flight(plan):
        given = {**body, "early": _early(plan, apart=not both), "borders": _borders(plan)}
        read = [name for name in more if name != "d_sums" or not both]
        hopper = {"gradients_hopper.py": emit_gradients_hopper(plan, host, given, later, of_hopper, read)}
    portable = render(
        "gradients.py.jinja",
        **host,
        in_flight=int(in_flight(plan)),
        both_in_flight=int(both),
        passed_on=[*([] if both else score_results(plan)), *of_hopper],
        **body,
        used=used_arguments(plan, whole),
        sweeps=later,
        equations=[math(e) for e in plan.form.gradients if e.target.name in EQUATIONS],
        device_functions=device_functions(["load_tile(", *whole]),
        decays=plan.decay_axis is not None,
        chunk_operands=in_rows(f"{name}_ptr" for name in [*chunk_operands(plan), *more]),
        launch_operands=in_rows(
            [*chunk_tensors(plan), *(name if name == "d_sums" else f"prepared.{name}" for name in more)]
        ),
        gradient_pointers=in_rows(f"{name}_ptr" for name in gradients),
        gradient_tensors=in_rows(gradients),
    )
    return {"gradients.py": portable, **hopper}


def _early(plan: KernelPlan, *, apart: bool = True) -> list[str]:
    """One number per token and head, the scores' gradients, and every running sum that outlives the loop.

    apart: whether another kernel has seen to the value axis.
    """
    begun = summed_over_values(plan) if apart else []
    cumulative = ["dG", "dG_before"] if plan.exclusive else ["dG"]
    lines = [
        *load_scalars(plan),
        *([*decay_sums(plan), "to_end = tl.load(to_end_ptr + at * C + rows)"] if plan.decay_axis is not None else []),
        *load_score_gradients(plan),
        *chain.from_iterable(resumed(d) if d in begun else [start_gradient(d)] for d in scalar_inputs(plan)),
        *start_sums(plan, apart=apart),
    ]
    if plan.decay_axis is not None:
        lines += [f"{name} = tl.zeros((C,), tl.float32)" for name in cumulative]
        lines.append("dG_end = tl.zeros((), tl.float32)")
    return lines


def _borders(plan: KernelPlan) -> list[str]:
    """Rows read the state at the chunk's start, columns reach its end."""
    rows = {"read": "dq_in", **{f"erase_{i}": f"da_in_{i}" for i in plan.erasing}}
    lines = [f"d_{r} = {sum_}{decayed(plan, 'G_before' if is_exclusive(plan, r) else 'G')}" for r, sum_ in rows.items()]
    to_end = "" if plan.decay_axis is None else " * to_end[:, None]"
    return [*lines, *(f"d_write_{j} = dw_out_{j}{to_end}" for j in plan.terms)]


def _border_sums(plan: KernelPlan) -> list[str]:
    """Operands rounded, as products take them, and what borders add to the gradients of running decays.

    Of the same numbers as what pairs add: in registers where pairs are summed upon borders, both are one sum.
    """
    rounded = [f"{name}_low = {name}.to(LOW)" for name in [*row_names(plan), *column_names(plan)]]
    if plan.decay_axis is None:
        return rounded
    lines = [*rounded, *(f"{_cumulative(plan, r)} += tl.sum({r}_low * d_{r}, axis=1)" for r in row_names(plan))]
    lines.append("dG_end += tl.exp2(G_end) * tl.sum(d_decay_out, axis=0)")
    for j in plan.terms:
        lines += [
            f"leaving = tl.sum(write_{j}_low * d_write_{j}, axis=1)",
            "dG -= leaving",
            "dG_end += tl.sum(leaving, axis=0)",
        ]
    return lines


def _cumulative(plan: KernelPlan, row: str) -> str:
    return "dG_before" if is_exclusive(plan, row) else "dG"


def _pairs(plan: KernelPlan) -> list[str]:
    rows, columns = row_names(plan), column_names(plan)
    decays = plan.decay_axis is not None
    of_rows, of_columns = pair_shares(plan, lambda row, j, turned: f"{score_gradient(row, j)}{turned}_low", "_low")
    row_shares: list[Value] = [
        [{"name": r, "cumulative": [_cumulative(plan, r)] if decays else []}, share]
        for r, share in zip(rows, of_rows, strict=True)
    ]
    column_shares: list[Value] = [[c, share] for c, share in zip(columns, of_columns, strict=True)]
    rests: list[Value] = [[r, share] for r, share in rest_shares(plan, lambda score: f"{score}_rest", "_low").items()]
    return render(
        "decay/pairs_uniform.py.jinja",
        row_shares=row_shares,
        column_shares=column_shares,
        rests=rests,
        column_cumulative=["dG"] if decays else [],
    ).splitlines()


def _decay_gradient(plan: KernelPlan) -> list[str]:
    """From the cumulative sums back to each token's log decay: G adds up tokens s <= t, so s collects from t >= s."""
    if plan.decay_axis is None:
        return []
    before = " + sum_scalars(after(rows), dG_before)" if plan.exclusive else ""
    return [
        f"d_log_decay = tl.cumsum(dG, axis=0, reverse=True){before} + dG_end",
        "d_log_decay = tl.where(live & decays(log_decay), d_log_decay, 0.0)",
    ]
