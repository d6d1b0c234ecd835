"""Drops from kernels what nothing reads: templates form every operand, an op may not need them all.

Functions of the Triton language act by their stores alone: an assignment to a name that is never read can go, with all
that only it needed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

ACTS = ("store", "atomic", "barrier", "print", "assert")


def drop_idle(source: str) -> str:
    """`source` without the idle assignments of its `@triton.jit` functions."""
    while idle := [statement for kernel in _kernels(ast.parse(source)) for statement in _idle(kernel)]:
        gone = {line for statement in idle for line in range(statement.lineno, _end(statement) + 1)}
        lines = source.splitlines(keepends=True)
        source = "".join(line for number, line in enumerate(lines, start=1) if number not in gone)
    return source


def _kernels(tree: ast.Module) -> list[ast.FunctionDef]:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any(ast.unparse(decorator) == "triton.jit" for decorator in f.decorator_list)]


def _idle(kernel: ast.FunctionDef) -> Iterator[ast.Assign]:
    read = {node.id for node in ast.walk(kernel) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    read |= {node.target.id for node in ast.walk(kernel) if _is_update(node)}  # type: ignore[attr-defined]
    for block in _blocks(kernel):
        found = [s for s in block if isinstance(s, ast.Assign) and _assigned(s) not in {*read, None} and not _acts(s)]
        yield from found if len(found) < len(block) else found[1:]


def _is_update(node: ast.AST) -> bool:
    return isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)


def _blocks(kernel: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(kernel):
        for part in ("body", "orelse"):
            if block := getattr(node, part, None):
                yield block if isinstance(block, list) else []


def _assigned(statement: ast.Assign) -> str | None:
    target = statement.targets[0]
    return target.id if len(statement.targets) == 1 and isinstance(target, ast.Name) else None


def _acts(statement: ast.Assign) -> bool:
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(word in ast.unparse(call.func) for call in calls for word in ACTS)


def _end(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno
