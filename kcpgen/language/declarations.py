"""Statements -> what is declared, with every fault of a declaration reported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from kcpgen.diagnostics import Faults
from kcpgen.language import names
from kcpgen.language import statements as st
from kcpgen.language.limits import MAX_NAMES, MAX_TITLE
from kcpgen.language.lookalikes import meant_letters
from kcpgen.language.promises import input_bounds
from kcpgen.language.syntax import SCALAR, Shape, Span
from kcpgen.spec import Constant, HeadGroup, Param, Role, TokenInput

_UNSHAPED = "?"  # the axis of what was declared with an impossible shape, so that nothing is reported for its uses
_PARAM_SHAPES = [("HV",), ("HV", "K"), ("HV", "V")]
_TOKEN_SHAPES = [("H",), ("H", "K"), ("H", "V"), *_PARAM_SHAPES]
_Once = TypeVar("_Once", st.Op, st.State)


@dataclass(frozen=True, kw_only=True)
class Declarations:
    """Everything a spec declares. `words` has each name once, where it was declared first."""

    op: st.Op | None
    state: st.State | None
    inputs: tuple[TokenInput, ...]
    params: tuple[Param, ...]
    constants: tuple[Constant, ...]
    flags: tuple[str, ...]
    words: dict[str, st.Word]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of what an expression may mention, as far as they are known."""
        shapes: dict[str, Shape] = {"scale": SCALAR}
        if self.state is not None:
            shapes[self.state.name.text] = ("K", "V")
        shapes |= {given.name: (given.axis or "1", "1") for given in self.inputs if given.axis != _UNSHAPED}
        shapes |= {param.name: (param.axis or "1", "1") for param in self.params if param.axis != _UNSHAPED}
        return shapes | {constant.name: SCALAR for constant in self.constants}


def declarations(statements: Sequence[st.Statement], end: Span, faults: Faults) -> Declarations:
    """Collects the declarations of a file; `end` is where a missing one is reported."""
    op = _single([s for s in statements if isinstance(s, st.Op)], "op", 'op my_op "Its title"', end, faults)
    state = _single([s for s in statements if isinstance(s, st.State)], "state", "state S : [HV, K, V]", end, faults)
    if op is not None:
        _check_op(op, faults)
    if state is not None and [word.text for word in state.shape] != ["HV", "K", "V"]:
        note = "a state is `[HV, K, V]`, per sequence"
        _misshapen("no shape of a state", state, [("HV", "K", "V")], note, faults)
    return Declarations(
        op=op,
        state=state,
        inputs=tuple(given for s in statements if isinstance(s, st.Token) for given in _inputs(s, faults)),
        params=tuple(param for s in statements if isinstance(s, st.Param) for param in _params(s, faults)),
        constants=tuple(
            Constant(name=word.text, span=word.span)
            for s in statements
            if isinstance(s, st.Constant)
            for word in s.names
        ),
        flags=tuple(word.text for s in statements if isinstance(s, st.Flag) for word in s.names),
        words=_unique(list(_declared_words(statements)), faults),
    )


def check_name(word: st.Word, faults: Faults) -> None:
    """Reports a name that generated code cannot carry."""
    greek = len(word.text) != word.span.end_column - word.span.column
    note = "Greek letters are read by their names" if greek else ""
    if reason := names.malformed(word.text):
        message = f"`{word.text}` cannot be a name: {reason}"
        note, hint = names.foreign_letters(word.text) or note, meant_letters(word.text)
        faults.add("KCP104", message, word.span, note=note, hint=hint)
    elif reason := names.reserved(word.text):
        faults.add("KCP103", f"`{word.text}` is reserved: {reason}", word.span, note=note, hint="choose another name")


def _declared_words(statements: Sequence[st.Statement]) -> Iterable[st.Word]:
    for statement in statements:
        if isinstance(statement, st.Token | st.Param | st.Constant | st.Flag):
            yield from statement.names
        elif isinstance(statement, st.State | st.Option):
            yield statement.name


