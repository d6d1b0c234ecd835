"""`gradients.py`: the key axis of the chunk-parallel backward, down to the spec's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_blocks import math, variable
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_operands import (
    column_names,
    form_operands,
    is_exclusive,
    load_keys,
    load_scalars,
    operands,
    row_names,
    scalar_inputs,
    score_gradient,
    score_gradients,
)
from kcpgen.emit.triton_prologue import decay_sums, decayed, in_rows, log_decay, used_arguments
from kcpgen.emit.triton_score_gradients import block_printer, lines_of, per_token_operands, summed_over_values
from kcpgen.emit.triton_sweeps import Sweeps, key_inputs, key_params, start_gradient, store_input, store_param
from kcpgen.plan import KernelPlan
from kcpgen.spec import Param, TokenInput
from kcpgen.tokenwise import names

EQUATIONS = ("da_in", "dq_in", "dw_out", "ddecay_out")


def emit_gradients(plan: KernelPlan, shared: Mapping[str, Value]) -> str:
    sweeps = _sweeps(plan)
    body: dict[str, list[str]] = {
        "early": _early(plan),
        "key_start": [f"{name} = tl.zeros((C, BK), tl.float32)" for name in _key_sums(plan)]
        + (["d_decay_out = tl.zeros((BK,), tl.float32)"] if plan.decay_axis is not None else []),
        "key_pass": _key_pass(plan),
        "key_inputs": _key_inputs(plan),
        "borders": _borders(plan),
        "pairs": _pairs(plan),
        "key_gradients": lines_of(sweeps.key_gradients()),
        "scalars": [*_scalar_decay_gradient(plan), *sweeps.sweeps[0].scalars],
        "stores": _stores(plan),
    }
    later = [(condition, lines_of(loop), scalars) for condition, loop, scalars in sweeps.later()]
    swept = [line for condition, loop, scalars in later for line in (condition, *loop, *scalars)]
    whole = [*chain.from_iterable(body.values()), *swept]
    filled: list[TokenInput | Param] = [*scalar_inputs(plan), *key_inputs(plan), *key_params(plan)]
    declared: list[TokenInput | Param] = [*plan.spec.inputs, *plan.spec.params]
    near = [f"d_{name}" for name in (*row_names(plan), *column_names(plan))] if plan.decay_axis else []
    return render(
        "gradients.py.jinja",
        title=shared["title"],
        arguments=shared["arguments"],
        keywords=shared["backward_keywords"],
        passed=[str(keyword).partition(":")[0] for keyword in _strings(shared["backward_keywords"])],
        sizes=shared["sizes"],
        value_input=shared["value_input"],
        **body,
        used=used_arguments(plan, whole),
        sweeps=[{"condition": condition, "loop": loop, "scalars": scalars} for condition, loop, scalars in later],
        equations=[math(e) for e in plan.form.gradients if e.target.name in EQUATIONS],
        device_functions=device_functions(["load_tile(", *whole]),
        decays=plan.decay_axis is not None,
        chunk_operands=in_rows(f"{name}_ptr" for name in _chunk_operands(plan)),
        launch_operands=in_rows(_launch_operands(plan)),
        score_names=score_gradients(plan),
        near=near,
        near_pointers=in_rows(f"near_{name}_ptr" for name in near),
        near_tensors=in_rows(f"near_{name}" for name in near),
        gradient_pointers=in_rows(f"d_{d.name}_ptr" for d in filled),
        gradient_tensors=in_rows(f"d_{d.name}" for d in filled),
        inputs=[d.name for d in declared],
        value_gradients=[f"d_{d.name}" for d in declared if d not in filled or d in summed_over_values(plan)],
        allocate=_allocate(plan, sweeps),
        returned=[f"sum_over_group(d_{i.name}, {i.name})" for i in plan.spec.inputs]
        + [f"sum_over_chunks(d_{p.name}, {p.name})" for p in plan.spec.params],
        differentiable=[d.name for d in declared],
    )


def _strings(value: Value) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


def _chunk_operands(plan: KernelPlan) -> list[str]:
    corrected = [name for name in per_token_operands(plan) if not name.endswith("_rest")]
    return [*corrected, *score_gradients(plan), *(["sums"] if plan.sums else [])]


def _launch_operands(plan: KernelPlan) -> list[str]:
    return [
        *(f"prepared.U0_{j}" for j in plan.terms),
        *(f"corrected_gradients[{j}]" for j in plan.terms),
        *score_gradients(plan),
        *(["prepared.sums"] if plan.sums else []),
    ]


def _early(plan: KernelPlan) -> list[str]:
    """One number per token and head, the scores' gradients, and every running sum that outlives the loop."""
    begun = summed_over_values(plan)
    cumulative = ["dG", "dG_before"] if plan.exclusive else ["dG"]
    lines = [
        *load_scalars(plan),
        *(decay_sums(plan) if plan.decay_axis == "" else []),
        *(f"{name}_low = tl.load({name}_ptr + score_tile)" for name in score_gradients(plan)),
        *(f"{name}_T_low = tl.trans({name}_low)" for name in score_gradients(plan)),
        *chain.from_iterable(_resumed(d) if d in begun else [start_gradient(d)] for d in scalar_inputs(plan)),
        *(f"d_{s.name} = tl.zeros((C,), tl.float32)" for s in plan.sums),
    ]
    if plan.decay_axis == "":
        lines += [f"{name} = tl.zeros((C,), tl.float32)" for name in cumulative]
        lines.append("dG_end = tl.zeros((), tl.float32)")
    return lines


def _resumed(d: TokenInput | Param) -> list[str]:
    """The gradient so far, from the value axis."""
    if isinstance(d, TokenInput):
        return [f"d_{d.name} = load_column(d_{d.name}_ptr + token_head, HV, rows, count)"]
    return [start_gradient(d), f"if d_{d.name}_ptr is not None:", f"    d_{d.name} += tl.load(d_{d.name}_ptr + at)"]


def _key_sums(plan: KernelPlan) -> list[str]:
    return ["dq_in", *(f"da_in_{i}" for i in plan.erasing), *(f"dw_out_{j}" for j in plan.terms)]


def _key_pass(plan: KernelPlan) -> list[str]:
    out = block_printer(plan)
    lines = [
        *(f"U_{j} = tl.load(U_{j}_ptr + value_tile)" for j in plan.terms),
        *(f"dR_{e}_low = tl.load(dU_{e}_ptr + value_tile)" for e in plan.erasing),
    ]
    for e in plan.form.gradients:
        if e.target.name in EQUATIONS[:3]:
            lines.append(f"{variable(e.target)} += {out.right_side(e.terms)}")
    return lines


def _key_inputs(plan: KernelPlan) -> list[str]:
    """The key axis's own inputs, loaded only now: registers are what this kernel is short of."""
    return [*load_keys(plan), *(_decay_sums(plan) if plan.decay_axis else []), *form_operands(plan)]


def _decay_sums(plan: KernelPlan) -> Iterator[str]:
    """Log decays summed over tokens, as `pair_gradients` left them."""
    yield log_decay(plan)
    yield "key_tile = at * (C * KP) + rows[:, None] * KP + keys[None, :]"
    yield "G = tl.load(G_ptr + key_tile)"
    if plan.exclusive:
        yield "G_before = G - log_decay"
    yield "G_end = tl.load(G_ptr + (at * C + C - 1) * KP + keys)"
    yield "G_after = tl.minimum(G_end[None, :] - G, 0.0)"


def _borders(plan: KernelPlan) -> list[str]:
    """Rows read the state at the chunk's start, columns reach its end."""
    rows = {"read": "dq_in", **{f"erase_{i}": f"da_in_{i}" for i in plan.erasing}}
    lines = [f"d_{r} = {sum_}{decayed(plan, 'G_before' if is_exclusive(plan, r) else 'G')}" for r, sum_ in rows.items()]
    lines += [f"d_write_{j} = dw_out_{j}{decayed(plan, 'G_after')}" for j in plan.terms]
    if plan.decay_axis is None:
        return lines
    of_columns = [f"write_{j} * d_write_{j}" for j in plan.terms]
    if plan.decay_axis:
        leaving = "".join(f" + tl.sum({product}, axis=0)" for product in of_columns)
        return [*lines, f"dG_end = tl.exp2(G_end) * d_decay_out{leaving}"]
    lines += [
        f"{'dG_before' if is_exclusive(plan, r) else 'dG'} += tl.sum({r} * d_{r}, axis=1)" for r in row_names(plan)
    ]
    lines.append("dG_end += tl.exp2(G_end) * tl.sum(d_decay_out, axis=0)")
    for product in of_columns:
        lines += [f"leaving = tl.sum({product}, axis=1)", "dG -= leaving", "dG_end += tl.sum(leaving, axis=0)"]
    return lines


def _decay_gradients(plan: KernelPlan) -> Iterator[str]:
    """dG from what rows and columns have so far, which is exact: what rounding enters later must cancel by itself."""
    rows = row_names(plan)
    kinds = {
        "dG": [r for r in rows if not is_exclusive(plan, r)],
        "dG_before": [r for r in rows if is_exclusive(plan, r)],
    }
    for name, chosen in kinds.items():
        if chosen:
            yield f"{name} = " + " + ".join(f"{r} * d_{r}" for r in chosen)
    yield from (f"dG -= {c} * d_{c}" for c in column_names(plan))


def _pairs(plan: KernelPlan) -> list[str]:
    vector = plan.decay_axis == "K"
    rows, columns = row_names(plan), column_names(plan)
    suffix = "_E" if vector else "_low"

    def weight(row: str, j: int, turned: str) -> str:
        score = f"{score_gradient(row, j)}{turned}"
        return f"tl.where(owned{turned}, {score}_low, 0.0)" if vector else f"{score}_low"

    row_shares: list[Value] = [
        [_row(plan, r), " + ".join(f"dot({weight(r, j, '')}, write_{j}{suffix}, PRECISION)" for j in plan.terms)]
        for r in rows
    ]
    column_shares: list[Value] = [
        [c, " + ".join(f"dot({weight(r, j, '_T')}, {r}{suffix}, PRECISION)" for r in rows)]
        for j, c in enumerate(columns)
    ]
    shares: dict[str, Value] = {"row_shares": row_shares, "column_shares": column_shares}
    if not vector:
        cumulative = [] if plan.decay_axis is None else ["dG"]
        shares |= {"low": [*rows, *columns], "column_cumulative": cumulative}
        return render("decay/pairs_uniform.py.jinja", **shares).splitlines()
    shares |= {
        "rows": [_row(plan, r) for r in rows],
        "columns": columns,
        "exclusive_rows": [r for r in rows if is_exclusive(plan, r)],
        "near": [*rows, *columns],
        "decay_gradients": list(_decay_gradients(plan)),
    }
    return [*render("decay/pairs_vector.py.jinja", **shares).splitlines(), *_vector_decay_gradient(plan)]


def _row(plan: KernelPlan, row: str) -> Mapping[str, Value]:
    exclusive = is_exclusive(plan, row)
    cumulative = "dG_before" if exclusive else "dG"
    if plan.decay_axis != "K":
        return {"name": row, "cumulative": [] if plan.decay_axis is None else [cumulative]}
    return {"name": row, "decay": "E_before" if exclusive else "E", "cumulative": cumulative}


def _vector_decay_gradient(plan: KernelPlan) -> Iterator[str]:
    """From the cumulative sums back to each token's log decay: G adds up tokens s <= t, so s collects from t >= s."""
    yield "d_log_decay = sums_from_on(rows, dG, LOW) + dG_end[None, :]"
    if plan.exclusive:
        yield "d_log_decay += sums_from_on(rows, dG_before, LOW) - dG_before"
    yield "d_log_decay = tl.where(inside & decays(log_decay), d_log_decay, 0.0)"


def _scalar_decay_gradient(plan: KernelPlan) -> list[str]:
    if plan.decay_axis != "":
        return []
    before = " + sum_scalars(after(rows), dG_before)" if plan.exclusive else ""
    return [
        f"d_log_decay = sum_scalars(from_on(rows), dG){before} + dG_end",
        "d_log_decay = tl.where(live & decays(log_decay), d_log_decay, 0.0)",
    ]


def _sweeps(plan: KernelPlan) -> Sweeps:
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


def _stores(plan: KernelPlan) -> list[str]:
    lines = [store_input(i) for i in plan.inputs_on("")]
    for p in plan.spec.params:
        if not p.axis:
            lines += [f"if d_{p.name}_ptr is not None:", f"    {store_param(p)}"]
    return lines


def _allocate(plan: KernelPlan, sweeps: Sweeps) -> list[str]:
    lines = []
    for i in plan.spec.inputs:
        carrying = "True" if i in summed_over_values(plan) else sweeps.carrying(i.name)
        lines.append(f"d_{i.name} = gradient_buffer({i.name}, HV" + (")" if carrying == "False" else f", {carrying})"))
    return lines + [f"d_{p.name} = partial_sums({p.name}, layout.chunk_count, HV)" for p in plan.spec.params]
