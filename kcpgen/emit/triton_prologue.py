"""The head of the chunk-parallel kernels: inputs loaded, options applied, the decay summed; their parameter lists."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import sympy

from kcpgen.emit.triton_code import TritonPrinter
from kcpgen.plan import KernelPlan, PlannedRewrite, PlannedSum
from kcpgen.spec import Param, TokenInput
from kcpgen.tokenwise import sigmoid

INSIDE = {"": "live", "K": "inside", "V": "value_inside"}
COLUMNS = {"K": ("keys", "K"), "V": ("columns", "V")}
# Variables of the kernels themselves: a spec may use these names too, its variables are then called <name>_in.
KERNEL_NAMES = frozenset((
    "at", "head", "group", "batch", "first", "count", "rows", "keys", "live", "inside", "start", "columns", "owned",
    "boundary", "lanes", "level", "diagonal", "since", "share", "own", "earlier", "here", "edge", "work", "sums",
    "H", "HV", "C", "KP", "VP", "BK", "BV", "LOW", "LEVELS", "PRECISION", "G", "E", "S", "O", "M", "dO", "dS", "dG",
    "tl", "triton", "torch", "dot", "sigmoid", "softplus", "read", "decay", "layout", "tiles", "prepared", "do",
    "states", "scratch", "scale", "precision", "block", "corner", "tile", "collected", "arriving", "decay_before",
    "decay_parts", "part", "parts", "key_block", "key_start", "key_tile", "state_tile", "value_tile", "ROWS",
    "BLOCKS", "Gs", "dGs", "dG_block", "t", "s", "together", "mismatch", "borders", "unseen", "chunks", "stretches",
    "before", "arrived", "nothing",
))  # fmt: skip


def local_names(plan: KernelPlan) -> dict[str, str]:
    """Spec name -> kernel variable, where they differ: whatever could meet a variable of the kernels."""
    spec = plan.spec
    declared = [*(i.name for i in spec.inputs), *(p.name for p in spec.params), *(c.name for c in spec.constants)]
    return {name: f"{name}_in" for name in declared if name in KERNEL_NAMES or "_" in name}


def printer(plan: KernelPlan, rename: Mapping[str, str] | None = None) -> TritonPrinter:
    """Prints over the inputs, parameters and sums of a plan."""
    axes = {planned.name: "" for planned in plan.sums}
    return TritonPrinter(spec=plan.spec, rename=local_names(plan) if rename is None else rename, extra_axes=axes)


def mode_name(option: str) -> str:
    """The constexpr of an option: 0 when off, else the 1-based variant."""
    return option.upper()


def in_rows(items: Iterable[str]) -> list[str]:
    """A list in lines: `a, b,` `c,`."""
    text = "".join(f"{item}, " for item in items).rstrip()
    return textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False)


def parameters(plan: KernelPlan) -> list[str]:
    """Kernel parameters for the spec's own arguments, one line per argument."""
    lines = []
    for i in plan.spec.inputs:
        lines.append(f"{i.name}_ptr, {i.name}_batch, {i.name}_token, {i.name}_head,")
    lines += [f"{p.name}_ptr," for p in plan.spec.params]
    lines += [f"{local(plan, c.name)}," for c in plan.spec.constants]
    lines.append("scale,")
    lines += [f"{mode_name(o.name)}: tl.constexpr," for o in plan.spec.options]
    lines += ["BOUNDED: tl.constexpr,"] if plan.decay_axis else []
    return lines


def launch_arguments(plan: KernelPlan) -> list[str]:
    """What the launcher passes for `parameters`, in the same order."""
    lines = [f"{i.name}, *{i.name}.stride()[:3]," for i in plan.spec.inputs]
    lines += [f"{p.name}," for p in plan.spec.params]
    lines += [f"{c.name}," for c in plan.spec.constants]
    lines.append("scale,")
    lines += [f"{o.name}_mode," for o in plan.spec.options]
    lines += ["bounded,"] if plan.decay_axis else []
    return lines


