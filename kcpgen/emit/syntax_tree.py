"""Questions about a syntax tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from math import exp, log1p, sqrt

from kcpgen.language.syntax import (
    Call,
    Difference,
    Expr,
    Hadamard,
    Name,
    Negative,
    Node,
    Number,
    Product,
    Quotient,
    Sum,
)

FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "exp": exp,
    "sqrt": sqrt,
    "sigmoid": lambda x: 1 / (1 + exp(-x)),
    "softplus": lambda x: log1p(exp(x)),
}


def nodes(expr: Node) -> Iterator[Node]:
    """The expression and everything in it."""
    yield expr
    for item in fields(expr):
        child = getattr(expr, item.name)
        if isinstance(child, Node):
            yield from nodes(child)


def names_in(exprs: Iterable[Expr]) -> frozenset[str]:
    return frozenset(node.name for expr in exprs for node in nodes(expr) if isinstance(node, Name))


def functions_in(exprs: Iterable[Expr]) -> frozenset[str]:
    return frozenset(node.function for expr in exprs for node in nodes(expr) if isinstance(node, Call))


def count_reads(expr: Expr, name: str) -> int:
    return sum(isinstance(node, Name) and node.name == name for node in nodes(expr))


def evaluated(expr: Expr) -> float:
    """The value of an expression without names."""
    match expr:
        case Number():
            return float(expr.value)
        case Negative():
            return -evaluated(expr.operand)
        case Call():
            return FUNCTIONS[expr.function](evaluated(expr.argument))
        case Sum():
            return evaluated(expr.left) + evaluated(expr.right)
        case Difference():
            return evaluated(expr.left) - evaluated(expr.right)
        case Product() | Hadamard():
            return evaluated(expr.left) * evaluated(expr.right)
        case Quotient():
            return evaluated(expr.left) / evaluated(expr.right)
    raise TypeError(f"{type(expr).__name__} is no number")
