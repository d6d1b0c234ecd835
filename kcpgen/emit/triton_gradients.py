"""`gradients.py`: the chunk-parallel backward, from the derived block gradients down to the spec's inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import sympy

from kcpgen.derivation.chunk_form import Equation
from kcpgen.emit.render import render
from kcpgen.emit.triton_blocks import BlockPrinter, math, variable
from kcpgen.emit.triton_code import backward, printer_with
from kcpgen.emit.triton_prologue import (
    COLUMNS,
    INSIDE,
    apply_rewrites,
    before,
    decay_lines,
    decayed,
    launch_arguments,
    load_inputs,
    load_params,
    local,
    mode_name,
    parameters,
    printer,
)
from kcpgen.plan import KernelPlan
from kcpgen.spec import Param, TokenInput
from kcpgen.tokenwise import names

DEVICE_FUNCTIONS = (
    "clamp_log_decay decays dot exp level_boundary level_decay load_column load_tile same_level same_level_T select_row sigmoid "
    "softplus store_column store_tile"
).split()


@dataclass(kw_only=True)
class Accumulators:
    """Gradient variables already assigned: the first share assigns, the later ones add."""

    plan: KernelPlan
    known: set[str] = field(default_factory=set)

    def add(self, name: str, code: str) -> str:
        variable = f"d_{name}"
        first = variable not in self.known
        self.known.add(variable)
        return f"{variable} {'=' if first else '+='} {code}"

    def start(self, name: str, axis: str, per_head: bool) -> str:
        self.known.add(f"d_{name}")
        width = COLUMNS[axis][0] if axis else ""
        shape = {"": "(C,)", "keys": "(C, KP)", "columns": "(C, BV)"}[width]
        if per_head:
            shape = {"": "()", "keys": "(KP,)", "columns": "(BV,)"}[width]
        return f"d_{name} = tl.full({shape}, 0.0, tl.float32)"


def emit_gradients(plan: KernelPlan, shared: dict[str, object]) -> str:
    sums = Accumulators(plan=plan)
    early, loop = _early(plan, sums), _value_loop(plan, sums)
    late, borders, pairs = _late(plan), _borders(plan), _pairs(plan)
    decay_gradient, inputs = _decay_gradient(plan), _inputs(plan, sums)
    text = "\n".join([*early, *loop, *late, *borders, *pairs, *decay_gradient, *inputs, "load_tile("])
    gradient_names = [f"d_{d.name}" for d in (*plan.spec.inputs, *plan.spec.params)]
    return render(
        "gradients.py.jinja",
        **shared,
        equations=[math(e) for e in plan.form.gradients],
        device_functions=[f for f in DEVICE_FUNCTIONS if re.search(rf"(?<![\w.]){f}\(", text)],
        parameters=parameters(plan),
        launch_arguments=launch_arguments(plan),
        chunk_operands=_chunk_operands(plan),
        launch_operands=_launch_operands(plan),
        gradient_names=gradient_names,
        early=early,
        value_loop=loop,
        late=late,
        borders=borders,
        pairs=pairs,
        decay_gradient=decay_gradient,
        inputs=inputs,
        allocate=_allocate(plan),
        returned=_returned(plan),
        differentiable=[d.name for d in (*plan.spec.inputs, *plan.spec.params)],
    )


def _chunk_operands(plan: KernelPlan) -> list[str]:
    inverse = [f"T_{i}_{e}" for i in plan.erasing for e in plan.erasing]
    erased = [f"L_{i}_{p}" for i in plan.erasing for p in plan.pure_writes]
    return [*(f"U_{j}" for j in plan.terms), *(f"dU_{j}" for j in plan.terms), *inverse, *erased]


def _launch_operands(plan: KernelPlan) -> list[str]:
    order = list(plan.erasing)
    corrected = [f"corrected[{order.index(j)}]" if j in order else f"prepared.U0_{j}" for j in plan.terms]
    gradients = [f"corrected_gradients[{j}]" for j in plan.terms]
    return [*corrected, *gradients, *(f"prepared.{n}" for n in _chunk_operands(plan) if n[0] in "TL")]


def _early(plan: KernelPlan, sums: Accumulators) -> list[str]:
    """What the value loop needs, and its running sums."""
    inputs = [i for i in plan.spec.inputs if i.name in plan.early]
    lines = [
        *load_inputs(plan, inputs),
        *load_params(plan, _params_of(plan, plan.early)),
        *apply_rewrites(plan, plan.early, keep=True),
    ]
    for name in _chunk_operands(plan):
        if name[0] in "TL":
            lines.append(f"{name} = tl.load({name}_ptr + score_tile)")
    lines += [f"{name} = tl.zeros((C, KP), tl.float32)" for name in _key_gradients(plan)]
    lines += [f"{name} = tl.zeros((C, C), tl.float32)" for name in _score_gradients(plan)]
    if plan.decay_axis is not None:
        lines.append("d_decay_out = tl.zeros((KP,), tl.float32)")
    spans = plan.spec.axes
    for name in sorted(set().union(*(names(v) for v in plan.values))):
        if spans[name] != "V" and name not in printer(plan).per_head:
            lines.append(sums.start(name, spans[name], per_head=False))
    for p in plan.spec.params:
        if p.axis != "V":
            lines.append(sums.start(p.name, p.axis, per_head=True))
    return lines


def _params_of(plan: KernelPlan, inputs: Iterable[str]) -> list[Param]:
    """Parameters first needed by the rewrites of `inputs` (none of them on the value axis)."""
    wanted = {n for r in plan.rewrites if r.target in inputs for n in names(r.value)}
    return [p for p in plan.spec.params if p.axis != "V" and p.name in wanted]


def _key_gradients(plan: KernelPlan) -> list[str]:
    return ["dq_in", *(f"da_in_{i}" for i in plan.erasing), *(f"dw_out_{j}" for j in plan.terms)]


def _score_gradients(plan: KernelPlan) -> list[str]:
    scores = [f"dA_{j}" for j in plan.terms] + [f"dL_{i}_{j}" for i in plan.erasing for j in plan.terms]
    return [name for score in scores for name in (score, f"{score}_T")]


def _value_loop(plan: KernelPlan, sums: Accumulators) -> list[str]:
    out = BlockPrinter(accumulators=frozenset({"dR"}), rename={}, decay="")
    lines = [f"{kind}_{j} = tl.load({kind}_{j}_ptr + value_tile)" for j in plan.terms for kind in ("U", "dU")]
    equations = plan.form.gradients
    for e in (e for e in equations if e.target.name == "dR"):
        lines += out.corrected(e)
    for e in equations:
        if e.target.name in ("dA", "dL", "da_in", "dq_in", "dw_out"):
            lines += _accumulate(out, e)
    if plan.decay_axis is not None:
        lines.append("d_decay_out += tl.sum(S.to(tl.float32) * dS_next.to(tl.float32), axis=1)")
    for e in (e for e in equations if e.target.name == "dV"):
        lines.append(out.assign(e))
    return [*lines, *_value_inputs(plan, sums)]


def _accumulate(out: BlockPrinter, equation: Equation) -> Iterator[str]:
    """Add one block gradient over the value axis; score gradients together with their transposes."""
    yield f"{out.name(equation.target)} += {out.right_side(equation.terms)}"
    if equation.mask:
        (monomial,) = equation.terms
        left, right = monomial.factors
        turned = f"dot({out.operand(_plain(right))}, tl.trans({out.operand(_plain(left))}), PRECISION)"
        yield f"{variable(equation.target)}_T += {turned}"


def _plain(factor: object) -> object:
    from dataclasses import replace

    return replace(factor, transposed=False)  # type: ignore[type-var]


def _value_inputs(plan: KernelPlan, sums: Accumulators) -> Iterator[str]:
    """Gradients of what the values v_j are made of; the value axis is finished and stored block by block."""
    inputs = plan.inputs_on("V")
    yield from load_inputs(plan, inputs)
    yield from load_params(plan, [p for p in plan.spec.params if p.axis == "V"])
    yield from apply_rewrites(plan, [i.name for i in inputs], keep=True)
    for p in plan.spec.params:
        if p.axis == "V":
            yield sums.start(p.name, "V", per_head=True)
    for j in plan.terms:
        if plan.values[j] != 0:
            yield from _pull(plan, sums, plan.values[j], f"dV_{j}", f"value_{j}")
    yield from _undo_rewrites(plan, sums, [i.name for i in inputs])
    for i in inputs:
        sums.known.discard(f"d_{i.name}")
        yield _store(i)
    yield from (_store_param(p) for p in plan.spec.params if p.axis == "V")


def _pull(plan: KernelPlan, sums: Accumulators, value: sympy.Expr, gradient: str, prefix: str) -> Iterator[str]:
    pulled = backward(printer(plan), value, gradient, prefix)
    yield from pulled.steps
    for name, code in pulled.shares.items():
        yield sums.add(name, code)


def _late(plan: KernelPlan) -> list[str]:
    """Everything else the pairs need, loaded only now: registers are what this kernel is short of."""
    inputs = [i for i in plan.spec.inputs if i.axis != "V" and i.name not in plan.early]
    early_params = _params_of(plan, plan.early)
    code = printer(plan)
    return [
        *load_inputs(plan, inputs),
        *load_params(plan, [p for p in plan.spec.params if p.axis != "V" and p not in early_params]),
        *apply_rewrites(plan, [i.name for i in inputs], keep=True),
        *decay_lines(plan),
        *(f"{name} = {_masked(code.code(expr, 'K'), expr)}" for name, expr in _operands(plan).items()),
    ]


def _operands(plan: KernelPlan) -> dict[str, sympy.Expr]:
    """The row and column operands of the pairs, whole: read, erase_i, write_j."""
    rows = {"read": plan.read.full, **{f"erase_{i}": row.full for i, row in plan.erase.items()}}
    return {**rows, **{f"write_{j}": plan.bases[base] for j, base in enumerate(plan.write)}}


def _masked(code: str, expr: sympy.Expr) -> str:
    return code if expr.is_Symbol else f"tl.where(inside, {code}, 0.0)"


def _cumulative(plan: KernelPlan, row: str) -> str:
    exclusive = row != "read" and plan.erase[int(row.removeprefix("erase_"))].exclusive
    return "before" if exclusive else ""


def _borders(plan: KernelPlan) -> list[str]:
    """Rows read the state at the chunk's start, columns reach its end."""
    lines: list[str] = []
    rows = {"read": "dq_in", **{f"erase_{i}": f"da_in_{i}" for i in plan.erasing}}
    for row, gradient in rows.items():
        exponent = "G_before" if _cumulative(plan, row) else "G"
        lines.append(f"d_{row} = {gradient}{decayed(plan, exponent)}")
    end = "G_end[None, :] - G" if plan.decay_axis else "G_end - G"
    for j in plan.terms:
        lines.append(f"d_write_{j} = dw_out_{j}{decayed(plan, end)}")
    if plan.decay_axis is None:
        return lines
    total = "{}" if plan.decay_axis else "tl.sum({}, axis=1)"
    plain = [r for r in rows if not _cumulative(plan, r)]
    lines.append("dG = " + " + ".join(total.format(f"{r} * d_{r}") for r in plain))
    exclusive = [r for r in rows if _cumulative(plan, r)]
    if exclusive:
        lines.append("dG_before = " + " + ".join(total.format(f"{r} * d_{r}") for r in exclusive))
    lines.append("dG_end = tl.exp(G_end) * " + ("d_decay_out" if plan.decay_axis else "tl.sum(d_decay_out, axis=0)"))
    for j in plan.terms:
        lines.append(f"left = {total.format(f'write_{j} * d_write_{j}')}")
        lines += ["dG -= left", "dG_end += tl.sum(left, axis=0)"]
    return lines


