"""Source text -> statements, each a list of tokens.

A statement ends with its line unless a bracket is open, the line ends with an operator or the next one begins with one.
Differences of spelling end here: `β` becomes `beta`; `ᵀ` and `^T`, `⊙` and `.*` become tokens of one type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lark import Token

from kcpgen.diagnostics import Faults
from kcpgen.language import names
from kcpgen.language.syntax import Span

_TERMINALS = {
    "NEWLINE": r"\n",
    "BLANK": r"[ \t]+",
    "COMMENT": r"#[^\n]*",
    "STRING": r'"[^"\n]*"',
    "ARROW": r"<-|←",
    "TRANSPOSE": r"\^T(?!\w)|\^\{T\}|\^⊤|ᵀ",
    "HADAMARD": r"\.\*|⊙|∘",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "NAME": r"(?:(?!ᵀ)[^\W0-9])(?:(?!ᵀ)\w)*",
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
_SCANNER = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _TERMINALS.items()))
_OPENING = {"RPAR": "LPAR", "RSQB": "LSQB"}
_BREAK_AFTER = frozenset(["PLUS", "MINUS", "STAR", "SLASH", "HADAMARD", "EQUALS", "ARROW", "COMMA"])
_BREAK_BEFORE = _BREAK_AFTER | frozenset(["TRANSPOSE", "IN", "LOG", "RPAR", "RSQB"])
_STATEMENT_WORDS = frozenset(["OP", "TOKEN", "PARAM", "CONSTANT", "FLAG", "STATE", "OPTION", "WHEN"])


def lex(text: str) -> list[list[Token]]:
    """The statements of a text in order, none of them empty."""
    tokens = list(_scan(text))
    groups: list[list[Token]] = [[]]
    depth = 0
    for index, token in enumerate(tokens):
        if token.type != "NEWLINE":
            groups[-1].append(token)
            depth += (token.type in _OPENING.values()) - (token.type in _OPENING)
        elif groups[-1] and _ends(groups[-1][-1], _following(tokens, index), depth):
            groups.append([])
            depth = 0
    return [group for group in groups if group]


def balanced(tokens: Sequence[Token], path: str, faults: Faults) -> bool:
    """Whether every bracket of a statement has its partner; reports the first that has none."""
    opened: list[Token] = []
    for token in tokens:
        if token.type in _OPENING.values():
            opened.append(token)
        elif token.type in _OPENING and not (opened and opened.pop().type == _OPENING[token.type]):
            faults.add("KCP011", f"unmatched `{token}`", span_of(token, token, path), label="closes nothing")
            return False
    if opened:
        faults.add("KCP011", f"unmatched `{opened[-1]}`", span_of(opened[-1], opened[-1], path), label="never closed")
    return not opened


def span_of(first: Token, last: Token, path: str) -> Span:
    """The span from the start of `first` to the end of `last`."""
    assert first.line
    assert first.column
    assert last.end_line
    assert last.end_column
    return Span(path=path, line=first.line, column=first.column, end_line=last.end_line, end_column=last.end_column)


def end_of(text: str, path: str) -> Span:
    """The end of the text, where something missing would have stood."""
    lines = text.rstrip().split("\n")
    column = len(lines[-1]) + 1
    return Span(path=path, line=len(lines), column=column, end_line=len(lines), end_column=column + 1)


def _scan(text: str) -> Iterator[Token]:
    line, line_start = 1, 0
    for match in _SCANNER.finditer(text):
        kind, spelling = match.lastgroup or "UNKNOWN", match.group()
        column = match.start() - line_start + 1
        if kind == "NEWLINE":
            line, line_start = line + 1, match.end()
            yield Token(kind, spelling)
        elif kind not in ("BLANK", "COMMENT"):
            kind, value = _resolved(kind, spelling)
            yield Token(kind, value, line=line, column=column, end_line=line, end_column=column + len(spelling))


def _resolved(kind: str, spelling: str) -> tuple[str, str]:
    """Names told from functions and keywords, after Greek letters are spelled out."""
    if kind != "NAME":
        return kind, spelling
    name = names.canonical(spelling)
    if name in names.FUNCTIONS:
        return "FUNCTION", name
    return (name.upper() if name in names.KEYWORDS else "NAME"), name


def _following(tokens: list[Token], index: int) -> list[Token]:
    """The first tokens after the line break at `index`, enough to see whether they begin a statement."""
    while index < len(tokens) and tokens[index].type == "NEWLINE":
        index += 1
    return tokens[index : index + 5]


def _ends(last: Token, following: list[Token], depth: int) -> bool:
    """Whether a statement ends between `last` and the next line; an open bracket does not swallow what begins one."""
    if not following or _begins_statement([token.type for token in following]):
        return True
    return depth <= 0 and last.type not in _BREAK_AFTER and following[0].type not in _BREAK_BEFORE


def _begins_statement(types: list[str]) -> bool:
    if types[:4] == ["NAME", "LSQB", "NAME", "RSQB"]:
        types = ["NAME", *types[4:]]
    return types[0] in _STATEMENT_WORDS or (types[0] == "NAME" and types[1:2] in (["EQUALS"], ["ARROW"]))
