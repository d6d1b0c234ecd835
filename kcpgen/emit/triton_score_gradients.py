"""`score_gradients.py`: the value axis of the chunk-parallel backward."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kcpgen.emit import solve_in_scan
from kcpgen.emit.render import Value, render
from kcpgen.emit.tidy import live
from kcpgen.emit.triton_adjoint import backward
from kcpgen.emit.triton_blocks import BlockPrinter, math, variable
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_operands import is_exclusive, load_scalars, row_of, scalar_inputs, score_gradients, whole_scores
from kcpgen.emit.triton_prologue import (
    apply_rewrites,
    decay_sums,
    in_rows,
    load_inputs,
    load_params,
    printer,
    used_arguments,
)
from kcpgen.emit.triton_sweeps import begun, start_gradient, store_input, store_param, undone
from kcpgen.plan import KernelPlan
from kcpgen.spec import Param, TokenInput

EQUATIONS = ("dR", "dA", "dL", "dV")


def emit_score_gradients(plan: KernelPlan, shared: Mapping[str, Value]) -> str:
    body = _body(plan)
    early, value_pass = body["early"], body["value_pass"]
    kept, operands = _kept(body), score_operands(plan)
    filled = [*_on_values(plan), *summed_over_values(plan)]
    names = score_gradients(plan)
    return render(
        "score_gradients.py.jinja",
        title=shared["title"],
        arguments=shared["arguments"],
        keywords=shared["backward_keywords"],
        sizes=shared["sizes"],
        value_input=shared["value_input"],
        **body,
        uniform=plan.decay_axis == "",
        solves=bool(plan.erasing),
        solved_before=bool(solve_in_scan.handed_back(plan)),
        used=used_arguments(plan, kept),
        equations=[math(e) for e in plan.form.gradients if e.target.name in EQUATIONS],
        device_functions=device_functions(["load_tile(", *early, *value_pass, *body["scores"], *body["stores"]]),
        first_corrected=f"U_{plan.terms[0]}",
        chunk_operands=in_rows(f"{name}_ptr" for name in operands),
        launch_operands=in_rows(tensor_of(plan, name) for name in operands),
        score_names=names,
        whole_scores=whole_scores(plan),
        summed=len(plan.sums) if sums_over_values(plan) else 0,
        results=score_results(plan),
        result_pointers=in_rows(f"{name}_ptr" for name in score_results(plan)),
        result_tensors=in_rows(score_results(plan)),
        gradient_pointers=in_rows(f"d_{d.name}_ptr" for d in filled),
        gradient_tensors=in_rows(f"d_{d.name}" for d in filled),
        finished=[f"d_{d.name}: torch.Tensor{' | None' if isinstance(d, Param) else ''}," for d in filled],
        value_names=[d.name for d in _on_values(plan)],
        scalar_names=[d.name for d in summed_over_values(plan)],
    )


def _body(plan: KernelPlan) -> dict[str, list[str]]:
    return {
        "early": lines_of(_early(plan)),
        "value_pass": lines_of(_value_pass(plan)),
        "scores": list(mask_scores(plan)),
        "stores": lines_of(_stores(plan)),
    }


def _kept(body: Mapping[str, list[str]]) -> list[str]:
    """What tidying leaves of the kernel."""
    loop = ["for start in range(0, VP, BV):", *(f"    {line}" for line in body["value_pass"])]
    return live([*body["early"], *loop, *body["scores"], *body["stores"]])


def score_operands(plan: KernelPlan) -> list[str]:
    """What the kernel reads of what the serial kernels and `prepare` left."""
    named = set(re.findall(r"\w+", " ".join(_kept(_body(plan)))))
    return [name for name in [*per_token_operands(plan), *_solve_operands(plan)] if f"{name}_ptr" in named]


def values_read(plan: KernelPlan) -> list[str]:
    """Inputs on the value axis that the kernel reads: the gradient of what is written as it is needs none."""
    named = set(re.findall(r"\w+", " ".join(_kept(_body(plan)))))
    return [i.name for i in plan.inputs_on("V") if f"{i.name}_start" in named]


def lines_of(statements: Iterable[str]) -> list[str]:
    """One entry per source line: a statement may come with its body."""
    return [line for statement in statements for line in statement.split("\n")]


def per_token_operands(plan: KernelPlan) -> list[str]:
    """What the serial kernels left: corrected values and their gradients, those of a solve in two parts."""
    rests = [f"dU_{e}_rest" for e in plan.erasing]
    return [*(f"U_{j}" for j in plan.terms), *(f"dU_{j}" for j in plan.terms), *rests]


def inverse(plan: KernelPlan) -> list[str]:
    """Blocks of T, what the solve multiplies with."""
    return [f"T_{i}_{e}" for i in plan.erasing for e in plan.erasing]


def _solve_operands(plan: KernelPlan) -> list[str]:
    return [
        *inverse(plan),
        *(f"L_{i}_{p}" for i in plan.erasing for p in plan.pure_writes),
        *(["sums"] if plan.sums else []),
    ]


def tensor_of(plan: KernelPlan, operand: str) -> str:
    """What a launcher passes for something that the serial kernels or `prepare` left."""
    gradients = per_token_operands(plan)[len(plan.terms) :]
    handed_back = solve_in_scan.handed_back(plan)
    if operand in handed_back.values():
        operand = next(name for name, solved in handed_back.items() if solved == operand)
    if operand not in gradients:
        return f"prepared.{operand}"
    found = f"corrected_gradients[{gradients.index(operand)}]"
    waits = handed_back and operand.endswith("_rest")
    return f"None if prepared.{inverse(plan)[0]} is None else {found}" if waits else found


def _on_values(plan: KernelPlan) -> list[TokenInput | Param]:
    return [*plan.inputs_on("V"), *(p for p in plan.spec.params if p.axis == "V")]


def summed_over_values(plan: KernelPlan) -> list[TokenInput | Param]:
    """What has one number per token or head and takes a share of its gradient from the value axis."""
    lines = list(_value_inputs(plan))
    return [d for d in scalar_inputs(plan) if any(re.search(rf"\bd_{d.name} [+-]?= ", line) for line in lines)]


def sums_over_values(plan: KernelPlan) -> list[str]:
    """Sums over keys that values are made of: the value axis has a share of their gradient."""
    lines = list(_value_inputs(plan))
    return [s.name for s in plan.sums if any(re.search(rf"\bd_{s.name} [+-]?= ", line) for line in lines)]


def score_results(plan: KernelPlan) -> list[str]:
    """What the launcher returns."""
    return [*score_gradients(plan), *(["d_sums"] if sums_over_values(plan) else [])]


def sum_place(plan: KernelPlan, name: str) -> str:
    number = [s.name for s in plan.sums].index(name)
    return f"d_sums_ptr + (at * {len(plan.sums)} + {number}) * C + rows"


def start_sums(plan: KernelPlan, *, apart: bool = True) -> list[str]:
    """Gradients of sums over keys where the key axis takes over. apart: from another kernel."""
    shared = sums_over_values(plan) if apart else []
    return [
        f"d_{s.name} = " + (f"tl.load({sum_place(plan, s.name)})" if s.name in shared else "tl.zeros((C,), tl.float32)")
        for s in plan.sums
    ]


def _early(plan: KernelPlan) -> list[str]:
    """One number per token and head, the blocks of the solve, and the sums over the value axis."""
    stored = [name for name in _solve_operands(plan) if name != "sums"]
    return [
        *load_scalars(plan),
        *(decay_sums(plan) if plan.decay_axis == "" else []),
        *(f"{name} = tl.load({name}_ptr + score_tile)" for name in stored if name not in inverse(plan)),
        *_unless_solved(
            plan,
            [
                *(f"{name} = tl.load({name}_ptr + score_tile)" for name in inverse(plan)),
                *(f"{name}_rest = ({name} - {name}.to(LOW).to(tl.float32)).to(LOW)" for name in inverse(plan)),
                *(f"{name} = {name}.to(LOW)" for name in inverse(plan)),
            ],
        ),
        *(f"{name} = tl.zeros((C, C), tl.float32)" for name in score_gradients(plan)),
        *(start_gradient(d) for d in summed_over_values(plan)),
        *(f"d_{name} = tl.zeros((C,), tl.float32)" for name in sums_over_values(plan)),
    ]


def block_printer(plan: KernelPlan, *, whole: bool = True) -> BlockPrinter:
    """Equations over tiles of scratch: states held transposed, the solve's parts in two.

    whole: what leaves the solve too, where it does so in two parts.
    """
    return BlockPrinter(
        accumulators=frozenset({"dR"}),
        rename={},
        turned=frozenset({"S", "dS_next"}),
        in_two=frozenset({"T", "dU"}),
        kept_whole=frozenset({"dR"} if plan.erases_apart and whole else ()),
    )


def _value_pass(plan: KernelPlan) -> Iterator[str]:
    out = block_printer(plan)
    yield from (f"U_{j} = tl.load(U_{j}_ptr + value_tile)" for j in plan.terms)
    yield from _solve(plan, out)
    for e in plan.form.gradients:
        if e.target.name in ("dA", "dL"):
            yield f"{variable(e.target)} += {out.right_side(e.terms)}"
    yield from (out.assign(e) for e in plan.form.gradients if e.target.name == "dV")
    yield from _value_inputs(plan)


def _solve(plan: KernelPlan, out: BlockPrinter) -> Iterator[str]:
    """Carry the corrected values' gradients through the solve. dR takes the place of dU in memory for the key pass."""
    yield from (f"dU_{j} = tl.load(dU_{j}_ptr + value_tile)" for j in plan.terms)
    lines = [f"dU_{e}_rest = tl.load(dU_{e}_rest_ptr + value_tile)" for e in plan.erasing]
    for equation in plan.form.gradients:
        if equation.target.name == "dR":
            lines += out.corrected(equation, "LOW")
    for e in plan.erasing:
        lines.append(f"tl.store(dU_{e}_ptr + value_tile, dR_{e}_low)  # in the place of dU_{e}, for the key axis")
        if plan.erases_apart:
            lines.append(f"dR_{e}_rest = (dR_{e} - dR_{e}_low.to(tl.float32)).to(LOW)")
            lines.append(f"tl.store(dU_{e}_rest_ptr + value_tile, dR_{e}_rest)")
    there = [f"dR_{e}_low = dU_{e}" for e in plan.erasing] + [f"dR_{e} = dU_{e}.to(tl.float32)" for e in plan.erasing]
    yield from _unless_solved(plan, lines, there)