def _pairs(plan: KernelPlan) -> list[str]:
    kind = "none" if plan.decay_axis is None else "vector" if plan.decay_axis else "scalar"
    masks = {"A": "rows[:, None] {}= rows[None, :]", "L": "rows[:, None] {} rows[None, :]"}
    lines = []
    for name in _score_gradients(plan):
        mask = masks[name[1]].format("<" if name.endswith("_T") else ">")
        lines.append(f"{name} = tl.where({mask}, {name}, 0.0)")
    rows = ["read", *(f"erase_{i}" for i in plan.erasing)]
    columns = [f"write_{j}" for j in plan.terms]
    pair = {(r, j): f"dA_{j}" if r == "read" else f"dL_{r.removeprefix('erase_')}_{j}" for r in rows for j in plan.terms}
    suffix = "_E" if kind == "vector" else "_low"

    def weight(row: str, score: str, turned: str) -> str:
        if kind == "none":
            return f"{score}{turned}.to(LOW)"
        if kind == "scalar":
            since = ("since_before" if _cumulative(plan, row) else "since") + turned
            return f"({since} * {score}{turned}).to(LOW)"
        return f"tl.where(owned{turned}, {score}{turned}, 0.0).to(LOW)"

    row_shares = [
        [
            {
                "name": r,
                "decay": "E_before" if _cumulative(plan, r) else "E",
                "cumulative": "dG_before" if _cumulative(plan, r) else "dG",
            },
            " + ".join(f"dot({weight(r, pair[r, j], '')}, write_{j}{suffix}, PRECISION)" for j in plan.terms),
        ]
        for r in rows
    ]
    column_shares = [
        [c, " + ".join(f"dot({weight(r, pair[r, j], '_T')}, {r}{suffix}, PRECISION)" for r in rows)]
        for j, c in enumerate(columns)
    ]
    shares: dict[str, object] = {"row_shares": row_shares, "column_shares": column_shares}
    exclusive = [r for r in rows if _cumulative(plan, r)]
    if kind == "vector":
        shares |= {
            "columns": columns,
            "inclusive_rows": [r for r in rows if r not in exclusive],
            "exclusive_rows": exclusive,
            "own_token": [[f"dA_{j}", "read", f"write_{j}"] for j in plan.terms],
        }
    else:
        shares |= {"low": [*rows, *columns]} | ({"exclusive_rows": exclusive} if kind == "scalar" else {})
    return [*lines, *render(f"decay/pairs_{kind}.py.jinja", **shares).splitlines()]  # type: ignore[arg-type]


def _decay_gradient(plan: KernelPlan) -> list[str]:
    """From the cumulative sums back to each token's log decay; what is added last decays nothing after it."""
    if plan.decay_axis is None:
        return []
    end = "dG_end[None, :]" if plan.decay_axis else "dG_end"
    lines = [f"d_log_decay = tl.cumsum(dG, axis=0, reverse=True) + {end}"]
    if plan.exclusive:
        lines.append("d_log_decay += tl.cumsum(dG_before, axis=0, reverse=True) - dG_before")
    lines.append(f"d_log_decay = tl.where({INSIDE[plan.decay_axis]} & decays(log_decay), d_log_decay, 0.0)")
    return lines


def _inputs(plan: KernelPlan, sums: Accumulators) -> list[str]:
    lines: list[str] = []
    for name, expr in _operands(plan).items():
        lines += _pull(plan, sums, expr, f"d_{name}", name)
    if plan.decay_axis is not None:
        lines += _pull(plan, sums, plan.decay_log, "d_log_decay", "decay")
    inputs = [i for i in plan.spec.inputs if i.axis != "V"]
    for i in inputs:
        if f"d_{i.name}" not in sums.known:
            lines.append(sums.start(i.name, i.axis, per_head=False))
    lines += _undo_rewrites(plan, sums, [i.name for i in inputs])
    lines += [_store(i) for i in inputs]
    for p in plan.spec.params:
        if p.axis != "V":
            lines += [f"if d_{p.name}_ptr is not None:", f"    {_store_param(p)}"]
    return lines


