"""Small matrices of exact polynomials, and block equations evaluated on them: the ground the proof stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

from kcpgen.derivation.blocks import Equation, Factor, Monomial

Element: TypeAlias = Any  # an element of a sympy polynomial ring
Values: TypeAlias = Mapping[str, "Matrix"]


@dataclass(frozen=True)
class Matrix:
    """Rows of ring elements."""

    rows: tuple[tuple[Element, ...], ...]

    @classmethod
    def of(cls, height: int, width: int, entry: Callable[[int, int], Element]) -> Matrix:
        return cls(tuple(tuple(entry(i, j) for j in range(width)) for i in range(height)))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.rows[0])

    @property
    def T(self) -> Matrix:
        return Matrix(tuple(zip(*self.rows)))  # noqa: B905 - rows are equally long

    @property
    def entries(self) -> list[Element]:
        return [entry for row in self.rows for entry in row]

    def __getitem__(self, place: tuple[int, int]) -> Element:
        return self.rows[place[0]][place[1]]

    def __add__(self, other: Matrix) -> Matrix:
        return Matrix.of(*self.shape, lambda i, j: self[i, j] + other[i, j])

    def scaled(self, factor: Element) -> Matrix:
        return Matrix.of(*self.shape, lambda i, j: self[i, j] * factor)

    def __neg__(self) -> Matrix:
        return self.scaled(-1)

    def __matmul__(self, other: Matrix) -> Matrix:
        inner = range(self.shape[1])
        return Matrix.of(self.shape[0], other.shape[1], lambda i, j: total(self[i, n] * other[n, j] for n in inner))

    def where(self, keep: Callable[[int, int], bool]) -> Matrix:
        return Matrix.of(*self.shape, lambda i, j: self[i, j] if keep(i, j) else self[i, j] * 0)


def total(elements: Iterable[Element]) -> Element:
    return reduce(lambda a, b: a + b, elements)


def product(elements: Iterable[Element], one: Element) -> Element:
    return reduce(lambda a, b: a * b, elements, one)


MASKS: Mapping[str, Callable[[int, int], bool]] = {
    "": lambda t, s: True,
    "tril": lambda t, s: s <= t,
    "strict_tril": lambda t, s: s < t,
    "diagonal": lambda t, s: s == t,
}


def value_of(equation: Equation, values: Values) -> Matrix:
    """The right-hand side of an equation, masked."""
    summed = reduce(lambda a, b: a + b, (_monomial(term, values) for term in equation.terms))
    return summed.where(MASKS[equation.mask])


def evaluated(equations: Sequence[Equation], values: Values) -> dict[str, Matrix]:
    """The values together with the targets of the equations, evaluated in order."""
    known = dict(values)
    for equation in equations:
        known[str(equation.target)] = value_of(equation, known)
    return known


def _monomial(term: Monomial, values: Values) -> Matrix:
    result = reduce(lambda a, b: a @ b, (_factor(factor, values) for factor in term.factors))
    return result if term.sign == 1 else -result


def _factor(factor: Factor, values: Values) -> Matrix:
    value = values[str(factor.plain)]
    return value.T if factor.transposed else value


def nilpotent_inverse(
    blocks: Mapping[tuple[int, int], Matrix], erasing: Sequence[int], one: Element
) -> dict[str, Matrix]:
    """T[i,e], the blocks of (I - L)^-1 = I + L + L^2 + ...: every factor goes back a token, so the series ends."""
    if not erasing:
        return {}
    tokens = blocks[erasing[0], erasing[0]].shape[0]
    identity = Matrix.of(tokens, tokens, lambda t, s: one if t == s else one * 0)
    unit = {(i, e): identity if i == e else identity.scaled(0) for i in erasing for e in erasing}
    result = unit
    for _ in range(tokens - 1):  # Horner: T <- I + L T
        result = {(i, e): unit[i, e] + _row(blocks, result, erasing, i, e) for i, e in unit}
    return {str(Factor(name="T", index=place)): block for place, block in result.items()}


def _row(
    left: Mapping[tuple[int, int], Matrix],
    right: Mapping[tuple[int, int], Matrix],
    inner: Sequence[int],
    i: int,
    e: int,
) -> Matrix:
    return reduce(lambda a, b: a + b, (left[i, n] @ right[n, e] for n in inner))
