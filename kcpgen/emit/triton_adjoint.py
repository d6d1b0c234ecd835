"""Gradients of token-local expressions as Triton statements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import sympy

from kcpgen.emit.triton_code import TritonPrinter, with_slopes
from kcpgen.tokenwise import Reduction, adjoint, flatten, names, row_sum, symbol


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one use of an input or parameter adds to its gradient: code in the frame of the name, and its sign."""

    name: str
    sign: str
    code: str

    def added(self) -> str:
        return f"d_{self.name} {self.sign}= {self.code}"

    def assigned(self) -> str:
        return f"d_{self.name} = {'-' if self.sign == '-' else ''}{self.code}"


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Source that carries one value's gradient to what the value is made of."""

    steps: tuple[str, ...]  # assignments of what several shares need
    shares: tuple[Share, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(share.name for share in self.shares)

    def lines(self) -> Iterator[str]:
        yield from self.steps
        yield from (share.added() for share in self.shares)

    def replacing(self, target: str) -> Iterator[str]:
        """Lines after which d_<target>, so far the gradient of the value, is that of the target it replaced."""
        yield from self.steps
        yield from (share.added() for share in self.shares if share.name != target)
        own = [share.assigned() for share in self.shares if share.name == target]
        yield from own or [f"d_{target} = tl.zeros_like(d_{target})"]


def backward(
    printer: TritonPrinter, value: sympy.Expr, gradient: str, prefix: str, *, scalar: bool = False
) -> Backward:
    """Pull the variable `gradient` (the adjoint of `value`, in its frame) back to inputs, parameters and planned sums.

    Scratch variables start with `prefix`. With `scalar`, what `gradient` belongs to is the sum of `value` over keys.
    """
    if scalar:
        value = row_sum(value, "K")
    axes = {**printer.spec.axes, **printer.extra_axes}
    wanted = [name for name in names(value) if name in _differentiable(printer)]
    pulled = [with_slopes(adjoint(value, symbol(name), axes, symbol(gradient)).gradient) for name in wanted]
    sums, plain = flatten(pulled, prefix=f"{prefix}_sum")
    fresh = (symbol(f"{prefix}_x{n}") for n in count())
    common, exprs = sympy.cse([*(s.value for s in sums), *plain], symbols=fresh, order="canonical")
    totals, gradients = exprs[: len(sums)], exprs[len(sums) :]
    printer = replace(printer, extra_axes={**printer.extra_axes, gradient: printer.axis_of(value)})
    steps = _Steps(
        printer=printer,
        common=dict(common),
        sums={s.target: replace(s, value=total) for s, total in zip(sums, totals, strict=True)},
        uses=Counter(used for expr in (*exprs, *(e for _, e in common)) for used in expr.free_symbols),
    )
    shares = [steps.share(name, expr) for name, expr in zip(wanted, gradients, strict=True) if expr != 0]
    return Backward(steps=tuple(steps.lines), shares=tuple(shares))


def _differentiable(printer: TritonPrinter) -> frozenset[str]:
    spec = printer.spec
    return frozenset([*(i.name for i in spec.inputs), *(p.name for p in spec.params), *printer.extra_axes])


@dataclass(kw_only=True)
class _Steps:
    """Straight-line code for what several shares need, each part written just before it is first read."""

    printer: TritonPrinter
    common: dict[sympy.Symbol, sympy.Expr]
    sums: dict[sympy.Symbol, Reduction]
    uses: Counter[sympy.Symbol]
    lines: list[str] = field(default_factory=list)

    def share(self, name: str, expr: sympy.Expr) -> Share:
        """The gradient in the frame of `name`: a parameter collects over the tokens of the chunk."""
        sign, code = self._inlined(expr) if expr in self.sums and self.uses[expr] == 1 else self._code(name, expr)
        return Share(name=name, sign=sign, code=f"tl.sum({code}, axis=0)" if name in self.printer.per_head else code)

    def _inlined(self, target: sympy.Symbol) -> tuple[str, str]:
        total = self.sums.pop(target)
        self._write_parts(total.value)
        sign, value = _signed(total.value)
        return sign, f"tl.sum({self.printer.code(value, total.axis)}, axis=1)"

    def _code(self, name: str, expr: sympy.Expr) -> tuple[str, str]:
        self._write_parts(expr)
        sign, value = _signed(expr)
        return sign, self.printer.code(value, self.printer.spec.axes.get(name, ""))

    def _write_parts(self, expr: sympy.Expr) -> None:
        for part in sorted(expr.free_symbols, key=lambda free: free.name):
            if part in self.common:
                self._write_common(part, self.common.pop(part))
            elif part in self.sums:
                total = self.sums.pop(part)
                self._write_parts(total.value)
                self._write(part, f"tl.sum({self.printer.code(total.value, total.axis)}, axis=1)", "")

    def _write_common(self, part: sympy.Symbol, expr: sympy.Expr) -> None:
        self._write_parts(expr)
        axis = self.printer.axis_of(expr)
        code = self.printer.code(expr, axis)
        if not axis and not self.printer.varies_by_token(expr):
            self.printer = replace(self.printer, extra_per_head=self.printer.extra_per_head | {part.name})
        self._write(part, code, axis)

    def _write(self, part: sympy.Symbol, code: str, axis: str) -> None:
        self.lines.append(f"{part.name} = {code}")
        self.printer = replace(self.printer, extra_axes={**self.printer.extra_axes, part.name: axis})


def _signed(expr: sympy.Expr) -> tuple[str, sympy.Expr]:
    """A product's sign, apart."""
    negative = expr.could_extract_minus_sign() and not isinstance(expr, sympy.Add) and not isinstance(-expr, sympy.Add)
    return ("-", -expr) if negative else ("+", expr)
