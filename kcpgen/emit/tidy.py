"""Tidies kernels after rendering: templates form every operand and test every option, an op may not need it all.

Functions of the Triton language act by their stores alone. What no store can come to read is dropped, and neighbouring
branches on one condition become one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise

ACTS = (
    "store",
    "atomic",
    "barrier",
    "print",
    "assert",
    "copy",
    "fetch",
    "expect",
    "arrive",
    "fence",
    "wait",
    "specialize",
)


def tidy(source: str) -> str:
    """`source` with its `@triton.jit` and `@gluon.jit` functions tidied."""
    return merge_branches(drop_idle(source))


def drop_idle(source: str) -> str:
    """`source` without statements of its kernels whose results nothing reads, and without what only those needed."""
    liveness = _Liveness()
    for kernel in _kernels(source):
        liveness.block(kernel.body, frozenset())
    return _without(source, liveness.idle_lines)


def live(lines: Sequence[str]) -> list[str]:
    """Of the lines of a kernel's body, those that `drop_idle` leaves: what they name is all that it has to be given."""
    if not lines:
        return []
    head = "@triton.jit\ndef kernel():\n"
    source = drop_idle(head + "".join(f"    {line}\n" for line in lines))
    return [line.removeprefix("    ") for line in source.removeprefix(head).splitlines()]


def merge_branches(source: str) -> str:
    """`source` with each `if` of its kernels joined to the one before it that tests the same."""
    blocks = (block for kernel in _kernels(source) for block in _blocks(kernel))
    pairs = (pair for block in blocks for pair in pairwise(block))
    return _without(source, {second.lineno for first, second in pairs if _alike(first, second)})


def _kernels(source: str) -> list[ast.FunctionDef]:
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any(ast.unparse(d) in ("triton.jit", "gluon.jit") for d in f.decorator_list)]


class _Liveness:
    """Walks a function from its end, knowing which names are read later; notes statements that give none of them."""

    def __init__(self) -> None:
        self.idle: list[ast.stmt] = []
        self.idle_lines: set[int] = set()

    def block(self, statements: Sequence[ast.stmt], live: frozenset[str]) -> frozenset[str]:
        """The names that are live before these statements, given those that are live after them."""
        for statement in reversed(statements):
            live = self.statement(statement, live)
        return live

    def statement(self, node: ast.stmt, live: frozenset[str]) -> frozenset[str]:
        if isinstance(node, ast.For | ast.If):
            before = self.loop(node, live) if isinstance(node, ast.For) else self.branch(node, live)
            return live if self.emptied(node) else before
        name = _result(node)
        if name is None or name in live or _acts(node):
            return (live - ({name} if isinstance(node, ast.Assign | ast.AnnAssign) else set())) | _reads(node)
        self.drop(node)
        return live

    def branch(self, node: ast.If, live: frozenset[str]) -> frozenset[str]:
        otherwise = self.block(node.orelse, live)
        known = len(self.idle), set(self.idle_lines)
        before = self.block(node.body, live) | otherwise | _reads(node.test)
        if self.all_idle(node.body) and node.orelse and not self.all_idle(node.orelse):
            self.restore(*known)  # there is no branch without a body
            return before | _reads(node)
        return before

    def loop(self, node: ast.For, live: frozenset[str]) -> frozenset[str]:
        """What is live at the top of the body reaches its end: repeated until nothing is added."""
        known = len(self.idle), set(self.idle_lines)
        while True:
            before = live | (self.block(node.body, live) - _names(node.target))
            if before == live:
                return live | _reads(node.iter)
            live = before
            self.restore(*known)

    def emptied(self, node: ast.If | ast.For) -> bool:
        """Drop a compound statement of which nothing is left, or the `else:` above what is gone."""
        if self.all_idle([*node.body, *node.orelse]):
            self.drop(node)
            return True
        if node.orelse and self.all_idle(node.orelse):
            self.idle_lines.update(range(_end(node.body[-1]) + 1, node.orelse[0].lineno))
        return False

    def all_idle(self, statements: Sequence[ast.stmt]) -> bool:
        return all(statement in self.idle for statement in statements)

    def restore(self, idle: int, lines: set[int]) -> None:
        del self.idle[idle:]
        self.idle_lines = set(lines)

    def drop(self, node: ast.stmt) -> None:
        self.idle.append(node)
        self.idle_lines.update(range(node.lineno, _end(node) + 1))


def _result(node: ast.stmt) -> str | None:
    """The one name a statement gives a value to; None if it is not of that kind."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        target = node.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def _acts(node: ast.stmt) -> bool:
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any(word in ast.unparse(call.func) for call in calls for word in ACTS)


def _reads(node: ast.AST) -> frozenset[str]:
    read = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}
    return frozenset(read | (_names(node.target) if isinstance(node, ast.AugAssign) else set()))


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.For | ast.While | ast.If):
            yield from (inner.body, *([inner.orelse] if isinstance(inner, ast.If) else []))


def _alike(first: ast.stmt, second: ast.stmt) -> bool:
    """Two plain branches on one condition, which the first does not change, one right below the other."""
    if not (isinstance(first, ast.If) and isinstance(second, ast.If)) or first.orelse or second.orelse:
        return False
    stored = (inner for inner in ast.walk(first) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store))
    written = {name.id for name in stored}
    same = ast.dump(first.test) == ast.dump(second.test) and second.lineno == _end(first) + 1
    return same and second.body[0].lineno > second.lineno and not _reads(first.test) & written


def _without(source: str, numbers: set[int]) -> str:
    lines = source.splitlines(keepends=True)
    return "".join(line for number, line in enumerate(lines, start=1) if number not in numbers)


def _end(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno
