"""The syntax tree of a spec's expressions: what the parser makes and every later stage reads.

Nodes are immutable and carry the span they were written at, so that any later stage can point at its cause.
Shapes are (rows, columns) over the dimension names of the spec and "1": a scalar is ("1", "1"), a key vector
("K", "1"), its transpose ("1", "K"), the state ("K", "V"). `kcpgen.language.check.shape_of` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

Shape: TypeAlias = tuple[str, str]
SCALAR: Shape = ("1", "1")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A half-open region of a source file; lines and columns count from 1, end_column is exclusive."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, kw_only=True)
class Node:
    span: Span


@dataclass(frozen=True, kw_only=True)
class Number(Node):
    value: Fraction


@dataclass(frozen=True, kw_only=True)
class Name(Node):
    """A reference to a token input, a parameter, `scale`, or the state.

    `offset` is the token it is read at, relative to t: 0 for `k` and `k[t]`, -1 for `S[t-1]`. `indexed` tells `k[t]`
    from `k` for diagnostics; the two mean the same and compare equal.
    """

    name: str
    offset: int
    indexed: bool = field(default=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Identity(Node):
    """`I`, the K-by-K identity matrix."""


@dataclass(frozen=True, kw_only=True)
class Negative(Node):
    operand: Expr


@dataclass(frozen=True, kw_only=True)
class Sum(Node):
    """left + right."""

    left: Expr
    right: Expr


@dataclass(frozen=True, kw_only=True)
class Difference(Node):
    """left - right."""

    left: Expr
    right: Expr


@dataclass(frozen=True, kw_only=True)
class Product(Node):
    """Matrix product; a scalar factor multiplies anything. `k v^T` is an outer product, `S^T q` a read."""

    left: Expr
    right: Expr


@dataclass(frozen=True, kw_only=True)
class Hadamard(Node):
    """Elementwise product of two operands of one shape, written `⊙` or `.*`."""

    left: Expr
    right: Expr


@dataclass(frozen=True, kw_only=True)
class Quotient(Node):
    """left / right with a scalar on the right, or elementwise on equal shapes."""

    left: Expr
    right: Expr


@dataclass(frozen=True, kw_only=True)
class Transpose(Node):
    operand: Expr


@dataclass(frozen=True, kw_only=True)
class Call(Node):
    """A builtin function.

    `exp`, `sigmoid`, `softplus` and `sqrt` act on every element of a scalar or a column vector; `l2norm`, `sum` and
    `Diag` take a column vector.
    """

    function: str
    argument: Expr


Expr: TypeAlias = (
    Number | Name | Identity | Negative | Sum | Difference | Product | Hadamard | Quotient | Transpose | Call
)


def operands(expr: Expr) -> tuple[Expr, ...]:
    """The expressions directly below this one, from left to right."""
    match expr:
        case Number() | Name() | Identity():
            return ()
        case Negative() | Transpose():
            return (expr.operand,)
        case Call():
            return (expr.argument,)
        case _:
            return (expr.left, expr.right)
