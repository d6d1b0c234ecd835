"""Token-local expressions: elementwise sympy over per-token scalars and vectors, with reductions over one axis.

Symbols are made here (`symbol`), never by parsing a string. `RowSum(e, K)` is the sum of `e` over axis K, a scalar per
token and head. Differentiation treats each reduction as an intermediate scalar, so that a gradient needs one reduction of
its own and no Jacobian is ever written out.
"""

from __future__ import annotations

from typing import Any

import sympy


def symbol(name: str) -> sympy.Symbol:
    """The symbol of a declared name. Real, so that sqrt(x**2) and friends behave."""
    return sympy.Symbol(name, real=True)


class sigmoid(sympy.Function):  # noqa: N801 - printed as written in specs
    """1 / (1 + exp(-x))."""

    nargs = 1
    is_real = True

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        x = self.args[0]
        return sigmoid(x) * sigmoid(-x)  # not s * (1 - s), which loses the small side


class softplus(sympy.Function):  # noqa: N801
    """log(1 + exp(x)), without overflow."""

    nargs = 1
    is_real = True

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sigmoid(self.args[0])


class RowSum(sympy.Function):
    """RowSum(e, axis): the sum of e over its axis, one scalar per token and head."""

    nargs = 2
    is_real = True

    def _eval_derivative(self, s: Any) -> Any:
        raise TypeError("differentiate through kcpgen.tokenwise.adjoint, which treats a reduction as a scalar of its own")


FUNCTIONS = {"exp": sympy.exp, "sigmoid": sigmoid, "softplus": softplus, "sqrt": sympy.sqrt}
