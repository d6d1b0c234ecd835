"""Token-local syntax to elementwise expressions.

Vectors lose their orientation, which the returned shape keeps; a diagonal matrix is the vector on its diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import sympy

from kcpgen.diagnostics import Diagnostic, SpecError
from kcpgen.language.syntax import (
    SCALAR,
    Call,
    Difference,
    Expr,
    Hadamard,
    Identity,
    Name,
    Negative,
    Number,
    Product,
    Quotient,
    Shape,
    Sum,
    Transpose,
)
from kcpgen.spec import Spec
from kcpgen.tokenwise.expression import FUNCTIONS, row_sum, symbol

L2NORM_EPS = sympy.Rational(1, 10**6)


@dataclass(frozen=True, kw_only=True)
class Local:
    """An elementwise value and the shape it was written with; a square shape is a diagonal matrix."""

    value: sympy.Expr
    shape: Shape

    @property
    def diagonal(self) -> bool:
        return self.shape[0] == self.shape[1] != "1"


class NotLocal(Exception):  # noqa: N818 - a verdict, not a fault
    """The syntax is not an elementwise expression of one token; `node` is the smallest part that is to blame."""

    def __init__(self, node: Expr, reason: str) -> None:
        self.node = node
        self.reason = reason
        super().__init__(reason)


def from_syntax(expr: Expr, spec: Spec) -> sympy.Expr:
    """The elementwise expression of a token-local scalar or vector.

    Raises SpecError (KCP208) where a part of it is not one: the state, another token, an outer product, a matrix.
    """
    try:
        local = evaluate(expr, spec)
        if local.diagonal:
            _refuse(expr, "this is a matrix")
    except NotLocal as verdict:
        raise SpecError([not_local(verdict)], spec.text) from None
    return local.value


def not_local(verdict: NotLocal) -> Diagnostic:
    return Diagnostic(
        code="KCP208",
        message="this has to be an elementwise expression of one token",
        span=verdict.node.span,
        label=verdict.reason,
        hints=("use scalars and vectors of this token with + - * / ⊙, exp, sigmoid, softplus, sqrt, sum and l2norm",),
    )


def evaluate(expr: Expr, spec: Spec) -> Local:
    """The value of token-local syntax, diagonal matrices included. Raises NotLocal."""
    match expr:
        case Number():
            return Local(value=sympy.Rational(expr.value.numerator, expr.value.denominator), shape=SCALAR)
        case Name():
            return _name(expr, spec)
        case Identity():
            return Local(value=sympy.S.One, shape=("K", "K"))
        case Negative():
            operand = evaluate(expr.operand, spec)
            return Local(value=-operand.value, shape=operand.shape)
        case Transpose():
            operand = evaluate(expr.operand, spec)
            return Local(value=operand.value, shape=(operand.shape[1], operand.shape[0]))
        case Call():
            return _call(expr, evaluate(expr.argument, spec))
        case _:
            return _binary(expr, evaluate(expr.left, spec), evaluate(expr.right, spec))


def _name(expr: Name, spec: Spec) -> Local:
    if expr.name == spec.state:
        _refuse(expr, "this is the state")
    if expr.offset != 0:
        _refuse(expr, "this belongs to another token")
    return Local(value=symbol(expr.name), shape=spec.shapes[expr.name])


def _call(expr: Call, argument: Local) -> Local:
    rows, columns = argument.shape
    axis = rows if rows != "1" else columns
    if expr.function == "Diag":
        return Local(value=argument.value, shape=(axis, axis))
    if argument.diagonal:
        _refuse(expr.argument, "this is a matrix")
    if expr.function == "sum":
        return Local(value=row_sum(argument.value, axis), shape=SCALAR)
    if expr.function == "l2norm":
        norm = sympy.sqrt(row_sum(argument.value**2, axis) + L2NORM_EPS)
        return Local(value=argument.value / norm, shape=argument.shape)
    return Local(value=FUNCTIONS[expr.function](argument.value), shape=argument.shape)


def _binary(expr: Sum | Difference | Product | Hadamard | Quotient, left: Local, right: Local) -> Local:
    match expr:
        case Sum():
            return Local(value=left.value + right.value, shape=left.shape)
        case Difference():
            return Local(value=left.value - right.value, shape=left.shape)
        case Product():
            return _product(expr, left, right)
        case Hadamard():
            if left.diagonal:
                _refuse(expr, "this is an elementwise product of matrices")
            return Local(value=left.value * right.value, shape=left.shape)
        case Quotient():
            if right.diagonal:
                _refuse(expr.right, "this is a matrix")
            return Local(value=left.value / right.value, shape=left.shape)


def _product(expr: Product, left: Local, right: Local) -> Local:
    if left.shape == SCALAR:
        return Local(value=left.value * right.value, shape=right.shape)
    if right.shape == SCALAR:
        return Local(value=left.value * right.value, shape=left.shape)
    shape = (left.shape[0], right.shape[1])
    if shape == SCALAR:
        return Local(value=row_sum(left.value * right.value, left.shape[1]), shape=SCALAR)
    if left.shape[1] == "1":
        _refuse(expr, "this is an outer product")
    return Local(value=left.value * right.value, shape=shape)


def _refuse(node: Expr, reason: str) -> NoReturn:
    raise NotLocal(node, reason)
