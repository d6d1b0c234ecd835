"""Token-local expressions: elementwise sympy over per-token scalars and vectors, with reductions over one axis.

Symbols are made here (`symbol`), never by parsing a string. `RowSum(e, K)` is the sum of `e` over axis K, a scalar per
token and head. The language is closed under differentiation: `adjoint` gives a gradient as an expression of the same
kind, its reductions included, and `flatten` lays any such expressions out as straight-line steps.
"""

from kcpgen.tokenwise.adjoint import Adjoint, Reduction, adjoint, flatten
from kcpgen.tokenwise.expression import (
    FUNCTIONS,
    RowSum,
    axis_of,
    expand_exponentials,
    names,
    reductions_of,
    row_sum,
    sigmoid,
    softplus,
    split_scalar,
    symbol,
)
from kcpgen.tokenwise.from_syntax import Local, NotLocal, evaluate, from_syntax, not_local

__all__ = [
    "FUNCTIONS",
    "Adjoint",
    "Local",
    "NotLocal",
    "Reduction",
    "RowSum",
    "adjoint",
    "axis_of",
    "evaluate",
    "expand_exponentials",
    "flatten",
    "from_syntax",
    "names",
    "not_local",
    "reductions_of",
    "row_sum",
    "sigmoid",
    "softplus",
    "split_scalar",
    "symbol",
]
