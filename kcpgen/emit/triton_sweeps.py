"""The backward of token-local algebra, scheduled over sweeps of the key axis.

The main sweep carries the operands' gradients to the inputs block by block. A sum over the whole key axis (a norm, say)
has its gradient only after that sweep; what it hands on takes another one. `Sweeps` collects source lines per sweep:
those of the loop over key blocks, and those that follow it and act on one number per token.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import sympy

from kcpgen.emit.triton_adjoint import Backward, backward
from kcpgen.emit.triton_prologue import (
    COLUMNS,
    apply_rewrites,
    load_inputs,
    load_params,
    mode_name,
    printer,
    read_by,
)
from kcpgen.plan import KernelPlan, PlannedRewrite
from kcpgen.spec import Param, TokenInput


@dataclass(kw_only=True)
class Sweep:
    loop: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)  # key-axis inputs and parameters whose gradient this loop adds to
    options: set[str] = field(default_factory=set)  # it runs only when one of these is on; empty: always


@dataclass(kw_only=True)
class Sweeps:
    """`complete[name]` is the sweep after which the gradient of `name`, as collected so far, is whole."""

    plan: KernelPlan
    sweeps: list[Sweep] = field(default_factory=lambda: [Sweep()])
    complete: dict[str, int] = field(default_factory=dict)

    def pull(self, value: sympy.Expr, gradient: str, prefix: str, *, in_loop: bool) -> None:
        """Carry the gradient of an operand to what it is made of, in the main sweep or just after it."""
        pulled = backward(printer(self.plan), value, gradient, prefix)
        lines = pulled.lines()
        (self.sweeps[0].loop if in_loop else self.sweeps[0].scalars).extend(lines)
        self._touch(0, pulled.names, in_loop)

    def finish(self) -> None:
        """Everything after the operands: their sums, then the options backwards, each at the values it read."""
        self._sums_of(None)
        for index, rewrite in reversed(list(enumerate(self.plan.rewrites))):
            if self.plan.spec.axes[rewrite.target] != "V":  # the value pass has seen to those
                self._undo(index, rewrite)
            self._sums_of(index)

    def _undo(self, index: int, rewrite: PlannedRewrite) -> None:
        at = self.complete.get(rewrite.target, 0)
        on_keys = self.plan.spec.axes[rewrite.target] == "K"
        pulled, lines = undone(self.plan, index, rewrite)
        (self.sweeps[at].loop if on_keys else self.sweeps[at].scalars).extend(lines)
        self._touch(at, [rewrite.target, *pulled.names], on_keys)

    def _sums_of(self, rewrite: int | None) -> None:
        """Hand on the gradients of the sums one rewrite (or, for None, the operands) read; outer sums come first."""
        for planned in reversed(self.plan.sums):
            if planned.rewrite == rewrite:
                at = self.complete.get(planned.name, 0) + 1
                self._hand_on(planned.name, planned.value, rewrite, at)

    def _hand_on(self, name: str, value: sympy.Expr, rewrite: int | None, at: int) -> None:
        if at == len(self.sweeps):
            self.sweeps.append(Sweep())
        plan, sweep = self.plan, self.sweeps[at]
        names = None if rewrite is None else read_by(plan, plan.rewrites[rewrite])
        pulled = backward(printer(plan, names), value, f"d_{name}", f"{name}_inner", scalar=True)
        lines = [*pulled.lines()]
        if rewrite is not None:
            planned = plan.rewrites[rewrite]
            lines = [f"if {mode_name(planned.option)} == {planned.mode}:", *(f"    {line}" for line in lines)]
            sweep.options.add(mode_name(planned.option))
        else:
            sweep.options.add("")
        sweep.loop.extend(lines)
        self._touch(at, pulled.names, True)

    def _touch(self, at: int, names: Iterable[str], in_loop: bool) -> None:
        axes = self.plan.spec.axes
        for name in names:
            self.complete[name] = max(self.complete.get(name, 0), at)
            if in_loop and axes.get(name, "") == "K":
                self.sweeps[at].touched.add(name)

    def key_gradients(self) -> list[str]:
        """The main sweep's lines with what it must start from and leave behind."""
        plan = self.plan
        declared: list[TokenInput | Param] = [*key_inputs(plan), *key_params(plan)]
        stores = [*(store_input(i) for i in key_inputs(plan)), *(_guarded(p) for p in key_params(plan))]
        return [*begun(declared, self.sweeps[0].loop), *stores]

    def later(self) -> Iterator[tuple[str, list[str], list[str]]]:
        """Per further sweep: the condition to run it, the lines of its loop over key blocks, and those that follow."""
        for sweep in self.sweeps[1:]:
            options = "" if "" in sweep.options else " or ".join(f"{o} > 0" for o in sorted(sweep.options))
            yield f"if {options or 'True'}:", [*self._carried(sweep), *sweep.loop, *self._left(sweep)], sweep.scalars

    def _carried(self, sweep: Sweep) -> Iterator[str]:
        """Inputs again, at every version, and what the sweeps before left of the gradients."""
        plan = self.plan
        inputs = key_inputs(plan)
        yield from load_inputs(plan, inputs)
        yield from load_params(plan, key_params(plan))
        yield from apply_rewrites(plan, [i.name for i in inputs], backward=True)
        for i in inputs:
            if i.name in sweep.touched:
                yield f"d_{i.name} = load_tile(d_{i.name}_ptr + token_head * K, HV * K, rows, keys, count, K)"
        for p in key_params(plan):
            if p.name in sweep.touched:
                # No pointer: a parameter that another option reads, while this sweep runs for one that does not.
                yield start_gradient(p)
                yield f"if d_{p.name}_ptr is not None:"
                yield f"    d_{p.name} += tl.load(d_{p.name}_ptr + at * K + keys, mask=keys < K, other=0.0)"

    def _left(self, sweep: Sweep) -> Iterator[str]:
        yield from (store_input(i) for i in key_inputs(self.plan) if i.name in sweep.touched)
        yield from (_guarded(p) for p in key_params(self.plan) if p.name in sweep.touched)

    def carrying(self, name: str) -> str:
        """Host code that tells whether the gradient of an input passes through memory between sweeps."""
        options = {o for sweep in self.sweeps[1:] if name in sweep.touched for o in sweep.options}
        if "" in options:
            return "True"
        return " or ".join(f"{o.lower()}_mode > 0" for o in sorted(options)) or "False"


def key_inputs(plan: KernelPlan) -> tuple[TokenInput, ...]:
    return plan.inputs_on("K")


def key_params(plan: KernelPlan) -> tuple[Param, ...]:
    return tuple(p for p in plan.spec.params if p.axis == "K")


def undone(plan: KernelPlan, index: int, rewrite: PlannedRewrite) -> tuple[Backward, list[str]]:
    """Lines that turn the gradient of what a rewrite made into that of what it read."""
    names = printer(plan, read_by(plan, rewrite))
    pulled = backward(names, rewrite.value, f"d_{rewrite.target}", f"{rewrite.target}_{index}")
    lines = (f"    {line}" for line in pulled.replacing(rewrite.target))
    return pulled, [f"if {mode_name(rewrite.option)} == {rewrite.mode}:", *lines]


def begun(declared: Iterable[TokenInput | Param], lines: Sequence[str], tokens: str = "C") -> list[str]:
    """Lines that add to gradients, where each gradient starts: with its first share, or at zero."""
    lines, starts = list(lines), []
    for d in declared:
        first = next((at for at, line in enumerate(lines) if re.search(rf"\bd_{d.name}\b", line)), None)
        added = None if first is None else re.match(rf"d_{d.name} ([+-])= ", lines[first])
        if first is None or added is None:
            starts.append(start_gradient(d, tokens))
        else:
            sign = "-" if added[1] == "-" else ""
            lines[first] = f"d_{d.name} = {sign}{lines[first][added.end() :]}"
    return [*starts, *lines]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The gradient of a parameter, added up tile by tile in a loop; sums over `axes`, in turn, are left for the end."""

    param: Param
    axes: tuple[int, ...]

    @property
    def start(self) -> str:
        """Zero for each token of a row, or also for each key."""
        if not self.axes:
            return start_gradient(self.param)
        shape = "(BLOCKS, BK)" if self.param.axis or len(self.axes) > 1 else "(BLOCKS,)"
        return f"d_{self.param.name} = tl.zeros({shape}, tl.float32)"

    @property
    def whole(self) -> str:
        code = f"d_{self.param.name}"
        for axis in self.axes:
            code = f"tl.sum({code}, axis={axis})"
        return code


def collected(param: Param, lines: Sequence[str]) -> tuple[Collected, list[str]]:
    """Lines of a loop over rows, those that add to a parameter's gradient without the sums that are common to them."""
    added = [re.fullmatch(rf"(\s*d_{param.name} [+-]= )(.*)", line) for line in lines]
    shares = [match[2] for match in added if match]
    axes: list[int] = []
    while shares and (axis := _common_sum(shares)) is not None:
        axes.insert(0, axis)
        shares = [share.removeprefix("tl.sum(").removesuffix(f", axis={axis})") for share in shares]
    left = iter(shares)
    kept = [f"{match[1]}{next(left)}" if match else line for match, line in zip(added, lines, strict=True)]
    return Collected(param=param, axes=tuple(axes)), kept


def _common_sum(shares: Sequence[str]) -> int | None:
    """The axis, if each of these expressions is as a whole a sum over it."""
    axes = {_summed_over(ast.parse(share, mode="eval").body) for share in shares}
    return axes.pop() if len(axes) == 1 else None


def _summed_over(code: ast.expr) -> int | None:
    if not (isinstance(code, ast.Call) and ast.unparse(code.func) == "tl.sum"):
        return None
    return int(ast.literal_eval(code.keywords[0].value))


def start_gradient(declared: TokenInput | Param, tokens: str = "C") -> str:
    width = {"": "", "K": "BK", "V": "BV"}[declared.axis]
    sizes = [*([tokens] if isinstance(declared, TokenInput) else []), *([width] if width else [])]
    shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
    return f"d_{declared.name} = tl.zeros({shape}, tl.float32)"


def store_input(i: TokenInput) -> str:
    if i.axis:
        columns, width = COLUMNS[i.axis]
        place = f"d_{i.name}_ptr + token_head * {width}, HV * {width}"
        return f"store_tile({place}, rows, {columns}, count, {width}, d_{i.name})"
    return f"store_column(d_{i.name}_ptr + token_head, HV, rows, count, d_{i.name})"


def store_param(p: Param, value: str = "") -> str:
    value = value or f"d_{p.name}"
    if p.axis:
        columns, width = COLUMNS[p.axis]
        return f"tl.store(d_{p.name}_ptr + at * {width} + {columns}, {value}, mask={columns} < {width})"
    return f"tl.store(d_{p.name}_ptr + at, {value})"


def _guarded(p: Param) -> str:
    return f"if d_{p.name}_ptr is not None:\n    {store_param(p)}"


__all__ = ["Sweeps", "begun", "key_inputs", "key_params", "start_gradient", "store_input", "store_param", "undone"]