def used_arguments(plan: KernelPlan, body: Iterable[str]) -> dict[str, list[str]]:
    """`parameters`, `launch_arguments` and `starts` of those of the spec's arguments that the lines of a body name."""
    named = set(re.findall(r"\w+", " ".join(body)))
    inputs = [i for i in plan.spec.inputs if f"{i.name}_start" in named]
    params = [p for p in plan.spec.params if f"{p.name}_ptr" in named]
    constants = [c for c in plan.spec.constants if local(plan, c.name) in named]
    scale = ["scale"] if "scale" in named else []
    options = [o for o in plan.spec.options if mode_name(o.name) in named]
    return {
        "parameters": [
            *(f"{i.name}_ptr, {i.name}_batch, {i.name}_token, {i.name}_head," for i in inputs),
            *(f"{p.name}_ptr," for p in params),
            *(f"{local(plan, c.name)}," for c in constants),
            *(f"{name}," for name in scale),
            *(f"{mode_name(o.name)}: tl.constexpr," for o in options),
        ],
        "launch_arguments": [
            *(f"{i.name}, *{i.name}.stride()[:3]," for i in inputs),
            *(f"{p.name}," for p in params),
            *(f"{c.name}," for c in constants),
            *(f"{name}," for name in scale),
            *(f"{o.name}_mode," for o in options),
        ],
        "starts": [start for i, start in zip(plan.spec.inputs, starts(plan), strict=True) if i in inputs],
    }


def local(plan: KernelPlan, name: str) -> str:
    return local_names(plan).get(name, name)


def starts(plan: KernelPlan) -> list[str]:
    """Where the chunk begins in each input."""
    lines = []
    for i in plan.spec.inputs:
        head = "group" if i.heads == "H" else "head"
        offset = f"batch * {i.name}_batch + first * {i.name}_token + {head} * {i.name}_head"
        lines.append(f"{i.name}_start = {i.name}_ptr + {offset}")
    return lines


def load_inputs(plan: KernelPlan, inputs: Iterable[TokenInput]) -> Iterator[str]:
    for i in inputs:
        place = f"{i.name}_start, {i.name}_token, rows"
        if i.axis:
            columns, width = COLUMNS[i.axis]
            yield f"{local(plan, i.name)} = load_tile({place}, {columns}, count, {width})"
        else:
            yield f"{local(plan, i.name)} = load_column({place}, count)"


def load_params(plan: KernelPlan, params: Iterable[Param]) -> Iterator[str]:
    """Parameters of options that are off are not passed, so each load stands under the modes that use it."""
    for p in params:
        name = local(plan, p.name)
        if p.axis:
            columns, width = COLUMNS[p.axis]
            load = f"tl.load({p.name}_ptr + head * {width} + {columns}, mask={columns} < {width}, other=0.0)"
        else:
            load = f"tl.load({p.name}_ptr + head)"
        yield from where_read(plan, p, f"{name} = {load}")


def where_read(plan: KernelPlan, p: Param, statement: str) -> list[str]:
    """A statement that is to act only if something reads this parameter."""
    if _used_outside_options(plan, p.name):
        return [statement]
    return [f"if {' or '.join(sorted(_reading(plan, p.name)))}:", f"    {statement}"]


def _reading(plan: KernelPlan, name: str) -> Iterator[str]:
    """When an option reads a parameter: it is not given where only other variants of the option do."""
    for option in {r.option for r in plan.rewrites}:
        modes = {r.mode for r in plan.rewrites if r.option == option}
        reading = {r.mode for r in plan.rewrites if r.option == option and name in plan.reads(r.value)}
        if reading == modes:
            yield f"{mode_name(option)} > 0"
        else:
            yield from (f"{mode_name(option)} == {mode}" for mode in sorted(reading))


def _used_outside_options(plan: KernelPlan, name: str) -> bool:
    exprs = [plan.decay_log, *plan.bases.values(), *plan.values, plan.read.full, *(r.full for r in plan.erase.values())]
    return any(name in plan.reads(e) for e in exprs)


def apply_rewrites(plan: KernelPlan, inputs: Sequence[str], *, backward: bool) -> Iterator[str]:
    """Options in the spec's order, the sums they need known; the backward keeps what each option read."""
    chosen = [rewrite for rewrite in plan.rewrites if rewrite.target in inputs]
    for _, of_option in groupby(chosen, key=lambda rewrite: rewrite.option):
        rewrites = list(of_option)
        if backward:
            for target in dict.fromkeys(r.target for r in rewrites):
                yield f"{as_read(plan, rewrites[0].option, target)} = {local(plan, target)}"
        for rewrite in rewrites:
            yield f"if {mode_name(rewrite.option)} == {rewrite.mode}:"
            axis = plan.spec.axes[rewrite.target]
            code = masked(plan, rewrite.value, axis, printer(plan).code(rewrite.value, axis))
            yield f"    {local(plan, rewrite.target)} = {code}"


def as_read(plan: KernelPlan, option: str, target: str) -> str:
    """The variable that holds `target` as an option finds it, which is all that the option's rewrite of it reads."""
    first = next(r.option for r in plan.rewrites if r.target == target)
    return f"{local(plan, target)}_given" if option == first else f"{local(plan, target)}_before_{option}"


