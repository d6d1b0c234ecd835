"""Reverse-mode differentiation of token-local expressions, and their layout as straight-line steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from kcpgen.tokenwise.expression import RowSum, axis_of, reductions_of, row_sum, symbol


@dataclass(frozen=True, kw_only=True)
class Adjoint:
    """The gradient of one input given the gradient of one value.

    `gradient` is a token-local expression of the forward's names and `upstream` (the gradient of the value, of the
    value's axis); its own axis is `axis`, the input's. Sums over a vector's axis appear as RowSum inside it.
    """

    wrt: sympy.Symbol
    upstream: sympy.Symbol
    axis: str
    gradient: sympy.Expr


@dataclass(frozen=True, kw_only=True)
class _Output:
    """An expression whose gradient is known; its reductions are replaced by stand-in scalars."""

    value: sympy.Expr
    axis: str
    gradient: sympy.Expr


def adjoint(
    value: sympy.Expr, wrt: sympy.Symbol, axes: Mapping[str, str], upstream: sympy.Symbol | None = None
) -> Adjoint:
    """d(value)/d(wrt) contracted with `upstream` (the symbol `dy` when not given).

    Each reduction r = sum(e) counts as an intermediate scalar: it collects dr = sum(df/dr * dy) once and passes
    dr * de/dx on. A scalar that feeds a vector is broadcast, so its gradient is summed over the vector's axis.
    """
    dy = symbol("dy") if upstream is None else upstream
    # no declared name has a "#"
    stands = {reduction: symbol(f"#{i}") for i, reduction in enumerate(reductions_of(value))}
    outputs = [_Output(value=value.xreplace(stands), axis=axis_of(value, axes), gradient=dy)]
    for reduction, stand in reversed(stands.items()):  # outermost first: all that reads it is already in outputs
        inner, axis = reduction.args
        total = _pull_back(outputs, stand, "")
        outputs.append(_Output(value=inner.xreplace(stands), axis=axis.name, gradient=total))
    gradient = _pull_back(outputs, wrt, axes[wrt.name])
    back = {stand: reduction for reduction, stand in stands.items()}
    return Adjoint(wrt=wrt, upstream=dy, axis=axes[wrt.name], gradient=gradient.xreplace(back))


def _pull_back(outputs: Sequence[_Output], wrt: sympy.Symbol, axis: str) -> sympy.Expr:
    """The sum of d(output)/d(wrt) times the output's gradient, over the outputs and, for a scalar, over their axes."""
    parts = [(output.axis, sympy.diff(output.value, wrt) * output.gradient) for output in outputs]
    return sympy.Add(*(row_sum(part, over) if over and not axis else part for over, part in parts))


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One straight-line step: `target` = sum of `value` over `axis`."""

    target: sympy.Symbol
    value: sympy.Expr
    axis: str


def flatten(exprs: Sequence[sympy.Expr], prefix: str = "sum_") -> tuple[tuple[Reduction, ...], tuple[sympy.Expr, ...]]:
    """The expressions without RowSum, and the reductions they need in the order they must be computed.

    Equal reductions are computed once. Targets are named `<prefix>0`, `<prefix>1`, ...; the caller picks a prefix that
    no declared name starts with.
    """
    known: dict[RowSum, sympy.Symbol] = {}
    steps: list[Reduction] = []
    for reduction in dict.fromkeys(r for expr in exprs for r in reductions_of(expr)):
        value, axis = reduction.args
        steps.append(Reduction(target=symbol(f"{prefix}{len(steps)}"), value=value.xreplace(known), axis=axis.name))
        known[reduction] = steps[-1].target
    return tuple(steps), tuple(expr.xreplace(known) for expr in exprs)
