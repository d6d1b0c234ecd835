"""Bounds on what a spec may be. They are far above any equation and below where recursion or memory would give out."""

from __future__ import annotations

from collections.abc import Sequence

from lark import Token

from kcpgen.diagnostics import Faults
from kcpgen.language.lexer import span_of
from kcpgen.language.syntax import Expr, operands

MAX_BYTES = 16 * 1024
MAX_NAMES = 100
MAX_TITLE = 100
MAX_TOKENS = 400  # of one statement
MAX_NESTING = 32  # of brackets
MAX_DEPTH = 100  # of a syntax tree; later stages walk it recursively
MAX_FAULTS = 20  # of syntax: after so many, the file is something else than a spec


def fits(tokens: Sequence[Token], path: str, faults: Faults) -> bool:
    """Whether a statement is within the bounds; reports it if not."""
    if len(tokens) > MAX_TOKENS:
        note = f"at most {MAX_TOKENS} symbols fit into one statement"
        faults.add("KCP015", "statement too long", span_of(tokens[MAX_TOKENS], tokens[MAX_TOKENS], path), note=note)
        return False
    depth = 0
    for token in tokens:
        depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
        if depth > MAX_NESTING:
            note = f"brackets nest at most {MAX_NESTING} deep"
            faults.add("KCP015", "nested too deep", span_of(token, token, path), note=note)
            return False
    return True


def check_depth(expr: Expr, faults: Faults) -> None:
    """Reports a syntax tree that is deeper than later stages can walk."""
    level, depth = [expr], 0
    while level:
        level, depth = [operand for node in level for operand in operands(node)], depth + 1
    if depth > MAX_DEPTH:
        faults.add("KCP015", "expression too deep", expr.span, note=f"operations nest at most {MAX_DEPTH} deep")
