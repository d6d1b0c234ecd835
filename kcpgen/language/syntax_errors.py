"""A token the grammar does not expect -> a diagnostic in human words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lark import Token, UnexpectedToken

from kcpgen.diagnostics import Faults
from kcpgen.language import lookalikes, names
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
    "PLUS": "`+`",
    "MINUS": "`-`",
    "TRANSPOSE": "`^T`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "$END": "the end of the line",
} | {word.upper(): f"`{word}`" for word in names.KEYWORDS}
_STATEMENTS = {word.upper() for word in names.KEYWORDS if word not in ("in", "log", "decay")}
_OPERATORS = {"PLUS", "MINUS", "STAR", "SLASH", "HADAMARD"}
_OPERANDS = {"NAME", "NUMBER", "FUNCTION", "LPAR", "MINUS"}
_CHARACTER_HINTS = {
    "^": "`^T` is the only power: write `x * x` for a square, `exp(x)` for e to the x",
    '"': "a title is closed by a double quote on the same line",
    "'": "a transpose is written `^T`, a title stands in double quotes",
    ";": "a statement ends with its line",
    "@": "a matrix product is written by juxtaposition, `k v^T`, or with `*`",
    "{": "the token index is written in brackets, `k[t]`",
    "<": "a rewrite is written `<-`",
}


def report(error: UnexpectedToken, tokens: Sequence[Token], path: str, faults: Faults) -> None:
    """Reports the first token of a statement that does not fit."""
    token, expected = error.token, set(error.accepts or ())
    label = f"expected {in_words(expected)}"
    if token.type == "$END":
        faults.add("KCP010", "the line ends too early", _after(tokens[-1], path), label=label)
        return
    span = span_of(token, token, path)
    if token.type == "UNKNOWN":
        following = next((str(right) for left, right in pairwise(tokens) if left is token), "")
        hint = lookalikes.meant_symbol(str(token), following) or _CHARACTER_HINTS.get(str(token), "")
        faults.add("KCP016", f"unexpected character `{token}`", span, note=lookalikes.foreign(str(token)), hint=hint)
    else:
        faults.add("KCP010", f"unexpected {_shown(token)}", span, label=label, hint=_hint(token, expected, tokens))


def in_words(expected: set[str]) -> str:
    """Kinds of token as a phrase: "a name, `(` or `-`"."""
    if expected >= _STATEMENTS and "IN" in expected:
        return "a name"
    if expected >= _STATEMENTS:
        return "a declaration or an equation"
    phrases, kinds = [], set(expected)
    if kinds >= _OPERANDS and kinds >= _OPERATORS:
        phrases, kinds = ["an operator"], kinds - _OPERANDS - _OPERATORS - {"TRANSPOSE"}
    elif kinds >= _OPERANDS:
        phrases, kinds = ["an expression"], kinds - _OPERANDS
    elif kinds >= _OPERATORS:
        phrases, kinds = ["an operator"], kinds - _OPERATORS - {"NAME", "FUNCTION", "LPAR", "TRANSPOSE"}
    phrases += sorted(_WORDS[kind] for kind in kinds)
    return " or ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]])) if phrases else "nothing more"


def _shown(token: Token) -> str:
    if token.type == "STRING":
        return "title"
    return f"keyword `{token}`" if token in names.KEYWORDS else f"`{token}`"


def _hint(token: Token, expected: set[str], tokens: Sequence[Token]) -> str:
    before = next((left for left, right in pairwise(tokens) if right is token), None)
    if token.type == "LSQB" and before is not None and before.type == "TRANSPOSE":
        return "the transpose comes last, `k[t]^T`"
    if token.type == "EQUALS" and "ARROW" in expected:
        return "an equation is written `S[t] = ...`, a rewrite `q <- ...`"
    if expected >= _STATEMENTS and "IN" not in expected and token.type == "NAME":
        return names.did_you_mean(str(token), names.KEYWORDS)
    if before is not None and before.type == "NAME" and before is tokens[0] and "ARROW" in expected:
        return names.did_you_mean(str(before), names.KEYWORDS)
    return ""


def _after(token: Token, path: str) -> Span:
    end = span_of(token, token, path)
    return Span(
        path=path, line=end.end_line, column=end.end_column, end_line=end.end_line, end_column=end.end_column + 1
    )
