"""A token the grammar does not expect -> a diagnostic in human words."""

from __future__ import annotations

from collections.abc import Sequence

from lark import Token, UnexpectedToken

from kcpgen.diagnostics import Diagnostic
from kcpgen.language import names
from kcpgen.language.lexer import span_of
from kcpgen.language.syntax import Span

_WORDS = {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": "a title in double quotes",
    "FUNCTION": "a function",
    "COLON": "`:`",
    "COMMA": "`,`",
    "EQUALS": "`=`",
    "ARROW": "`<-`",
    "TRANSPOSE": "`^T`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "$END": "the end of the line",
} | {word.upper(): f"`{word}`" for word in names.KEYWORDS}
_OPERATORS = {"PLUS", "MINUS", "STAR", "SLASH", "HADAMARD"}
_OPERANDS = {"NAME", "NUMBER", "FUNCTION", "LPAR", "MINUS"}
_STATEMENTS = {word.upper() for word in names.KEYWORDS if word not in ("in", "log", "decay")}


def explain(error: UnexpectedToken, tokens: Sequence[Token], path: str) -> Diagnostic:
    """The diagnostic for the first token of a statement that does not fit."""
    token = error.token
    expected = set(error.accepts or ())
    if token.type == "$END":
        return _diagnostic("KCP010", "the line ends too early", _after(tokens[-1], path), expected)
    span = span_of(token, token, path)
    if token.type == "UNKNOWN":
        return _unknown_character(token, span)
    return _diagnostic("KCP010", f"unexpected {_shown(token)}", span, expected, _keyword_hints(token, expected))


def _diagnostic(code: str, message: str, span: Span, expected: set[str], hints: tuple[str, ...] = ()) -> Diagnostic:
    return Diagnostic(code=code, message=message, span=span, label=f"expected {in_words(expected)}", hints=hints)


def in_words(expected: set[str]) -> str:
    """Kinds of token as a phrase: "a name, `(` or `-`"."""
    if expected >= _STATEMENTS:
        return "a declaration or an equation"
    kinds = set(expected)
    phrases = []
    if kinds >= _OPERANDS:
        phrases, kinds = ["an expression"], kinds - _OPERANDS
    if kinds >= _OPERATORS:
        phrases, kinds = ["an operator"], kinds - _OPERATORS - _OPERANDS - {"TRANSPOSE"}
    phrases += sorted(_WORDS.get(kind, f"`{kind}`") for kind in kinds)
    return " or ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]])) if phrases else "nothing more"


def _shown(token: Token) -> str:
    if token.type == "STRING":
        return "title"
    if token.type.lower() in names.KEYWORDS:
        return f"keyword `{token.type.lower()}`"
    return f"`{token}`"


def _keyword_hints(token: Token, expected: set[str]) -> tuple[str, ...]:
    if token.type.lower() in names.KEYWORDS and "NAME" in expected and not expected >= _STATEMENTS:
        return ("keywords of the language cannot be names",)
    return ()


def _unknown_character(token: Token, span: Span) -> Diagnostic:
    hints = {
        "^": "only the transpose `^T` is a power; write `x * x` for a square",
        '"': "a title is closed by a double quote on the same line",
        "'": "a transpose is written `^T`; titles stand in double quotes",
        ";": "one statement a line; no semicolon",
        "@": "a matrix product is written by juxtaposition, `k v^T`, or with `*`",
    }
    hint = hints.get(str(token))
    return Diagnostic(code="KCP016", message=f"unexpected character `{token}`", span=span, hints=(hint,) if hint else ())


def _after(token: Token, path: str) -> Span:
    end = span_of(token, token, path)
    return Span(path=path, line=end.end_line, column=end.end_column, end_line=end.end_line, end_column=end.end_column + 1)
