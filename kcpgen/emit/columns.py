"""Prints a spec's equation as torch code on columns, by its structure alone.

Vectors are columns [.., n, 1], scalars [.., 1, 1], the state [.., K, V], so that an equation reads in torch as it
does on paper: `S = exp(g) * S` scales rows, `k @ v.mT` is an outer product, `S.mT @ q` a read. A K-by-K matrix is never
formed; it is applied to what stands on its right: sums distribute, Diag scales rows, `w a^T` becomes `w @ (a.mT @ x)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from kcpgen.emit.code import ATOM, Code, add, attribute, binary, call, negative, number, subtract
from kcpgen.emit.syntax_tree import evaluated, names_in
from kcpgen.language.check import shape_of
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

SQUARE: Shape = ("K", "K")
TOTAL = ".sum(-2, keepdim=True)"


@dataclass(kw_only=True)
class Columns:
    """A printer that collects the statements an expression needs before it.

    `result` names what the expression's value will be bound to. When the expression reads that very name, and reads it
    `once`, an intermediate value that holds it may overwrite it.
    """

    shapes: Mapping[str, Shape]
    result: str
    once: bool = False
    statements: list[str] = field(default_factory=list)

    def value(self, expr: Expr) -> Code:
        match expr:
            case Number():
                return number(expr.value)
            case Name():
                return Code(expr.name)
            case Negative():
                return negative(self.value(expr.operand))
            case Sum():
                return add(self.value(expr.left), self.value(expr.right))
            case Difference():
                return subtract(self.value(expr.left), self.value(expr.right))
            case Hadamard():
                return binary(self.value(expr.left), "*", self.value(expr.right))
            case Quotient():
                return binary(self.value(expr.left), "/", self.value(expr.right))
            case Transpose():
                return self.transposed(expr.operand)
            case Call():
                return self.call(expr)
            case Product():
                return self.product(expr.left, expr.right)
        raise TypeError(f"{type(expr).__name__} is no value of its own")

    def call(self, expr: Call) -> Code:
        if not names_in([expr]):
            return number(Fraction(evaluated(expr)))  # torch has no functions of numbers
        argument = self.value(expr.argument)
        if expr.function == "sum":
            return attribute(argument, TOTAL)
        return call("_l2norm" if expr.function == "l2norm" else expr.function, argument)

    def transposed(self, expr: Expr) -> Code:
        if isinstance(expr, Transpose):
            return self.value(expr.operand)
        return self.value(expr) if self.is_scalar(expr) else attribute(self.value(expr), ".mT")

    def product(self, left: Expr, right: Expr) -> Code:
        if self.is_scalar(left) or self.is_scalar(right):
            return binary(self.value(left), "*", self.value(right))
        if self.shape(left) == SQUARE:
            return self.apply(left, self.value(right))
        if self.shape(right) == SQUARE:  # x M = (M^T x^T)^T
            return attribute(self.apply(_transpose(right), self.transposed(left)), ".mT")
        return binary(self.value(left), "@", self.value(right))

    def apply(self, matrix: Expr, x: Code) -> Code:
        """matrix @ x for a K-by-K matrix and x of K rows."""
        match matrix:
            case Identity():
                return x
            case Negative():
                return negative(self.apply(matrix.operand, x))
            case Sum() | Difference():
                x = self.bound(x)
                combine = add if isinstance(matrix, Sum) else subtract
                return combine(self.apply(matrix.left, x), self.apply(matrix.right, x))
            case Quotient():
                return binary(self.apply(matrix.left, x), "/", self.value(matrix.right))
            case Call(function="Diag"):
                return binary(self.value(matrix.argument), "*", x)
            case Transpose():
                return self.apply(_push_transpose(matrix.operand), x)
            case Product():
                return self.apply_product(matrix.left, matrix.right, x)
        raise TypeError(f"{type(matrix).__name__} is no matrix that can be applied")

    def apply_product(self, left: Expr, right: Expr, x: Code) -> Code:
        if self.is_scalar(left):
            return binary(self.value(left), "*", self.apply(right, x))
        if self.is_scalar(right):
            return binary(self.value(right), "*", self.apply(left, x))
        if self.shape(left) == SQUARE:
            return self.apply(left, self.apply(right, x))
        return binary(self.value(left), "@", binary(self.value(right), "@", x))

    def bound(self, x: Code) -> Code:
        """A name for x, which is about to be used more than once."""
        if x.level == ATOM and x.text.isidentifier():
            return x
        overwrites = self.once and re.search(rf"\b{self.result}\b", x.text)
        name = self.result if overwrites else self.fresh()
        self.statements.append(f"{name} = {x.text}")
        return Code(name)

    def fresh(self) -> str:
        n = len(self.statements) + 1
        while f"{self.result}_{n}" in self.shapes:
            n += 1
        return f"{self.result}_{n}"

    def shape(self, expr: Expr) -> Shape:
        return shape_of(expr, self.shapes)

    def is_scalar(self, expr: Expr) -> bool:
        return self.shape(expr) == SCALAR


def _transpose(expr: Expr) -> Expr:
    return expr.operand if isinstance(expr, Transpose) else Transpose(span=expr.span, operand=expr)


def _push_transpose(matrix: Expr) -> Expr:
    """The transpose of a square matrix, as a matrix of the same kinds: transposes end up at vectors."""
    match matrix:
        case Transpose():
            return matrix.operand
        case Product():
            return replace(matrix, left=_transpose(matrix.right), right=_transpose(matrix.left))
        case Sum() | Difference():
            return replace(matrix, left=_transpose(matrix.left), right=_transpose(matrix.right))
        case Negative():
            return replace(matrix, operand=_transpose(matrix.operand))
        case Quotient():
            return replace(matrix, left=_transpose(matrix.left))
    return matrix  # I and Diag
