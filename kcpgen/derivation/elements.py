"""The elements of a spec's token-local expressions, over a few tokens, in one polynomial ring.

A function of a polynomial (exp, sigmoid ...) counts as a symbol of its own, so that decays multiply as monomials; roots
and quotients are powers of r = x^(-1/2), of which r^2 x = 1 is kept as a relation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from sympy.polys.rings import sring

from kcpgen.derivation.normal_form import NormalForm
from kcpgen.derivation.polynomial import Element, Matrix
from kcpgen.derivation.tree import children
from kcpgen.language.syntax import Expr, Quotient
from kcpgen.spec import Spec
from kcpgen.tokenwise import Local, NotLocal, RowSum, evaluate, symbol


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many tokens, key channels and value channels."""

    tokens: int
    key: int
    value: int

    def of(self, axis: str) -> int:
        return {"K": self.key, "V": self.value}.get(axis, 1)


class Elements:
    """Token-local expressions of a normal form and its spec, element by element in one polynomial ring."""

    def __init__(self, form: NormalForm, sizes: Sizes) -> None:
        self.sizes = sizes
        self._per_token = {given.name for given in form.spec.inputs}
        self._roots: dict[sympy.Expr, sympy.Symbol] = {}  # x -> r
        self._axes = form.spec.axes
        wanted = dict.fromkeys([*_normal_vectors(form), *_written_vectors(form.spec)])
        lists = {(e, axis, t): self._list(e, axis, t) for e, axis in wanted for t in range(sizes.tokens)}
        state = [symbol(f"{form.spec.state}_{k}_{v}") for k in range(sizes.key) for v in range(sizes.value)]
        relations = [root**2 * base - 1 for base, root in self._roots.items()]
        ring, polynomials = sring([*relations, *state, *(element for each in lists.values() for element in each)])
        flat = iter(polynomials)
        self.relations = [next(flat) for _ in relations]
        self.one: Element = ring.one
        self.state = Matrix.of(sizes.key, sizes.value, lambda i, j: next(flat))
        self._known = {key: [next(flat) for _ in each] for key, each in lists.items()}

    def vector(self, expr: sympy.Expr, axis: str, t: int) -> list[Element]:
        return self._known[expr, axis, t]

    def stacked(self, expr: sympy.Expr, axis: str) -> Matrix:
        """[tokens, axis]"""
        rows = [self.vector(expr, axis, t) for t in range(self.sizes.tokens)]
        return Matrix(tuple(tuple(row) for row in rows))

    def _list(self, expr: sympy.Expr, axis: str, t: int) -> list[sympy.Expr]:
        return [self._element(expr, t, i) for i in range(self.sizes.of(axis))]

    def _element(self, expr: sympy.Expr, t: int, i: int) -> sympy.Expr:
        if isinstance(expr, RowSum):
            inner, axis = expr.args
            return sympy.Add(*(self._element(inner, t, n) for n in range(self.sizes.of(axis.name))))
        if isinstance(expr, sympy.Symbol):
            token = f"_{t}" if expr.name in self._per_token else ""
            return symbol(f"{expr.name}{token}_{i}" if self._axes[expr.name] else f"{expr.name}{token}")
        if isinstance(expr, sympy.Pow):
            return self._power(self._element(expr.base, t, i), expr.exp)
        return expr.func(*(self._element(argument, t, i) for argument in expr.args)) if expr.args else expr

    def _power(self, base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
        """x^e by powers of x and r: x^(-n/2) = r^n, sqrt(x) = x r."""
        halves = 2 * exponent
        if (exponent.is_Integer and exponent > 0) or not halves.is_Integer:
            return base**exponent
        base = sympy.expand(base)
        root = self._roots.setdefault(base, sympy.Symbol(f"#root{len(self._roots)}"))
        return root**-halves if halves < 0 else base ** ((halves + 1) / 2) * root


def _normal_vectors(form: NormalForm) -> Iterator[tuple[sympy.Expr, str]]:
    yield form.read, "K"
    yield decay_factor(form), "K"
    for term in form.terms:
        yield from ((term.write, "K"), (term.erase, "K"), (term.value, "V"))


def decay_factor(form: NormalForm) -> sympy.Expr:
    return sympy.S.One if form.decay is None else sympy.exp(form.decay.log)


def _written_vectors(spec: Spec) -> Iterator[tuple[sympy.Expr, str]]:
    for root in (spec.update, spec.readout):
        yield from ((local.value, local_axis(local)) for local in _pieces(root, spec))


def _pieces(expr: Expr, spec: Spec) -> Iterator[Local]:
    """The largest token-local parts of an equation; a divisor as its inverse."""
    local = local_part(expr, spec)
    if local is not None:
        yield local
    elif isinstance(expr, Quotient):
        yield from _pieces(expr.left, spec)
        yield inverse_of(expr.right, spec)
    else:
        for child in children(expr):
            yield from _pieces(child, spec)


def local_part(expr: Expr, spec: Spec) -> Local | None:
    try:
        return evaluate(expr, spec)
    except NotLocal:
        return None


def inverse_of(expr: Expr, spec: Spec) -> Local:
    divisor = evaluate(expr, spec)
    return Local(value=1 / divisor.value, shape=divisor.shape)


def local_axis(local: Local) -> str:
    rows, columns = local.shape
    return rows if rows != "1" else columns if columns != "1" else ""
