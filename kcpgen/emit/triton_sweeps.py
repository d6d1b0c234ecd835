"""The backward of token-local algebra, scheduled over sweeps of the key axis.

The main sweep carries the operands' gradients to the inputs block by block. A sum over the whole key axis (a norm, say)
has its gradient only after that sweep; what it hands on takes another one. `Sweeps` collects source lines per sweep:
those of the loop over key blocks, and those that follow it and act on one number per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import sympy

from kcpgen.emit.triton_code import backward
from kcpgen.emit.triton_prologue import (
    COLUMNS,
    apply_rewrites,
    load_inputs,
    load_params,
    local,
    mode_name,
    printer,
    version,
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
        lines = [*pulled.steps, *(f"d_{name} += {code}" for name, code in pulled.shares.items())]
        (self.sweeps[0].loop if in_loop else self.sweeps[0].scalars).extend(lines)
        self._touch(0, pulled.shares, in_loop)

    def finish(self) -> None:
        """Everything after the operands: their sums, then the options backwards, each at the values it read."""
        self._sums_of(None)
        for index, rewrite in reversed(list(enumerate(self.plan.rewrites))):
            if self.plan.spec.axes[rewrite.target] != "V":
                self._undo(index, rewrite)
                self._sums_of(index)

    def _undo(self, index: int, rewrite: PlannedRewrite) -> None:
        at = self.complete.get(rewrite.target, 0)
        on_keys = self.plan.spec.axes[rewrite.target] == "K"
        names = {name: version(self.plan, name, index) for name in self.plan.spec.axes if name != "scale"}
        target = f"d_{rewrite.target}"
        pulled = backward(printer(self.plan, names), rewrite.value, f"{target}_after", f"{rewrite.target}_{index}")
        lines = [
            f"if {mode_name(rewrite.option)} == {rewrite.mode}:",
            f"    {target}_after = {target}",
            f"    {target} = tl.zeros_like({target}_after)",
            *(f"    {step}" for step in pulled.steps),
            *(f"    d_{name} += {code}" for name, code in pulled.shares.items()),
        ]
        (self.sweeps[at].loop if on_keys else self.sweeps[at].scalars).extend(lines)
        self._touch(at, [rewrite.target, *pulled.shares], on_keys)

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
        names = None
        if rewrite is not None:
            names = {n: version(plan, n, rewrite) for n in plan.spec.axes if n != "scale"}
        pulled = backward(printer(plan, names), value, f"d_{name}", f"{name}_inner", scalar=True)
        lines = [*pulled.steps, *(f"d_{n} += {code}" for n, code in pulled.shares.items())]
        if rewrite is not None:
            planned = plan.rewrites[rewrite]
            lines = [f"if {mode_name(planned.option)} == {planned.mode}:", *(f"    {line}" for line in lines)]
            sweep.options.add(mode_name(planned.option))
        else:
            sweep.options.add("")
        sweep.loop.extend(lines)
        self._touch(at, pulled.shares, True)

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
        starts = [start_gradient(d) for d in declared]
        stores = [*(store_input(i) for i in key_inputs(plan)), *(_guarded(p) for p in key_params(plan))]
        return [*starts, *self.sweeps[0].loop, *stores]

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
                yield f"d_{p.name} = tl.load(d_{p.name}_ptr + at * K + keys, mask=keys < K, other=0.0)"

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


def start_gradient(declared: TokenInput | Param) -> str:
    width = {"": "", "K": "BK", "V": "BV"}[declared.axis]
    if isinstance(declared, TokenInput):
        shape = f"(C, {width})" if width else "(C,)"
    else:
        shape = f"({width},)" if width else "()"
    return f"d_{declared.name} = tl.full({shape}, 0.0, tl.float32)"


def store_input(i: TokenInput) -> str:
    if i.axis:
        columns, width = COLUMNS[i.axis]
        place = f"d_{i.name}_ptr + token_head * {width}, HV * {width}"
        return f"store_tile({place}, rows, {columns}, count, {width}, d_{i.name})"
    return f"store_column(d_{i.name}_ptr + token_head, HV, rows, count, d_{i.name})"


def store_param(p: Param) -> str:
    if p.axis:
        columns, width = COLUMNS[p.axis]
        return f"tl.store(d_{p.name}_ptr + at * {width} + {columns}, d_{p.name}, mask={columns} < {width})"
    return f"tl.store(d_{p.name}_ptr + at, d_{p.name})"


def _guarded(p: Param) -> str:
    return f"if d_{p.name}_ptr is not None:\n    {store_param(p)}"


__all__ = ["Sweeps", "key_inputs", "key_params", "local", "start_gradient", "store_input", "store_param"]
