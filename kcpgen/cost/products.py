"""FLOP of block equations, from the shapes of their letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kcpgen.derivation.blocks import DIAGONALS
from kcpgen.derivation.chunk_form import Equation, Factor, Monomial

AXES = {
    **dict.fromkeys(("q_in", "a_in", "w_out", "W"), "CK"),
    **dict.fromkeys(("V", "value", "U", "U0", "R", "O"), "CV"),
    **dict.fromkeys(("A", "L", "T", "B"), "CC"),
    **dict.fromkeys(("S", "S_next"), "KV"),
}


def flops(equations: Iterable[Equation], widths: Mapping[str, int]) -> float:
    """Of one chunk: a multiplication and an addition for each. widths: of C, K and V."""
    return sum(_monomial(monomial, widths) for e in equations for monomial in e.terms)


def _monomial(monomial: Monomial, widths: Mapping[str, int]) -> float:
    """From the cheaper end: T (L V), not (T L) V. Scaling by a diagonal is no product."""
    shapes = [_shape(factor, widths) for factor in monomial.factors if factor.name not in DIAGONALS]
    return min(_chain(shapes), _chain([(n, m) for m, n in reversed(shapes)]))


def _shape(factor: Factor, widths: Mapping[str, int]) -> tuple[int, int]:
    name = factor.name if factor.name in AXES else factor.name.removeprefix("d")
    rows, columns = (widths[letter] for letter in AXES[name])
    return (columns, rows) if factor.transposed else (rows, columns)


def _chain(shapes: list[tuple[int, int]]) -> float:
    """Of a product of matrices, taken from the left."""
    rows = shapes[0][0] if shapes else 0
    return float(sum(2 * rows * inner * columns for inner, columns in shapes[1:]))
