"""Statements -> what is declared, with every fault of a declaration reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from kcpgen.diagnostics import Diagnostic
from kcpgen.language import names
from kcpgen.language import statements as st
from kcpgen.language.promises import input_bounds
from kcpgen.language.syntax import Shape, Span
from kcpgen.spec import Constant, HeadGroup, Param, TokenInput

Report = Callable[[Diagnostic], None]
_Once = TypeVar("_Once", st.Op, st.State)
_TOKEN_SHAPES = "`[H]`, `[HV]`, `[H, K]`, `[HV, K]`, `[H, V]` or `[HV, V]`"
MAX_TITLE = 100


@dataclass(frozen=True, kw_only=True)
class Declarations:
    """Everything a spec declares. `words` has each name once, where it was declared first."""

    op: st.Op | None
    inputs: tuple[TokenInput, ...]
    params: tuple[Param, ...]
    constants: tuple[Constant, ...]
    flags: tuple[str, ...]
    state: st.State | None
    words: dict[str, st.Word]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of what an expression may mention."""
        shapes: dict[str, Shape] = {"scale": ("1", "1")}
        shapes |= {self.state.name.text: ("K", "V")} if self.state else {}
        shapes |= {declared.name: (declared.axis or "1", "1") for declared in (*self.inputs, *self.params)}
        return shapes | {constant.name: ("1", "1") for constant in self.constants}


def declarations(statements: Sequence[st.Statement], end: Span, report: Report) -> Declarations:
    """Collects the declarations of a file; `end` is where a missing one is reported."""
    words = _unique(list(_declared_words(statements)), report)
    op = _single([s for s in statements if isinstance(s, st.Op)], "op", 'op my_op "Its title"', end, report)
    state = _single([s for s in statements if isinstance(s, st.State)], "state", "state S : [HV, K, V]", end, report)
    if op is not None:
        _check_op(op, report)
    if state is not None and [word.text for word in state.shape] != ["HV", "K", "V"]:
        _fault(report, "KCP122", "a state has the shape `[HV, K, V]`", state.shape_span)
    inputs = [i for s in statements if isinstance(s, st.Token) for i in _inputs(s, report)]
    params = [p for s in statements if isinstance(s, st.Param) for p in _params(s, report)]
    return Declarations(
        op=op,
        inputs=tuple(inputs),
        params=tuple(params),
        constants=tuple(Constant(name=w.text, span=w.span) for w in _names_of(statements, st.Constant)),
        flags=tuple(word.text for word in _names_of(statements, st.Flag)),
        state=state,
        words=words,
    )


def _names_of(statements: Sequence[st.Statement], kind: type[st.Constant] | type[st.Flag]) -> list[st.Word]:
    return [word for s in statements if isinstance(s, kind) for word in s.names]


def _declared_words(statements: Sequence[st.Statement]) -> Iterable[st.Word]:
    for statement in statements:
        if isinstance(statement, st.Token | st.Param | st.Constant | st.Flag):
            yield from statement.names
        elif isinstance(statement, st.State | st.Option):
            yield statement.name


def _unique(declared: list[st.Word], report: Report) -> dict[str, st.Word]:
    words: dict[str, st.Word] = {}
    for word in declared:
        check_name(word, report)
        if word.text in words:
            first = words[word.text].span
            note = f"first declared at line {first.line}, column {first.column}; Greek letters are their ASCII names"
            _fault(report, "KCP102", f"`{word.text}` is declared twice", word.span, notes=(note,))
        words.setdefault(word.text, word)
    for name, word in words.items():
        if name[0] == "d" and name[1:] in words:
            reason = f"it is the gradient of `{name[1:]}` in generated code"
            _fault(report, "KCP103", f"`{name}` is reserved: {reason}", word.span)
    return words


def check_name(word: st.Word, report: Report) -> None:
    """Reports a name that generated code cannot carry."""
    if reason := names.malformed(word.text):
        _fault(report, "KCP104", f"`{word.text}` cannot be a name: {reason}", word.span)
    elif reason := names.reserved(word.text):
        _fault(report, "KCP103", f"`{word.text}` is reserved: {reason}", word.span, hints=("choose another name",))


def _single(found: list[_Once], what: str, example: str, end: Span, report: Report) -> _Once | None:
    if not found:
        _fault(report, "KCP110", f"no `{what}` is declared", end, hints=(f"add a line such as `{example}`",))
    for extra in found[1:]:
        note = f"the first one is on line {found[0].span.line}"
        _fault(report, "KCP111", f"a spec has one `{what}`", extra.span, notes=(note,))
    return found[0] if found else None


def _check_op(op: st.Op, report: Report) -> None:
    check_name(op.name, report)
    if op.name.text != op.name.text.lower():
        hints = (f"write `{op.name.text.lower()}`",)
        _fault(report, "KCP104", "an op's name is the name of a package: lower case only", op.name.span, hints=hints)
    if len(op.title) > MAX_TITLE or re.search(r"\\|'''", op.title):
        message = f"a title has at most {MAX_TITLE} characters, no backslash and no triple quotes"
        _fault(report, "KCP105", message, op.title_span, notes=("titles end in the docstrings of generated code",))


def _inputs(statement: st.Token, report: Report) -> list[TokenInput]:
    heads, axis = _token_shape(statement, report)
    bounds = input_bounds(statement, report)
    role = "log_decay" if statement.log_decay else "data"
    return [
        TokenInput(name=word.text, heads=heads, axis=axis, role=role, bounds=bounds, span=word.span)  # type: ignore[arg-type]
        for word in statement.names
    ]


def _token_shape(statement: st.Token, report: Report) -> tuple[HeadGroup, str]:
    heads, *axis = (word.text for word in statement.shape)
    if heads not in ("H", "HV") or axis not in ([], ["K"], ["V"]):
        note = f"a token input is {_TOKEN_SHAPES}; batch and time go without saying"
        _fault(report, "KCP122", "no shape of a token input", statement.shape_span, notes=(note,))
        return "HV", ""
    return cast(HeadGroup, heads), axis[0] if axis else ""


def _params(statement: st.Param, report: Report) -> list[Param]:
    heads, *axis = (word.text for word in statement.shape)
    if heads != "HV" or axis not in ([], ["K"], ["V"]):
        note = "a parameter is `[HV]`, `[HV, K]` or `[HV, V]`"
        _fault(report, "KCP122", "no shape of a parameter", statement.shape_span, notes=(note,))
        axis = []
    return [Param(name=word.text, axis=axis[0] if axis else "", span=word.span) for word in statement.names]


def _fault(
    report: Report, code: str, message: str, span: Span, notes: tuple[str, ...] = (), hints: tuple[str, ...] = ()
) -> None:
    report(Diagnostic(code=code, message=message, span=span, notes=notes, hints=hints))
