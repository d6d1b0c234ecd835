"""The functions, axes and factors of token-local expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
from sympy.core.symbol import Str


def symbol(name: str) -> sympy.Symbol:
    """The symbol of a declared name. It is not called real: sympy would make abs(x) of sqrt(x**2)."""
    return sympy.Symbol(name)


class sigmoid(sympy.Function):  # noqa: N801 - printed as written in specs
    """1 / (1 + exp(-x))."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        x = self.args[0]
        return sigmoid(x) * sigmoid(-x)  # not s * (1 - s), which loses the small side


class softplus(sympy.Function):  # noqa: N801
    """log(1 + exp(x)), without overflow."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sigmoid(self.args[0])


class RowSum(sympy.Function):
    """RowSum(e, axis): the sum of e over its axis, one scalar per token and head. Made by `row_sum`."""

    nargs = 2
    is_commutative = True  # the axis, a name, has no opinion on it

    def _eval_derivative(self, s: Any) -> Any:
        raise TypeError("differentiate through kcpgen.tokenwise.adjoint: a reduction is a scalar of its own")

    def _latex(self, printer: Any, exp: str | None = None) -> str:
        power = "" if exp is None else f"^{{{exp}}}"
        return rf"\operatorname{{sum}}_{{{self.args[1].name}}}{power}\left({printer._print(self.args[0])}\right)"


FUNCTIONS = {"exp": sympy.exp, "sigmoid": sigmoid, "softplus": softplus, "sqrt": sympy.sqrt}


def row_sum(value: sympy.Expr, axis: str) -> sympy.Expr:
    """The sum of `value` over `axis` ("K" or "V"). The axis is a name, not a symbol: it is never free in the result."""
    return RowSum(value, Str(axis)) if value != 0 else sympy.S.Zero


def names(expr: sympy.Expr) -> tuple[str, ...]:
    """The declared names an expression mentions, sorted."""
    return tuple(sorted(free.name for free in expr.free_symbols))


def axis_of(expr: sympy.Expr, axes: Mapping[str, str]) -> str:
    """Empty for a scalar per token, else the axis its elements run over. ValueError when K and V meet elementwise."""
    found = sorted(_axes_of(expr, axes))
    if len(found) > 1:
        raise ValueError(f"{expr} mixes the axes {' and '.join(found)} elementwise")
    return found[0] if found else ""


def _axes_of(expr: sympy.Basic, axes: Mapping[str, str]) -> set[str]:
    if isinstance(expr, RowSum):
        return set()
    if isinstance(expr, sympy.Symbol):
        return {axes[expr.name]} - {""}
    return {axis for argument in expr.args for axis in _axes_of(argument, axes)}


def split_scalar(expr: sympy.Expr, axes: Mapping[str, str]) -> tuple[sympy.Expr, sympy.Expr]:
    """(coefficient, base) with expr = coefficient * base: the coefficient is a scalar per token, the base all the rest.

    -beta*k gives (-beta, k) and exp(g)*beta gives (exp(g)*beta, 1) for a scalar gate g. A sum is split only where its
    terms share their coefficient up to a rational number: -beta*k - beta*p gives (-beta, k + p).
    """
    if isinstance(expr, sympy.Add) and _axes_of(expr, axes):
        return _split_sum([split_scalar(term, axes) for term in expr.args], expr)
    factors = [part for factor in sympy.Mul.make_args(expr) for part in _exponentials_apart(factor)]
    scalar = [factor for factor in factors if not _axes_of(factor, axes)]
    rest = [factor for factor in factors if _axes_of(factor, axes)]
    return sympy.Mul(*scalar), sympy.Mul(*rest)


def _split_sum(parts: Sequence[tuple[sympy.Expr, sympy.Expr]], expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    shared, _ = min(parts, key=lambda part: sympy.default_sort_key(part[1]))
    ratios = [coefficient / shared for coefficient, _ in parts]
    if not all(ratio.is_Rational for ratio in ratios):
        return sympy.S.One, expr
    return shared, sympy.Add(*(ratio * base for ratio, (_, base) in zip(ratios, parts, strict=True)))


def _exponentials_apart(factor: sympy.Expr) -> tuple[sympy.Expr, ...]:
    """exp(a + b) as exp(a), exp(b): sympy keeps the sum, and cancels equal factors only when they are apart."""
    if isinstance(factor, sympy.exp):
        return tuple(sympy.exp(part) for part in sympy.Add.make_args(factor.args[0]))
    return (factor,)


def expand_exponentials(expr: sympy.Expr) -> sympy.Expr:
    """The expression as a sum of products in which every exponential of a sum is a product of exponentials."""
    terms = sympy.Add.make_args(sympy.expand_mul(expr))
    return sympy.Add(*(sympy.Mul(*(p for f in sympy.Mul.make_args(t) for p in _exponentials_apart(f))) for t in terms))


def reductions_of(expr: sympy.Basic) -> tuple[RowSum, ...]:
    """Every distinct reduction of an expression, inner ones before those that contain them, in a fixed order."""
    found: dict[RowSum, None] = {}
    for node in sympy.postorder_traversal(expr):
        if isinstance(node, RowSum):
            found.setdefault(node)
    return tuple(found)
