"""Questions about a syntax tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from kcpgen.language.syntax import Call, Expr, Name, Node


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