def _undo_rewrites(plan: KernelPlan, sums: Accumulators, targets: list[str]) -> Iterator[str]:
    """Options backwards, the last one first, each differentiated at the values it read."""
    for index, rewrite in reversed(list(enumerate(plan.rewrites))):
        if rewrite.target not in targets:
            continue
        renamed = printer_with(plan.spec, {n: before(plan, n, index) for n in plan.spec.axes if n != "scale"})
        pulled = backward(renamed, rewrite.value, f"d_{rewrite.target}_after", f"{rewrite.target}_{index}")
        yield f"if {mode_name(rewrite.option)} == {rewrite.mode}:"
        yield f"    d_{rewrite.target}_after = d_{rewrite.target}"
        yield f"    d_{rewrite.target} = tl.zeros_like(d_{rewrite.target}_after)"
        yield from (f"    {step}" for step in pulled.steps)
        yield from (f"    d_{name} += {code}" for name, code in pulled.shares.items())


def _store(i: TokenInput) -> str:
    if i.axis:
        columns, width = COLUMNS[i.axis]
        return f"store_tile(d_{i.name}_ptr + token_head * {width}, HV * {width}, rows, {columns}, count, {width}, d_{i.name})"
    return f"store_column(d_{i.name}_ptr + token_head, HV, rows, count, d_{i.name})"


def _store_param(p: Param) -> str:
    if p.axis:
        columns, width = COLUMNS[p.axis]
        return f"tl.store(d_{p.name}_ptr + at * {width} + {columns}, d_{p.name}, mask={columns} < {width})"
    return f"tl.store(d_{p.name}_ptr + at, d_{p.name})"


def _allocate(plan: KernelPlan) -> list[str]:
    lines = [f"d_{i.name} = gradient_buffer({i.name}, HV)" for i in plan.spec.inputs]
    lines += [f"d_{p.name} = partial_sums({p.name}, layout.chunk_count, HV)" for p in plan.spec.params]
    return lines


def _returned(plan: KernelPlan) -> list[str]:
    lines = [f"sum_over_group(d_{i.name}, {i.name})" for i in plan.spec.inputs]
    return lines + [f"sum_over_chunks(d_{p.name}, {p.name})" for p in plan.spec.params]


__all__ = ["emit_gradients", "local"]