def _unless_solved(plan: KernelPlan, lines: Sequence[str], instead: Sequence[str] = ()) -> Iterator[str]:
    """Lines for dU that waits for the solve; `instead` where the reverse scan has left dR there."""
    if not solve_in_scan.handed_back(plan):
        yield from lines
        return
    yield "\n    ".join([f"if {inverse(plan)[0]}_ptr is not None:", *lines])
    if instead:
        yield "\n    ".join(["else:  # the reverse scan has solved", *instead])


def _value_inputs(plan: KernelPlan) -> Iterator[str]:
    """Gradients of what the values v_j are made of; the value axis is finished and stored block by block."""
    yield from load_inputs(plan, plan.inputs_on("V"))
    yield from value_gradients(plan)


def value_gradients(plan: KernelPlan) -> Iterator[str]:
    """Likewise, with the inputs loaded."""
    inputs = plan.inputs_on("V")
    params = [p for p in plan.spec.params if p.axis == "V"]
    yield from load_params(plan, params)
    yield from apply_rewrites(plan, [i.name for i in inputs], backward=True)
    lines: list[str] = []
    for j in plan.terms:
        if plan.values[j] != 0:
            lines += backward(printer(plan), plan.values[j], f"dV_{j}", f"value_{j}").lines()
    lines += _undo_value_rewrites(plan)
    yield from begun(_on_values(plan), lines)
    yield from (store_input(i) for i in inputs)
    yield from (f"if d_{p.name}_ptr is not None:\n    {store_param(p)}" for p in params)


