"""Expressions on their way to Triton source."""

from __future__ import annotations

import pytest
import sympy

from kcpgen.emit.triton_code import sigmoid_slope, with_slopes
from kcpgen.tokenwise import row_sum, sigmoid, symbol

x, y, z = (symbol(name) for name in "xyz")
CASES = {
    sigmoid(x) * sigmoid(-x): sigmoid_slope(x),
    -2 * z * sigmoid(x - y) * sigmoid(y - x): -2 * z * sigmoid_slope(x - y),
    row_sum(z + z * sigmoid(-x) * sigmoid(x) * sigmoid(y), "K"): row_sum(z + z * sigmoid_slope(x) * sigmoid(y), "K"),
    sigmoid(x) * sigmoid(-y): sigmoid(x) * sigmoid(-y),
    sigmoid(x) + sigmoid(-x): sigmoid(x) + sigmoid(-x),
    z * sigmoid(sympy.Integer(0)): z * sigmoid(sympy.Integer(0)),
}


@pytest.mark.parametrize("product", CASES, ids=str)
def test_a_sigmoid_times_that_of_the_opposite_is_a_slope(product: sympy.Expr) -> None:
    assert on_one_side(with_slopes(product)) == on_one_side(CASES[product])


def on_one_side(expr: sympy.Expr) -> sympy.Expr:
    """A slope is the same at x and -x."""
    return expr.replace(sigmoid_slope, lambda x: sigmoid_slope(-x if x.could_extract_minus_sign() else x))
