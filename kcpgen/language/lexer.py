"""Source text -> statements, each a list of tokens.

A statement ends with its line unless a bracket is open, the line ends with an operator or the next line begins with one.
Spelling differences end here: `β` becomes `beta`, `ᵀ` becomes `^T`, `⊙` becomes `.*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lark import Token

from kcpgen.diagnostics import Diagnostic
from kcpgen.language import names
from kcpgen.language.syntax import Span

_NAME = r"(?:(?!ᵀ)[^\W\d])(?:(?!ᵀ)\w)*"
_TERMINALS = {
    "NEWLINE": r"\n",
    "BLANK": r"[ \t]+",
    "COMMENT": r"#[^\n]*",
    "STRING": r'"[^"\n]*"',
    "ARROW": r"<-|←",
    "TRANSPOSE": r"\^T(?!\w)|\^\{T\}|\^⊤|ᵀ",
    "HADAMARD": r"\.\*|⊙|∘",
    "NUMBER": r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?",
    "NAME": _NAME,
    "IN": "∈",
    "PLUS": r"\+",
    "MINUS": r"[-−]",
    "STAR": r"[*·⋅]",
    "SLASH": "/",
    "EQUALS": "=",
    "COLON": ":",
    "COMMA": ",",
    "LPAR": r"\(",
    "RPAR": r"\)",
    "LSQB": r"\[",
    "RSQB": r"\]",
    "UNKNOWN": ".",
}
_SCANNER = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _TERMINALS.items()), re.DOTALL)
_CLOSES = {"RPAR": "LPAR", "RSQB": "LSQB"}
_BEFORE_BREAK = {"PLUS", "MINUS", "STAR", "SLASH", "HADAMARD", "EQUALS", "ARROW", "COMMA"}
_AFTER_BREAK = _BEFORE_BREAK | {"TRANSPOSE", "RPAR", "RSQB"}
_KEYWORD_TYPES = {word: word.upper() for word in names.KEYWORDS}


@dataclass(frozen=True, kw_only=True)
class Lexed:
    """Statements in source order, and what could not be read; a statement with a fault in its brackets is left out."""

    statements: tuple[tuple[Token, ...], ...]
    end: Span
    diagnostics: tuple[Diagnostic, ...]


def lex(text: str, path: str) -> Lexed:
    tokens = list(_scan(text))
    groups = list(_statements(tokens))
    faults = {index: _bracket_fault(group, path) for index, group in enumerate(groups)}
    return Lexed(
        statements=tuple(tuple(group) for index, group in enumerate(groups) if faults[index] is None),
        end=_end(text, path),
        diagnostics=tuple(fault for fault in faults.values() if fault is not None),
    )


def span_of(first: Token, last: Token, path: str) -> Span:
    """The span from the start of `first` to the end of `last`."""
    assert first.line and first.column and last.end_line and last.end_column
    return Span(path=path, line=first.line, column=first.column, end_line=last.end_line, end_column=last.end_column)


def _scan(text: str) -> Iterator[Token]:
    line, start_of_line = 1, 0
    for match in _SCANNER.finditer(text):
        kind, spelling = match.lastgroup or "UNKNOWN", match.group()
        if kind == "NEWLINE":
            yield Token(kind, spelling, line=line, column=match.start() - start_of_line + 1)
            line, start_of_line = line + 1, match.end()
        elif kind not in ("BLANK", "COMMENT"):
            column = match.start() - start_of_line + 1
            value, kind = _normalise(kind, spelling)
            yield Token(kind, value, line=line, column=column, end_line=line, end_column=column + len(spelling))


def _normalise(kind: str, spelling: str) -> tuple[str, str]:
    if kind != "NAME":
        return spelling, kind
    name = names.canonical(spelling)
    if name in names.FUNCTIONS:
        return name, "FUNCTION"
    return name, _KEYWORD_TYPES.get(name, "NAME")


def _statements(tokens: list[Token]) -> Iterator[list[Token]]:
    group: list[Token] = []
    depth = 0
    for index, token in enumerate(tokens):
        if token.type != "NEWLINE":
            group.append(token)
            depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
            continue
        following = _next_on_a_line(tokens, index)
        if group and (_begins_statement(following) or not _continues(group[-1], following, depth)):
            yield group
            group, depth = [], 0
    if group:
        yield group


def _next_on_a_line(tokens: list[Token], index: int) -> list[Token]:
    """The first tokens after the newline at `index`, enough to see whether they begin a statement."""
    while index < len(tokens) and tokens[index].type == "NEWLINE":
        index += 1
    return tokens[index : index + 5]


def _begins_statement(tokens: list[Token]) -> bool:
    kinds = [token.type for token in tokens]
    if not kinds or kinds[0] in {"OP", "TOKEN", "PARAM", "CONSTANT", "FLAG", "STATE", "OPTION", "WHEN"}:
        return True
    return kinds[:2] == ["NAME", "ARROW"] or (
        kinds[:4] == ["NAME", "LSQB", "NAME", "RSQB"] and kinds[4:] in (["EQUALS"], ["ARROW"])
    )


def _continues(last: Token, following: list[Token], depth: int) -> bool:
    return depth > 0 or last.type in _BEFORE_BREAK or following[0].type in _AFTER_BREAK


def _bracket_fault(tokens: list[Token], path: str) -> Diagnostic | None:
    opened: list[Token] = []
    for token in tokens:
        if token.type in _CLOSES.values():
            opened.append(token)
        elif token.type in _CLOSES:
            if not opened or opened[-1].type != _CLOSES[token.type]:
                return _unmatched(token, "nothing open for it to close", path)
            opened.pop()
    return _unmatched(opened[-1], "never closed", path) if opened else None


def _unmatched(token: Token, label: str, path: str) -> Diagnostic:
    return Diagnostic(code="KCP011", message=f"unmatched `{token}`", span=span_of(token, token, path), label=label)


def _end(text: str, path: str) -> Span:
    line = text.count("\n") + 1
    column = len(text) - (text.rfind("\n") + 1) + 1
    return Span(path=path, line=line, column=column, end_line=line, end_column=column + 1)
