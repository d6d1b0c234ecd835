"""Walks over the syntax tree."""

from __future__ import annotations

from kcpgen.language.syntax import (
    Call,
    Difference,
    Expr,
    Hadamard,
    Negative,
    Product,
    Quotient,
    Sum,
    Transpose,
)


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct sub-expressions of a node, in source order."""
    match expr:
        case Negative() | Transpose():
            return (expr.operand,)
        case Call():
            return (expr.argument,)
        case Sum() | Difference() | Product() | Hadamard() | Quotient():
            return (expr.left, expr.right)
        case _:
            return ()


def walk(expr: Expr) -> list[Expr]:
    """The node and everything below it, in source order."""
    return [expr, *(node for child in children(expr) for node in walk(child))]


def smallest_around(root: Expr, nodes: list[Expr]) -> Expr:
    """The smallest sub-expression of root that contains all the nodes."""
    for child in children(root):
        below = walk(child)
        if all(any(node is inner for inner in below) for node in nodes):
            return smallest_around(child, nodes)
    return root
