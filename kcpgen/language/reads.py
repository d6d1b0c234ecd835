"""Names in expressions: declared, readable in this place, and read at a token that is known by then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from kcpgen.diagnostics import Faults
from kcpgen.language import names
from kcpgen.language.declarations import Declarations
from kcpgen.language.lookalikes import meant_name
from kcpgen.language.syntax import Expr, Name, Product, Span, operands

Place = Literal["update", "readout", "rewrite"]


def nodes(expr: Expr) -> Iterator[Expr]:
    """The expression and every expression below it, from left to right."""
    yield expr
    for operand in operands(expr):
        yield from nodes(operand)


def reads(expr: Expr) -> Iterator[Name]:
    """Every mention of a name, from left to right."""
    return (node for node in nodes(expr) if isinstance(node, Name))


def check_reads(expr: Expr, declared: Declarations, place: Place, faults: Faults) -> None:
    """Reports what cannot be read in this place; an undeclared name only where it is read first."""
    checker = _ReadChecker(declared, place, faults)
    called = _called(expr)
    unknown: set[str] = set()
    for name in reads(expr):
        if checker.knows(name):
            checker.check(name)
        elif name.name not in unknown:
            unknown.add(name.name)
            checker.report_unknown(name, called=_end(name.span) in called)


class _ReadChecker:
    def __init__(self, declared: Declarations, place: Place, faults: Faults) -> None:
        self.declared = declared
        self.place = place
        self.faults = faults
        self.state = declared.state.name.text if declared.state else ""
        self.inputs = dict.fromkeys(given.name for given in declared.inputs)  # in their order
        self.constants = dict.fromkeys(constant.name for constant in declared.constants)
        self.timeless = {
            "scale": "the scale",
            **{param.name: "a parameter" for param in declared.params},
            **dict.fromkeys(self.constants, "a constant"),
        }

    def knows(self, name: Name) -> bool:
        return name.name == self.state or name.name in self.inputs or name.name in self.timeless

    def check(self, name: Name) -> None:
        if name.name == self.state:
            self._check_state(name)
        elif name.name in self.inputs:
            self._check_input(name)
        else:
            self._check_timeless(name)

    def _check_state(self, name: Name) -> None:
        state, span = name.name, name.span
        if self.place == "rewrite":
            note = "a rewrite changes the input of a token before the recurrence sees it"
            self.faults.add("KCP114", "a rewrite cannot read the state", span, note=note)
        elif name.offset > 0:
            self.faults.add("KCP107", f"`{_shown(name)}` reads a future token", span, note="a recurrence is causal")
        elif self.place == "update" and not (name.indexed and name.offset == -1):
            message = f"the update reads the state at `[t-1]`, not `{_shown(name)}`"
            self.faults.add("KCP109", message, span, hint=f"write `{state}[t-1]`")
        elif self.place == "readout" and not (name.indexed and name.offset in (0, -1)):
            message = f"the readout reads the state at `[t]`, not `{_shown(name)}`"
            self.faults.add("KCP109", message, span, hint=f"write `{state}[t]`")

    def _check_input(self, name: Name) -> None:
        hint = f"write `{name.name}[t]`"
        if name.offset > 0:
            message = f"`{_shown(name)}` reads a future token"
            self.faults.add("KCP107", message, name.span, note="a recurrence is causal", hint=hint)
        elif name.offset < 0:
            message = f"`{_shown(name)}` reads an input of an earlier token"
            self.faults.add(
                "KCP108", message, name.span, note="only the state carries over from earlier tokens", hint=hint
            )

    def _check_timeless(self, name: Name) -> None:
        if name.indexed:
            message = f"{self.timeless[name.name]} has no token index"
            self.faults.add("KCP106", message, name.span, hint=f"write `{name.name}`")
        if name.name == "scale" and self.place != "readout":
            note = "the scale belongs to the readout, `o[t] = scale S[t]^T q[t]`"
            self.faults.add("KCP118", f"`scale` in the {self.place}", name.span, note=note)
        if name.name in self.constants and self.place != "rewrite":
            note = "a constant may be None; only a rewrite below a `when` that tests it can read it"
            self.faults.add("KCP117", f"constant `{name.name}` in the {self.place}", name.span, note=note)

    def report_unknown(self, name: Name, *, called: bool) -> None:
        functions = f"functions are {', '.join(f'`{function}`' for function in names.FUNCTIONS)}"
        known = names.FUNCTIONS if called else {self.state, *self.inputs, *self.timeless, *names.FUNCTIONS} - {""}
        message = f"`{name.name}` is not a function" if called else f"`{name.name}` is not declared"
        hint = self._hint(name, called) or meant_name(name.name, known) or names.did_you_mean(name.name, known)
        note = functions if called else names.foreign_letters(name.name)
        if not (hint or note):
            declared = (word for word in [self.state, *self.inputs, *self.timeless] if word not in ("", "scale"))
            note = f"declared are {', '.join(f'`{word}`' for word in declared)}"
        self.faults.add("KCP101", message, name.span, note=note, hint=hint)

    def _hint(self, name: Name, called: bool) -> str:
        stem, _, index = name.name.partition("_")
        if index == "t" and stem in {self.state, *self.inputs}:
            return f"the token index is written in brackets, `{stem}[t]`"
        if name.name == "t":
            return "the token index stands in brackets only, `k[t]`"
        if name.name in self.declared.words:
            return "flags and options are tested by `when`, they have no value"
        return ""


def _called(expr: Expr) -> set[tuple[int, int]]:
    """Where right factors begin; a name that ends exactly there is followed by a parenthesis."""
    products = (node for node in nodes(expr) if isinstance(node, Product))
    return {(product.right.span.line, product.right.span.column) for product in products}


def _end(span: Span) -> tuple[int, int]:
    return span.end_line, span.end_column


def _shown(name: Name) -> str:
    if not name.indexed:
        return name.name
    return f"{name.name}[t{name.offset:+d}]" if name.offset else f"{name.name}[t]"
