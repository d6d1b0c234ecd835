"""Names in expressions: declared, readable in this place, and read at a token that is known by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from kcpgen.diagnostics import Diagnostic
from kcpgen.language import names
from kcpgen.language.declarations import Declarations
from kcpgen.language.syntax import Expr, Name, Node

Report = Callable[[Diagnostic], None]


def reads(expr: Expr) -> Iterator[Name]:
    """Every name an expression mentions, from left to right."""
    if isinstance(expr, Name):
        yield expr
    for field in fields(expr):
        if isinstance(operand := getattr(expr, field.name), Node):
            yield from reads(operand)  # type: ignore[arg-type]


def check_reads(expr: Expr, declared: Declarations, place: str, report: Report) -> None:
    """Reports names in the update, the readout or a rewrite (`place`) that cannot be read there."""
    for name in reads(expr):
        if fault := _fault(name, declared, place):
            report(fault)


def _fault(name: Name, declared: Declarations, place: str) -> Diagnostic | None:
    if declared.state is not None and name.name == declared.state.name.text:
        return _state_fault(name, place)
    if name.name in {declared_input.name for declared_input in declared.inputs}:
        return _input_fault(name)
    if name.name == "scale":
        return _scale_fault(name, place) or _index_fault(name, "the scale")
    if name.name in {param.name for param in declared.params}:
        return _index_fault(name, "a parameter")
    if name.name in {constant.name for constant in declared.constants}:
        return _constant_fault(name, place) or _index_fault(name, "a constant")
    return _unknown(name, declared)


def _state_fault(name: Name, place: str) -> Diagnostic | None:
    state = name.name
    if place == "rewrite":
        return _made("KCP114", name, "a rewrite cannot read the state", "it acts on a token's input before the recurrence")
    expected = {"update": -1, "readout": 0}[place]
    if name.indexed and name.offset == expected:
        return None
    if place == "update":
        hints = (f"the update reads the state before it, `{state}[t-1]`",)
        if name.indexed and name.offset == 0:
            return _made("KCP109", name, f"`{state}[t]` on the right of its own update", hints=hints)
    else:
        hints = (f"the readout reads the state after the update, `{state}[t]`",)
    code = "KCP107" if name.offset > 0 else "KCP109"
    return _made(code, name, f"`{_shown(name)}` cannot be read in the {place}", hints=hints)


def _input_fault(name: Name) -> Diagnostic | None:
    hints = (f"write `{name.name}[t]`",)
    if name.offset > 0:
        return _made("KCP107", name, f"`{_shown(name)}` reads a future token", "a recurrence is causal", hints)
    if name.offset < 0:
        note = "only the state carries over from earlier tokens"
        return _made("KCP108", name, f"`{_shown(name)}` reads an input of an earlier token", note, hints)
    return None


def _scale_fault(name: Name, place: str) -> Diagnostic | None:
    if place == "readout":
        return None
    return _made("KCP118", name, f"`scale` in the {place}", "the scale belongs to the readout, `o[t] = scale S[t]^T q[t]`")


def _constant_fault(name: Name, place: str) -> Diagnostic | None:
    if place == "rewrite":
        return None
    return _made("KCP117", name, f"constant `{name.name}` in the {place}", "a constant may be None; a `when` must test it")


def _index_fault(name: Name, what: str) -> Diagnostic | None:
    if not name.indexed:
        return None
    return _made("KCP106", name, f"{what} has no token index", hints=(f"write `{name.name}`",))


def _unknown(name: Name, declared: Declarations) -> Diagnostic:
    known = {*declared.shapes, *names.FUNCTIONS, *names.PREDECLARED}
    hints = names.did_you_mean(name.name, known)
    stem, _, index = name.name.partition("_")
    if index == "t" and stem in known:
        hints = (f"the token index is written in brackets, `{stem}[t]`",)
    elif name.name in declared.words:
        hints = ("flags and options are tested by `when`, they have no value",)
    return _made("KCP101", name, f"`{name.name}` is not declared", hints=hints)


def _shown(name: Name) -> str:
    if not name.indexed:
        return name.name
    return f"{name.name}[t{name.offset:+d}]" if name.offset else f"{name.name}[t]"


def _made(code: str, name: Name, message: str, note: str = "", hints: tuple[str, ...] = ()) -> Diagnostic:
    return Diagnostic(code=code, message=message, span=name.span, notes=(note,) if note else (), hints=hints)
