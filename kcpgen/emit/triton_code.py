"""Token-local sympy expressions as Triton source.

A kernel holds the tokens of one chunk as rows: a scalar per token is [C], a vector [C, width]. Parameters are per
head: a number, or [width]. `TritonPrinter.code(expr, axis)` writes an expression for one of these frames and broadcasts
what is smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import sympy

from kcpgen.spec import Spec
from kcpgen.tokenwise import RowSum, axis_of, sigmoid, softplus


class sigmoid_slope(sympy.Function):  # noqa: N801 - printed as it is called
    """sigmoid(x) sigmoid(-x), the derivative of sigmoid, by the parts that both are made of."""

    nargs = 1


def with_slopes(expr: sympy.Expr) -> sympy.Expr:
    """`expr` with a sigmoid_slope for every sigmoid(x) that is multiplied with sigmoid(-x)."""
    return expr.replace(lambda e: isinstance(e, sympy.Mul), lambda product: sympy.Mul(*_paired(product.args)))


def _paired(factors: tuple[sympy.Expr, ...]) -> list[sympy.Expr]:
    inner = [f.args[0] for f in factors if isinstance(f, sigmoid)]
    paired = [x for x in inner if x != 0 and -x in inner]
    slopes = [sigmoid_slope(x) for x in paired if not x.could_extract_minus_sign()]
    return [*(f for f in factors if not (isinstance(f, sigmoid) and f.args[0] in paired)), *slopes]


FUNCTIONS = {sympy.exp: "exp", sigmoid: "sigmoid", sigmoid_slope: "sigmoid_slope", softplus: "softplus"}
SUM, PRODUCT, ATOM = range(3)  # binding strength of a piece of source


@dataclass(frozen=True, kw_only=True)
class TritonPrinter:
    """Writes expressions over the names of one spec; `rename` maps a spec's name to the kernel's variable."""

    spec: Spec
    rename: Mapping[str, str]
    extra_axes: Mapping[str, str] = field(default_factory=dict)  # of variables that are not the spec's
    extra_per_head: frozenset[str] = frozenset()  # those among them that are one number for all tokens

    @cached_property
    def per_head(self) -> frozenset[str]:
        """Names without a token axis: parameters, constants and the scale."""
        declared = [*(p.name for p in self.spec.params), *(c.name for c in self.spec.constants), "scale"]
        return self.extra_per_head.union(declared)

    def axis_of(self, expr: sympy.Expr) -> str:
        """The vector axis an expression spans, "" when it is one number per token or head."""
        return axis_of(expr, {**self.spec.axes, **self.extra_axes})

    def varies_by_token(self, expr: sympy.Expr) -> bool:
        return any(s.name not in self.per_head for s in expr.free_symbols)

    def code(self, expr: sympy.Expr, axis: str) -> str:
        return self._write(expr, axis)[0]

    def atom(self, expr: sympy.Expr, axis: str) -> str:
        return self._at_least(expr, axis, ATOM)

    def _at_least(self, expr: sympy.Expr, axis: str, strength: int) -> str:
        text, own = self._write(expr, axis)
        return text if own >= strength else f"({text})"

    def _write(self, expr: sympy.Expr, axis: str) -> tuple[str, int]:
        if axis and not self.axis_of(expr):
            return self._broadcast(expr)
        if isinstance(expr, sympy.Symbol):
            return self._name(expr, axis), ATOM
        if not expr.free_symbols and not expr.has(RowSum):
            return _number(expr)
        if isinstance(expr, RowSum):
            inner, inner_axis = expr.args[0], expr.args[1].name
            return f"tl.sum({self.code(inner, inner_axis)}, axis=1)", ATOM
        if isinstance(expr, sympy.Add):
            return self._sum(expr, axis), SUM
        if isinstance(expr, sympy.Mul):
            return self._product(expr, axis), PRODUCT
        if isinstance(expr, sympy.Pow):
            return self._power(expr.base, expr.exp, axis)
        if type(expr) in FUNCTIONS:
            return f"{FUNCTIONS[type(expr)]}({self.code(expr.args[0], axis)})", ATOM
        raise TypeError(f"no Triton form for {type(expr).__name__}: {expr}")

    def _broadcast(self, expr: sympy.Expr) -> tuple[str, int]:
        text, strength = self._write(expr, "")
        if not self.varies_by_token(expr):
            return text, strength
        return (text if strength == ATOM else f"({text})") + "[:, None]", ATOM

    def _name(self, expr: sympy.Symbol, axis: str) -> str:
        name = self.rename.get(expr.name, expr.name)
        return f"{name}[None, :]" if axis and expr.name in self.per_head else name

    def _sum(self, expr: sympy.Expr, axis: str) -> str:
        text = ""
        for term in expr.as_ordered_terms():
            negative = term.could_extract_minus_sign()
            piece = self._at_least(-term if negative else term, axis, PRODUCT)
            text += (" - " if negative else " + ") + piece if text else ("-" if negative else "") + piece
        return text

    def _product(self, expr: sympy.Expr, axis: str) -> str:
        """Scalars of the product first, broadcast once, then the vectors; a leading -1 becomes a sign."""
        factors = list(expr.as_ordered_factors())
        sign = "-" if factors[0] == -1 else ""
        factors = factors[1:] if sign else factors
        small = [f for f in factors if axis and not self.axis_of(f)]
        large = [f for f in factors if f not in small]
        scalars = sympy.Mul(*small)
        pieces = [self._at_least(scalars, axis, ATOM if self.varies_by_token(scalars) else PRODUCT)] if small else []
        pieces += [self._at_least(f, axis, ATOM) for f in large]
        return sign + " * ".join(pieces)

    def _power(self, base: sympy.Expr, exponent: sympy.Expr, axis: str) -> tuple[str, int]:
        if exponent == sympy.Rational(-1, 2):
            return f"tl.rsqrt({self.code(base, axis)})", ATOM
        if exponent < 0:
            return f"(1.0 / {self.atom(base**-exponent, axis)})", ATOM
        whole, rest = divmod(exponent, 1)
        factors = [self.atom(base, axis)] * int(whole)
        root = self.code(base, axis)
        while rest:  # x^(3/4) is sqrt(x) sqrt(sqrt(x)): square roots are all there is
            root = f"tl.sqrt({root})"
            bit, rest = divmod(2 * rest, 1)
            factors += [root] * int(bit)
        return " * ".join(factors), PRODUCT if len(factors) > 1 else ATOM


def _number(value: sympy.Expr) -> tuple[str, int]:
    text = repr(float(value))
    return (text, ATOM) if value >= 0 else (f"({text})", ATOM)
