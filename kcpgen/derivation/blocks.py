"""Block algebra: products of named block matrices, as data and as noncommutative sympy.

Factors are the letters, monomials the words. sympy expands and collects; the adjoint of a word is read off its letters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import sympy

DIAGONALS = ("decay_out", "strength")  # equal to their own transpose


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A block quantity such as `A[0]^T`: name, indices, transposed or not."""

    name: str
    index: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def T(self) -> Factor:
        return self if self.name in DIAGONALS else replace(self, transposed=not self.transposed)

    @property
    def plain(self) -> Factor:
        return replace(self, transposed=False)

    @property
    def adjoint(self) -> Factor:
        """d<name>, the gradient of the untransposed block."""
        return Factor(name=f"d{self.name}", index=self.index)

    def __str__(self) -> str:
        index = f"[{','.join(map(str, self.index))}]" if self.index else ""
        return f"{self.name}{index}{'^T' if self.transposed else ''}"


@dataclass(frozen=True, kw_only=True)
class Monomial:
    sign: int
    factors: tuple[Factor, ...]

    @property
    def T(self) -> Monomial:
        return Monomial(sign=self.sign, factors=tuple(factor.T for factor in reversed(self.factors)))


@dataclass(frozen=True, kw_only=True)
class Equation:
    """target = sum of monomials.

    `mask` is "", "tril" (s <= t), "strict_tril" (s < t) or "diagonal": the part of the right-hand side that counts.
    """

    target: Factor
    terms: tuple[Monomial, ...]
    mask: str = ""


class Blocks:
    """Factors as noncommutative symbols, and back. Expressions of one Blocks are not mixed with another's."""

    def __init__(self) -> None:
        self._factors: dict[sympy.Symbol, Factor] = {}

    def __call__(self, name: str, *index: int) -> sympy.Symbol:
        return self.symbol(Factor(name=name, index=index))

    def symbol(self, factor: Factor) -> sympy.Symbol:
        symbol = sympy.Symbol(str(factor), commutative=False)
        self._factors[symbol] = factor
        return symbol

    def transpose(self, expr: sympy.Expr) -> sympy.Expr:
        return self.expression(monomial.T for monomial in self.monomials(expr))

    def expression(self, monomials: Iterable[Monomial]) -> sympy.Expr:
        words = ((m.sign, [self.symbol(factor) for factor in m.factors]) for m in monomials)
        return sympy.Add(*(sympy.Mul(sign, *letters) for sign, letters in words))

    def monomials(self, expr: sympy.Expr) -> tuple[Monomial, ...]:
        """The words of an expression, expanded, in the order a person would write them."""
        terms = [term for term in sympy.Add.make_args(sympy.expand(expr)) if term != 0]
        return tuple(sorted((self._monomial(term) for term in terms), key=_reading_order))

    def _monomial(self, term: sympy.Expr) -> Monomial:
        signs, letters = term.args_cnc()
        sign = int(sympy.Mul(*signs))
        if abs(sign) != 1:
            raise ValueError(f"{term} occurs more than once: block equations have coefficients +1 and -1 only")
        return Monomial(sign=sign, factors=tuple(self._factors[letter] for letter in letters))

    def equation(self, target: Factor, expr: sympy.Expr, mask: str = "") -> Equation:
        return Equation(target=target, terms=self.monomials(expr), mask=mask)

    def split_on(self, expr: sympy.Expr, last: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr]:
        """(X, Y) with expr = X last + Y."""
        factor = self._factors[last]
        ending = [m for m in self.monomials(expr) if m.factors[-1:] == (factor,)]
        others = [m for m in self.monomials(expr) if m not in ending]
        shortened = (replace(m, factors=m.factors[:-1]) for m in ending)
        return self.expression(shortened), self.expression(others)


def pull_back(equation: Equation, wrt: Factor, upstream: Factor) -> tuple[Monomial, ...]:
    """What `equation` adds to the gradient of `wrt`, given the gradient of its target.

    Y = A X C gives dX = A^T dY C^T, and Y = A X^T C gives dX = C dY^T A.
    """
    found = []
    for monomial in equation.terms:
        for place, factor in enumerate(monomial.factors):
            if (factor.name, factor.index) == (wrt.name, wrt.index):
                left = tuple(f.T for f in reversed(monomial.factors[:place]))
                right = tuple(f.T for f in reversed(monomial.factors[place + 1 :]))
                gradient = Monomial(sign=monomial.sign, factors=(*left, upstream, *right))
                found.append(gradient.T if factor.transposed else gradient)
    return tuple(found)


# Recurrence first, then values, then what multiplies them: S_next = decay_out S + w_out^T U reads as it is thought of.
_ORDER = ("decay_out", "q_in", "V", "U0", "dU", "dR", "T", "L", "A", "a_in", "w_out", "W", "M", "Q_eff")


def _reading_order(monomial: Monomial) -> list[tuple[int, str, tuple[int, ...], bool]]:
    return [
        (_ORDER.index(f.name) if f.name in _ORDER else len(_ORDER), f.name, f.index, f.transposed)
        for f in monomial.factors
    ]
