"""`gradients.py`: the chunk-parallel backward, from the derived block gradients down to the spec's inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import sympy

from kcpgen.derivation.chunk_form import Equation, Factor
from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_adjoint import backward
from kcpgen.emit.triton_blocks import BlockPrinter, math, variable
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_prologue import (
    apply_rewrites,
    decay_sums,
    decayed,
    in_rows,
    launch_arguments,
    load_inputs,
    load_params,
    load_sums,
    masked,
    parameters,
    printer,
    starts,
)
from kcpgen.emit.triton_sweeps import (
    Sweeps,
    begun,
    key_inputs,
    key_params,
    start_gradient,
    store_input,
    store_param,
    undone,
)
from kcpgen.plan import KernelPlan
from kcpgen.spec import Param, TokenInput
from kcpgen.tokenwise import names

WORK = "states.new_empty((layout.chunk_count, HV, C, tiles.key_block), dtype=torch.float32)"


def emit_gradients(plan: KernelPlan, shared: Mapping[str, Value]) -> str:
    sweeps = _sweeps(plan)
    body: dict[str, list[str]] = {
        "starts": starts(plan),
        "early": _early(plan),
        "value_pass": _value_pass(plan),
        "scores": _scores(plan),
        "key_start": [f"{name} = tl.zeros((C, BK), tl.float32)" for name in _key_sums(plan)]
        + (["d_decay_out = tl.zeros((BK,), tl.float32)"] if plan.decay_axis is not None else []),
        "key_pass": _key_pass(plan),
        "key_inputs": _key_inputs(plan),
        "borders": _borders(plan),
        "pairs": _pairs(plan),
        "key_gradients": _lines(sweeps.key_gradients()),
        "scalars": [*_scalar_decay_gradient(plan), *sweeps.sweeps[0].scalars],
        "stores": _stores(plan),
    }
    later = [(condition, _lines(loop), scalars) for condition, loop, scalars in sweeps.later()]
    swept = [loop + scalars for _, loop, scalars in later]
    declared: list[TokenInput | Param] = [*plan.spec.inputs, *plan.spec.params]
    return render(
        "gradients.py.jinja",
        **shared,
        **body,
        sweeps=[{"condition": condition, "loop": loop, "scalars": scalars} for condition, loop, scalars in later],
        equations=[math(e) for e in plan.form.gradients],
        device_functions=device_functions(["load_tile(", *chain.from_iterable([*body.values(), *swept])]),
        parameters=parameters(plan),
        launch_arguments=launch_arguments(plan),
        work=WORK if plan.decay_axis else "None",
        decays=plan.decay_axis is not None,
        chunk_operands=in_rows(f"{name}_ptr" for name in _chunk_operands(plan)),
        launch_operands=in_rows(_launch_operands(plan)),
        gradient_pointers=in_rows(f"d_{d.name}_ptr" for d in declared),
        gradient_tensors=in_rows(f"d_{d.name}" for d in declared),
        allocate=_allocate(plan, sweeps),
        returned=[f"sum_over_group(d_{i.name}, {i.name})" for i in plan.spec.inputs]
        + [f"sum_over_chunks(d_{p.name}, {p.name})" for p in plan.spec.params],
        differentiable=[d.name for d in declared],
    )


def _lines(statements: Iterable[str]) -> list[str]:
    """One entry per source line: a statement may come with its body."""
    return [line for statement in statements for line in statement.split("\n")]


def _chunk_operands(plan: KernelPlan) -> list[str]:
    inverse = [f"T_{i}_{e}{part}" for i in plan.erasing for e in plan.erasing for part in ("", "_rest")]
    erased = [f"L_{i}_{p}" for i in plan.erasing for p in plan.pure_writes]
    sums = ["sums"] if plan.sums else []
    return [*_per_token_operands(plan), *inverse, *erased, *sums]


def _per_token_operands(plan: KernelPlan) -> list[str]:
    """What the serial kernels left: corrected values and their gradients, those of a solve in two parts."""
    rests = [f"dU_{e}_rest" for e in plan.erasing if plan.halves]
    return [*(f"U_{j}" for j in plan.terms), *(f"dU_{j}" for j in plan.terms), *rests]


def _launch_operands(plan: KernelPlan) -> list[str]:
    order = list(plan.erasing)
    corrected = [f"corrected[{order.index(j)}]" if j in order else f"prepared.U0_{j}" for j in plan.terms]
    gradients = [f"corrected_gradients[{i}]" for i in range(len(_per_token_operands(plan)) - len(plan.terms))]
    prepared = _chunk_operands(plan)[len(_per_token_operands(plan)) :]
    return [*corrected, *gradients, *(f"prepared.{name}" for name in prepared)]


def _score_sums(plan: KernelPlan) -> list[str]:
    scores = [f"dA_{j}" for j in plan.terms] + [f"dL_{i}_{j}" for i in plan.erasing for j in plan.terms]
    return [name for score in scores for name in (score, f"{score}_T")]


def _key_sums(plan: KernelPlan) -> list[str]:
    return ["dq_in", *(f"da_in_{i}" for i in plan.erasing), *(f"dw_out_{j}" for j in plan.terms)]


def _early(plan: KernelPlan) -> list[str]:
    """One number per token and head, the blocks of the solve, and every running sum that outlives a loop."""
    inputs = plan.inputs_on("")
    params = [p for p in plan.spec.params if not p.axis]
    scalars: list[TokenInput | Param] = [*inputs, *params]
    stored = [n for n in _chunk_operands(plan) if re.fullmatch(r"[TL](_\d+)+(_rest)?", n)]
    cumulative = ["dG", "dG_before"] if plan.exclusive else ["dG"]
    lines = [
        *load_sums(plan),
        *load_inputs(plan, inputs),
        *load_params(plan, params),
        *apply_rewrites(plan, [i.name for i in inputs], backward=True),
        *(decay_sums(plan) if plan.decay_axis == "" else []),
        *(f"{name} = tl.load({name}_ptr + score_tile)" for name in stored),
        "",
        "# Sums over the loops.",
        *(f"{name} = tl.zeros((C, C), tl.float32)" for name in _score_sums(plan)),
        *(start_gradient(d) for d in scalars),
        *(f"d_{s.name} = tl.zeros((C,), tl.float32)" for s in plan.sums),
    ]
    if plan.decay_axis == "":
        lines += [f"{name} = tl.zeros((C,), tl.float32)" for name in cumulative]
        lines.append("dG_end = tl.zeros((), tl.float32)")
    return lines


def _printer(plan: KernelPlan) -> BlockPrinter:
    return BlockPrinter(
        accumulators=frozenset({"dR"}),
        rename={},
        turned=frozenset({"S", "dS_next"}),
        in_two=frozenset({"T", "dU"} if plan.halves else {"T"}),
    )


def _corrected_values(plan: KernelPlan) -> Iterator[str]:
    yield from (f"U_{j} = tl.load(U_{j}_ptr + value_tile)" for j in plan.terms)


def _solve(plan: KernelPlan) -> Iterator[str]:
    """Carry the corrected values' gradients through the solve. dR takes the place of dU in memory for the key pass."""
    yield from (f"dU_{j} = tl.load(dU_{j}_ptr + value_tile)" for j in plan.terms)
    yield from (f"dU_{e}_rest = tl.load(dU_{e}_rest_ptr + value_tile)" for e in plan.erasing if plan.halves)
    for e in plan.form.gradients:
        if e.target.name == "dR":
            yield from _printer(plan).corrected(e, "LOW")
    yield from (f"tl.store(dU_{e}_ptr + value_tile, dR_{e}_low)" for e in plan.erasing)