def _undo_value_rewrites(plan: KernelPlan) -> Iterator[str]:
    """Options on the value axis, the last one first. A sum over values sees the whole axis in its block."""
    for index, rewrite in reversed(list(enumerate(plan.rewrites))):
        if plan.spec.axes[rewrite.target] == "V":
            yield from undone(plan, index, rewrite)[1]


def mask_scores(plan: KernelPlan) -> Iterator[str]:
    """Mask the score gradients; where the decay is one factor per pair, apply it here, once for all key blocks."""
    for name in score_gradients(plan):
        row = row_of(name)
        masked = f"tl.where({'up_to' if row == 'read' else 'before'}(rows), {name}, 0.0)"
        since = "since_before" if is_exclusive(plan, row) else "since"
        yield f"{name} = {f'{since} * ' if plan.decay_axis == '' else ''}{masked}"


def _stores(plan: KernelPlan) -> Iterator[str]:
    whole = whole_scores(plan)
    for name in score_gradients(plan):
        yield f"tl.store({name}_ptr + result_tile, {name}{'' if name in whole else '.to(LOW)'})"
    for d in summed_over_values(plan):
        yield store_input(d) if isinstance(d, TokenInput) else f"if d_{d.name}_ptr is not None:\n    {store_param(d)}"
    yield from (f"tl.store({sum_place(plan, name)}, d_{name})" for name in sums_over_values(plan))