def _unique(declared: list[st.Word], faults: Faults) -> dict[str, st.Word]:
    if len(declared) > MAX_NAMES:
        faults.add("KCP015", f"more than {MAX_NAMES} names", declared[MAX_NAMES].span, note="a spec fits on one screen")
    words: dict[str, st.Word] = {}
    for word in declared[:MAX_NAMES]:
        check_name(word, faults)
        if word.text in words:
            first = words[word.text].span
            note = f"first declared on line {first.line}; a Greek letter and its name are the same"
            faults.add("KCP102", f"`{word.text}` is declared twice", word.span, note=note)
        words.setdefault(word.text, word)
    _check_gradient_names(words, faults)
    return words


def _check_gradient_names(words: dict[str, st.Word], faults: Faults) -> None:
    for name, word in words.items():
        if name[0] == "d" and name[1:] in words:
            message = f"`{name}` is reserved: generated code calls the gradient of `{name[1:]}` so"
            faults.add("KCP103", message, word.span, hint="choose another name")


def _single(found: list[_Once], what: str, example: str, end: Span, faults: Faults) -> _Once | None:
    if not found:
        faults.add("KCP110", f"no `{what}` is declared", end, hint=f"add a line such as `{example}`")
        return None
    for extra in found[1:]:
        note = f"the first one is on line {found[0].span.line}"
        faults.add("KCP111", f"a spec has one `{what}`", extra.name.span, note=note)
    return found[0]


def _check_op(op: st.Op, faults: Faults) -> None:
    check_name(op.name, faults)
    if op.name.text != op.name.text.lower():
        message = "an op's name becomes the name of a package: lower case only"
        faults.add("KCP104", message, op.name.span, hint=f"write `{op.name.text.lower()}`")
    if len(op.title) > MAX_TITLE or "\\" in op.title or "'''" in op.title:
        message = f"a title has at most {MAX_TITLE} characters, no backslash and no triple quotes"
        faults.add("KCP105", message, op.title_span, note="titles end in the docstrings of generated code")


def _inputs(statement: st.Token, faults: Faults) -> list[TokenInput]:
    heads, axis = _token_shape(statement, faults)
    bounds = input_bounds(statement, faults)
    role: Role = "log_decay" if statement.log_decay else "data"
    return [
        TokenInput(name=word.text, heads=heads, axis=axis, role=role, bounds=bounds, span=word.span)
        for word in statement.names
    ]


def _token_shape(statement: st.Token, faults: Faults) -> tuple[HeadGroup, str]:
    heads, *axis = (word.text for word in statement.shape)
    if heads in ("H", "HV") and axis in ([], ["K"], ["V"]):
        return cast("HeadGroup", heads), axis[0] if axis else ""
    note = "a token input has heads `H` or `HV` and at most one axis, `K` or `V`; batch and time go without saying"
    _misshapen("no shape of a token input", statement, _TOKEN_SHAPES, note, faults)
    return "HV", _UNSHAPED


def _params(statement: st.Param, faults: Faults) -> list[Param]:
    heads, *axes = (word.text for word in statement.shape)
    axis = axes[0] if axes else ""
    if heads != "HV" or axes not in ([], ["K"], ["V"]):
        note = "a parameter is `[HV]`, `[HV, K]` or `[HV, V]`"
        _misshapen("no shape of a parameter", statement, _PARAM_SHAPES, note, faults)
        axis = _UNSHAPED
    return [Param(name=word.text, axis=axis, span=word.span) for word in statement.names]


def _misshapen(
    message: str,
    statement: st.Token | st.Param | st.State,
    allowed: Sequence[tuple[str, ...]],
    note: str,
    faults: Faults,
) -> None:
    """Reports the first word that no allowed shape has there; all of them where only their order is wrong."""
    words = [word.text for word in statement.shape]
    meant = next((shape for shape in allowed if sorted(shape) == sorted({*words} - {"B", "T"})), None)
    span, hint = statement.shape_span, f"write `[{', '.join(meant)}]`" if meant else ""
    fitting = list(allowed)
    for place, word in enumerate([] if meant else statement.shape):
        right = sorted({shape[place] for shape in fitting if len(shape) > place})
        if word.text not in right:
            span, hint = word.span, names.did_you_mean(word.text, right)
            break
        fitting = [shape for shape in fitting if shape[place : place + 1] == (word.text,)]
    faults.add("KCP122", message, span, note=note, hint=hint)