def _value_pass(plan: KernelPlan) -> list[str]:
    out = _printer(plan)
    lines = [*_corrected_values(plan), *_solve(plan)]
    for e in plan.form.gradients:
        if e.target.name in ("dA", "dL"):
            lines += _add_score(out, e)
    lines += [out.assign(e) for e in plan.form.gradients if e.target.name == "dV"]
    return [*lines, *_lines(_value_inputs(plan))]


def _add_score(out: BlockPrinter, equation: Equation) -> Iterator[str]:
    """A score gradient over one block of the value axis, and its transpose by swapping the operands."""
    (monomial,) = equation.terms
    left, right = monomial.factors
    target = variable(equation.target)
    yield f"{target} += {out.right_side(equation.terms)}"
    yield f"{target}_T += dot({out.operand(_plain(right))}, tl.trans({out.operand(_plain(left))}), PRECISION)"


def _plain(factor: Factor) -> Factor:
    return replace(factor, transposed=False)


def _value_inputs(plan: KernelPlan) -> Iterator[str]:
    """Gradients of what the values v_j are made of; the value axis is finished and stored block by block."""
    inputs = plan.inputs_on("V")
    params = [p for p in plan.spec.params if p.axis == "V"]
    declared: list[TokenInput | Param] = [*inputs, *params]
    yield from load_inputs(plan, inputs)
    yield from load_params(plan, params)
    yield from apply_rewrites(plan, [i.name for i in inputs], backward=True)
    lines: list[str] = []
    for j in plan.terms:
        if plan.values[j] != 0:
            lines += backward(printer(plan), plan.values[j], f"dV_{j}", f"value_{j}").lines()
    lines += _undo_value_rewrites(plan)
    yield from begun(declared, lines)
    yield from (store_input(i) for i in inputs)
    yield from (f"if d_{p.name}_ptr is not None:\n    {store_param(p)}" for p in params)