def read_by(plan: KernelPlan, rewrite: PlannedRewrite) -> dict[str, str]:
    """Names of the kernel for what one rewrite reads."""
    return {**local_names(plan), rewrite.target: as_read(plan, rewrite.option, rewrite.target)}


def masked(plan: KernelPlan, expr: sympy.Expr, axis: str, code: str, inside: str = "") -> str:
    """`code` of `expr`, made zero outside the chunk and the axis (or `inside`), unless it is zero there already."""
    return code if _vanishes(plan, expr, axis) else f"tl.where({inside or INSIDE[axis]}, {code}, 0.0)"


def _vanishes(plan: KernelPlan, expr: sympy.Expr, axis: str) -> bool:
    """Whether an input, zero outside, is a factor, and no other factor can be infinite there."""
    inputs = {i.name for i in plan.inputs_on(axis)}
    factors = [_base_of_power(factor) for factor in sympy.Mul.make_args(expr)]
    finite = all(factor.is_Symbol or factor.is_Number or isinstance(factor, sigmoid) for factor in factors)
    return finite and any(factor.is_Symbol and factor.name in inputs for factor in factors)


def _base_of_power(factor: sympy.Expr) -> sympy.Expr:
    whole = factor.is_Pow and factor.exp.is_Integer and factor.exp > 0
    return factor.base if whole else factor


def load_sums(plan: KernelPlan) -> Iterator[str]:
    for number, planned in enumerate(plan.sums):
        load = f"{planned.name} = tl.load(sums_ptr + (at * {len(plan.sums)} + {number}) * C + rows)"
        yield from where_summed(plan, planned, load)


def where_summed(plan: KernelPlan, planned: PlannedSum, statement: str) -> list[str]:
    """A statement that is to act only if this sum is made."""
    if planned.rewrite is None:
        return [statement]
    rewrite = plan.rewrites[planned.rewrite]
    return [f"if {mode_name(rewrite.option)} == {rewrite.mode}:", f"    {statement}"]


def decay_sums(plan: KernelPlan) -> Iterator[str]:
    """Sums of log2 decays of one number a head, G through a token, G_before up to it, and what they make of pairs."""
    yield from running_decay(plan)
    yield "G_end = tl.sum(log_decay, axis=0)"
    yield from pair_decays(plan)


def running_decay(plan: KernelPlan) -> Iterator[str]:
    """G, and G_before where an erase reads the state before its token's decay; only of an op that decays."""
    yield log_decay(plan)
    yield "G = tl.cumsum(log_decay, axis=0)"
    if plan.exclusive:
        yield "G_before = G - log_decay"


def pair_decays(plan: KernelPlan) -> Iterator[str]:
    """Where a token has one decay for all keys: what a row t reads of column s, [C, C]."""
    yield "since = tl.exp2(tl.where(up_to(rows), G[:, None] - G[None, :], float('-inf')))"
    if plan.exclusive:
        yield "since_before = tl.exp2(tl.where(before(rows), G_before[:, None] - G[None, :], float('-inf')))"


def log_decay(plan: KernelPlan, function: str = "log2_decay") -> str:
    assert plan.decay_axis is not None
    log = f"{function}({printer(plan).code(plan.decay_log, plan.decay_axis)})"
    return f"log_decay = {masked(plan, plan.decay_log, plan.decay_axis, log)}"


def decayed(plan: KernelPlan, exponent: str) -> str:
    """The decay over `exponent` as a factor of a [C, keys] tile, with the leading ` * `; empty without a decay."""
    if plan.decay_axis is None:
        return ""
    return f" * tl.exp2({exponent})" + ("" if plan.decay_axis else "[:, None]")


def form_bases(plan: KernelPlan, chosen: Iterable[str] | None = None) -> Iterator[str]:
    """All bases that are no inputs, or those among the chosen ones."""
    p = printer(plan)
    for name, expr in plan.bases.items():
        if not plan.loaded(name) and (chosen is None or name in chosen):
            yield f"{name} = {masked(plan, expr, 'K', p.code(expr, 'K'))}"


def rounded(code: str) -> str:
    """An expression rounded to what feeds dots."""
    whole = isinstance(ast.parse(code, mode="eval").body, ast.Name | ast.Call)
    return f"{code}.to(LOW)" if whole else f"({code}).to(LOW)"


def base_variable(plan: KernelPlan, name: str) -> str:
    return local(plan, name) if plan.loaded(name) else name
