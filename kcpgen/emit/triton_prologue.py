"""The head of the chunk-parallel kernels: inputs loaded, options applied, the decay summed; their parameter lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kcpgen.emit.triton_code import TritonPrinter
from kcpgen.plan import KernelPlan, PlannedRewrite
from kcpgen.spec import Param, TokenInput
from kcpgen.tokenwise import names

INSIDE = {"": "live", "K": "inside", "V": "value_inside"}
COLUMNS = {"K": ("keys", "K"), "V": ("columns", "V")}
# Variables of the kernels themselves: a spec may use these names too, its variables are then called <name>_in.
KERNEL_NAMES = frozenset((
    "at", "head", "batch", "first", "count", "rows", "keys", "live", "inside", "start", "columns", "owned",
    "boundary", "level", "diagonal", "since", "share", "own", "earlier", "anchor", "edge", "work", "sums", "H",
    "HV", "C", "KP", "VP", "BV", "LOW", "LEVELS", "PRECISION", "G", "E", "S", "O", "M", "dO", "dS", "dG", "tl",
    "triton", "torch", "dot", "sigmoid", "softplus", "read", "decay", "layout", "tiles", "prepared", "do", "states",
    "scratch", "scale", "precision",
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


def local(plan: KernelPlan, name: str) -> str:
    return local_names(plan).get(name, name)


def load_inputs(plan: KernelPlan, inputs: Iterable[TokenInput]) -> Iterator[str]:
    for i in inputs:
        head = "head // (HV // H)" if i.heads == "H" else "head"
        base = f"{i.name}_ptr + batch * {i.name}_batch + first * {i.name}_token + ({head}) * {i.name}_head"
        base = base.replace("(head)", "head")
        if i.axis:
            columns, width = COLUMNS[i.axis]
            yield f"{local(plan, i.name)} = load_tile({base}, {i.name}_token, rows, {columns}, count, {width})"
        else:
            yield f"{local(plan, i.name)} = load_column({base}, {i.name}_token, rows, count)"


def load_params(plan: KernelPlan, params: Iterable[Param]) -> Iterator[str]:
    """Parameters of options that are off are not passed, so each load stands under the modes that use it."""
    for p in params:
        name = local(plan, p.name)
        if p.axis:
            columns, width = COLUMNS[p.axis]
            load = f"tl.load({p.name}_ptr + head * {width} + {columns}, mask={columns} < {width}, other=0.0)"
        else:
            load = f"tl.load({p.name}_ptr + head)"
        options = sorted({mode_name(r.option) for r in plan.rewrites if p.name in names(r.value)})
        if _used_outside_options(plan, p.name):
            yield f"{name} = {load}"
        else:
            yield f"if {' or '.join(f'{o} > 0' for o in options)}:"
            yield f"    {name} = {load}"


def _used_outside_options(plan: KernelPlan, name: str) -> bool:
    exprs = [plan.decay_log, *plan.bases.values(), *plan.values, plan.read.full, *(r.full for r in plan.erase.values())]
    return any(name in names(e) for e in exprs)


def apply_rewrites(plan: KernelPlan, inputs: Sequence[str], *, backward: bool) -> Iterator[str]:
    """Options in the spec's order.

    The forward computes the sums they need; the backward reads those back, and keeps what each one read.
    """
    for index, rewrite in enumerate(plan.rewrites):
        if rewrite.target in inputs:
            yield from _apply(plan, index, rewrite, backward)


def _apply(plan: KernelPlan, index: int, rewrite: PlannedRewrite, backward: bool) -> Iterator[str]:
    target = local(plan, rewrite.target)
    axis = plan.spec.axes[rewrite.target]
    if backward:
        yield f"{version(plan, rewrite.target, index)} = {target}"
    yield f"if {mode_name(rewrite.option)} == {rewrite.mode}:"
    if not backward:
        yield from (f"    {line}" for line in compute_sums(plan, index))
    yield f"    {target} = tl.where({INSIDE[axis]}, {printer(plan).code(rewrite.value, axis)}, 0.0)"


def version(plan: KernelPlan, name: str, index: int) -> str:
    """The variable that holds `name` as rewrite number `index` reads it."""
    later = [i for i, r in enumerate(plan.rewrites) if i >= index and r.target == name]
    return f"{local(plan, name)}_before{later[0]}" if later else local(plan, name)


def compute_sums(plan: KernelPlan, rewrite: int | None) -> Iterator[str]:
    """Sums over keys, kept for the backward."""
    for number, planned in enumerate(plan.sums):
        if planned.rewrite == rewrite:
            yield f"{planned.name} = tl.sum({printer(plan).code(planned.value, 'K')}, axis=1)"
            yield f"tl.store(sums_ptr + (at * {len(plan.sums)} + {number}) * C + rows, {planned.name})"


def load_sums(plan: KernelPlan) -> Iterator[str]:
    for number, planned in enumerate(plan.sums):
        load = f"{planned.name} = tl.load(sums_ptr + (at * {len(plan.sums)} + {number}) * C + rows)"
        if planned.rewrite is None:
            yield load
        else:
            rewrite = plan.rewrites[planned.rewrite]
            yield from (f"if {mode_name(rewrite.option)} == {rewrite.mode}:", f"    {load}")


def decay_sums(plan: KernelPlan) -> Iterator[str]:
    """Cumulative log2 decays: G through a token, G_before up to it, G_after from behind it to the chunk's end."""
    if plan.decay_axis is None:
        return
    log = f"log2_decay({printer(plan).code(plan.decay_log, plan.decay_axis)})"
    plain = plan.decay_log.is_Symbol
    yield f"log_decay = {log if plain else f'tl.where({INSIDE[plan.decay_axis]}, {log}, 0.0)'}"
    yield "G = tl.cumsum(log_decay, axis=0)"
    if plan.exclusive:
        yield "G_before = G - log_decay"
    if plan.decay_axis:
        yield "G_end = tl.sum(log_decay, axis=0)"
        yield "G_after = tl.minimum(G_end[None, :] - G, 0.0)"
    else:
        yield "G_end = tl.sum(log_decay, axis=0)"
        yield "G_after = sum_scalars(after(rows), log_decay)"
        yield "since = tl.exp2(tl.where(up_to(rows), G[:, None] - G[None, :], float('-inf')))"
    if plan.exclusive and not plan.decay_axis:
        yield "since_before = tl.exp2(tl.where(before(rows), G_before[:, None] - G[None, :], float('-inf')))"


def decayed(plan: KernelPlan, exponent: str) -> str:
    """The decay over `exponent` as a factor of a [C, keys] tile, with the leading ` * `; empty without a decay."""
    if plan.decay_axis is None:
        return ""
    return f" * tl.exp2({exponent})" + ("" if plan.decay_axis else "[:, None]")


def form_bases(plan: KernelPlan) -> Iterator[str]:
    p = printer(plan)
    for name, expr in plan.bases.items():
        if not expr.is_Symbol:
            yield f"{name} = tl.where(inside, {p.code(expr, 'K')}, 0.0)"


def base_variable(plan: KernelPlan, name: str) -> str:
    return local(plan, name) if plan.bases[name].is_Symbol else name