def _undo_value_rewrites(plan: KernelPlan) -> Iterator[str]:
    """Options on the value axis, the last one first. A sum over values sees the whole axis in its block."""
    for index, rewrite in reversed(list(enumerate(plan.rewrites))):
        if plan.spec.axes[rewrite.target] == "V":
            yield from undone(plan, index, rewrite)[1]


def _scores(plan: KernelPlan) -> list[str]:
    """Mask the score gradients; where the decay is one factor per pair, apply it and round, once for all key blocks."""
    lines = []
    for name in _score_sums(plan):
        masks = {"A": ("up_to", "from_on"), "L": ("before", "after")}[name[1]]
        lines.append(f"{name} = tl.where({masks[name.endswith('_T')]}(rows), {name}, 0.0)")
    rounded = [f"{name}_low = {name}.to(LOW)" for name in _score_sums(plan)]
    if plan.decay_axis == "K":
        diagonal = "rows[:, None] == rows[None, :]"
        note = "  # what a token reads of its own write"
        own = [f"own_{j} = tl.sum(tl.where({diagonal}, dA_{j}, 0.0), axis=1){note}" for j in plan.terms]
        return [*lines, *own, *rounded]
    if plan.decay_axis is None:
        return [*lines, *rounded]
    for name in _score_sums(plan):
        row = "read" if name[1] == "A" else f"erase_{name.split('_')[1]}"
        since = "since_before" if _exclusive(plan, row) else "since"
        weight = f"tl.trans({since})" if name.endswith("_T") else since
        lines.append(f"{name}_low = ({weight} * {name}).to(LOW)")
    return lines


def _key_pass(plan: KernelPlan) -> list[str]:
    out = _printer(plan)
    lines = [*_corrected_values(plan), *(f"dR_{e}_low = tl.load(dU_{e}_ptr + value_tile)" for e in plan.erasing)]
    for e in plan.form.gradients:
        if e.target.name in ("da_in", "dq_in", "dw_out"):
            lines.append(f"{variable(e.target)} += {out.right_side(e.terms)}")
    if plan.decay_axis is not None:
        lines.append("d_decay_out += tl.sum(S_T.to(tl.float32) * dS_next_T.to(tl.float32), axis=0)")
    return lines


def _key_inputs(plan: KernelPlan) -> list[str]:
    """The key axis's own inputs, loaded only now: registers are what this kernel is short of."""
    code = printer(plan)
    inputs = key_inputs(plan)
    return [
        *load_inputs(plan, inputs),
        *load_params(plan, key_params(plan)),
        *apply_rewrites(plan, [i.name for i in inputs], backward=True),
        *(decay_sums(plan) if plan.decay_axis else []),
        *(f"{name} = {masked(plan, expr, 'K', code.code(expr, 'K'))}" for name, expr in _operands(plan).items()),
    ]


