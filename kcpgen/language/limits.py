"""Bounds on what a spec may be. They are far above any equation and below where recursion or memory would give out."""

from __future__ import annotations

from collections.abc import Sequence

from lark import Token

from kcpgen.diagnostics import Diagnostic
from kcpgen.language.lexer import span_of

MAX_BYTES = 64 * 1024
MAX_TOKENS = 500  # of one statement; also bounds the depth of its syntax tree
MAX_NESTING = 32


def size_fault(tokens: Sequence[Token], path: str) -> Diagnostic | None:
    """A statement too long, or None."""
    if len(tokens) <= MAX_TOKENS:
        return None
    return _fault(tokens[MAX_TOKENS], "statement too long", f"at most {MAX_TOKENS} symbols fit into one statement", path)


def nesting_fault(tokens: Sequence[Token], path: str) -> Diagnostic | None:
    """A bracket nested too deep, or None."""
    depth = 0
    for token in tokens:
        depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
        if depth > MAX_NESTING:
            return _fault(token, "nested too deep", f"brackets nest at most {MAX_NESTING} deep", path)
    return None


def _fault(token: Token, message: str, note: str, path: str) -> Diagnostic:
    return Diagnostic(code="KCP015", message=message, span=span_of(token, token, path), notes=(note,))