def _operands(plan: KernelPlan) -> dict[str, sympy.Expr]:
    """The row and column operands of the pairs, whole: read, erase_i, write_j."""
    rows = {"read": plan.read.full, **{f"erase_{i}": row.full for i, row in plan.erase.items()}}
    return {**rows, **{f"write_{j}": plan.bases[base] for j, base in enumerate(plan.write)}}


def _exclusive(plan: KernelPlan, row: str) -> bool:
    return row != "read" and plan.erase[int(row.removeprefix("erase_"))].exclusive


def _borders(plan: KernelPlan) -> list[str]:
    """Rows read the state at the chunk's start, columns reach its end."""
    rows = {"read": "dq_in", **{f"erase_{i}": f"da_in_{i}" for i in plan.erasing}}
    lines = [f"d_{r} = {sum_}{decayed(plan, 'G_before' if _exclusive(plan, r) else 'G')}" for r, sum_ in rows.items()]
    lines += [f"d_write_{j} = dw_out_{j}{decayed(plan, 'G_after')}" for j in plan.terms]
    if plan.decay_axis is None:
        return lines
    total, assign = ("{}", "=") if plan.decay_axis else ("tl.sum({}, axis=1)", "+=")
    kinds = {"dG": [r for r in rows if not _exclusive(plan, r)], "dG_before": [r for r in rows if _exclusive(plan, r)]}
    for name, chosen in kinds.items():
        if chosen:
            lines.append(f"{name} {assign} " + " + ".join(total.format(f"{r} * d_{r}") for r in chosen))
    decay = "tl.exp2(G_end) * "
    lines.append(f"dG_end {assign} {decay}" + ("d_decay_out" if plan.decay_axis else "tl.sum(d_decay_out, axis=0)"))
    for j in plan.terms:
        lines.append(f"leaving = {total.format(f'write_{j} * d_write_{j}')}")
        lines += ["dG -= leaving", "dG_end += tl.sum(leaving, axis=0)"]
    return lines


def _pairs(plan: KernelPlan) -> list[str]:
    vector = plan.decay_axis == "K"
    rows = ["read", *(f"erase_{i}" for i in plan.erasing)]
    columns = [f"write_{j}" for j in plan.terms]
    suffix = "_E" if vector else "_low"

    def weight(row: str, j: int, turned: str) -> str:
        score = f"dA_{j}{turned}" if row == "read" else f"dL_{row.removeprefix('erase_')}_{j}{turned}"
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
        "exclusive_rows": [r for r in rows if _exclusive(plan, r)],
        "own_token": [["read", c, f"own_{j}"] for j, c in enumerate(columns)],
    }
    return [*render("decay/pairs_vector.py.jinja", **shares).splitlines(), *_vector_decay_gradient(plan)]


def _row(plan: KernelPlan, row: str) -> Mapping[str, Value]:
    exclusive = _exclusive(plan, row)
    cumulative = "dG_before" if exclusive else "dG"
    if plan.decay_axis != "K":
        return {"name": row, "cumulative": [] if plan.decay_axis is None else [cumulative]}
    return {"name": row, "decay": "E_before" if exclusive else "E", "cumulative": cumulative}


def _vector_decay_gradient(plan: KernelPlan) -> Iterator[str]:
    """From the cumulative sums back to each token's log decay: G adds up tokens s <= t, so s collects from t >= s."""
    yield "d_log_decay = tl.cumsum(dG, axis=0, reverse=True) + dG_end[None, :]"
    if plan.exclusive:
        yield "d_log_decay += tl.cumsum(dG_before, axis=0, reverse=True) - dG_before"
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
    for name, expr in _operands(plan).items():
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
        carrying = sweeps.carrying(i.name)
        lines.append(f"d_{i.name} = gradient_buffer({i.name}, HV" + (")" if carrying == "False" else f", {carrying})"))
    return lines + [f"d_{p.name} = partial_sums({p.name}, layout.chunk_count, HV)" for p in plan.spec.params]
