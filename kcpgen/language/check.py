"""Statements -> a checked Spec: every name declared, every shape fits, nothing reads the future."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kcpgen.diagnostics import Faults, SpecError
from kcpgen.language import statements as st
from kcpgen.language.declarations import Declarations, check_name, declarations
from kcpgen.language.options import options
from kcpgen.language.reads import Place, check_reads, reads
from kcpgen.language.shapes import ShapeChecker, shown
from kcpgen.language.syntax import Expr, Shape, Span
from kcpgen.language.usage import check_usage
from kcpgen.spec import Spec

__all__ = ["check", "shape_of"]


def check(statements: Sequence[st.Statement], end: Span, text: str, path: str) -> Spec:
    """The spec that the statements of a file make. Raises SpecError with every fault of names, shapes and time.

    What is missing is reported at `end`; what is declared for nothing only once everything else is right.
    """
    faults = Faults()
    declared = declarations(statements, end, faults)
    equations = _equations(statements, declared, end, faults)
    made = options(statements, declared, faults)
    if not faults.found and equations is not None:
        check_usage(declared, equations[0].value, equations[1].value, made, end, faults)
    if faults.found or declared.op is None or declared.state is None or equations is None:
        raise SpecError(faults.found, text)
    update, readout = equations
    return Spec(
        name=declared.op.name.text,
        title=declared.op.title or declared.op.name.text,
        path=path,
        text=text,
        inputs=declared.inputs,
        params=declared.params,
        constants=declared.constants,
        flags=declared.flags,
        options=made,
        state=declared.state.name.text,
        output=readout.target.text,
        update=update.value,
        readout=readout.value,
    )


def shape_of(expr: Expr, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of an expression whose names have `shapes`. Raises SpecError where shapes do not fit."""
    faults = Faults()
    shape = ShapeChecker(shapes, faults).shape(expr)
    for name in reads(expr):
        if name.name not in shapes:
            faults.add("KCP101", f"`{name.name}` is not declared", name.span)
    if shape is None or faults.found:
        raise SpecError(faults.found)
    return shape


def _equations(
    statements: Sequence[st.Statement], declared: Declarations, end: Span, faults: Faults
) -> tuple[st.Equation, st.Equation] | None:
    """Update and readout, each checked; None when one is missing."""
    if declared.state is None:
        return None
    state = declared.state.name.text
    found = [statement for statement in statements if isinstance(statement, st.Equation)]
    updates = [equation for equation in found if equation.target.text == state]
    readouts = [equation for equation in found if equation.target.text != state]
    _check_count("update", updates, f"{state}[t] = exp(g[t]) {state}[t-1] + k[t] v[t]^T", end, faults)
    _check_count("readout", readouts, f"o[t] = scale {state}[t]^T q[t]", end, faults)
    for update in updates:
        _check_equation(update, declared, "update", ("K", "V"), faults)
    for readout in readouts:
        _check_output(readout.target, declared, faults)
        _check_equation(readout, declared, "readout", ("V", "1"), faults)
    return (updates[0], readouts[0]) if updates and readouts else None


def _check_count(what: str, found: list[st.Equation], example: str, end: Span, faults: Faults) -> None:
    if not found:
        faults.add("KCP110", f"no {what}", end, hint=f"add an equation such as `{example}`")
    for extra in found[1:]:
        note = f"the first one is on line {found[0].span.line}"
        faults.add("KCP111", f"a spec has one {what}", extra.target.span, note=note)


def _check_output(target: st.Word, declared: Declarations, faults: Faults) -> None:
    check_name(target, faults)
    if target.text in declared.words:
        note = f"it is declared on line {declared.words[target.text].span.line}; the readout names something new"
        faults.add("KCP102", f"`{target.text}` has a value already", target.span, note=note)


def _check_equation(
    equation: st.Equation, declared: Declarations, place: Place, expected: Shape, faults: Faults
) -> None:
    check_reads(equation.value, declared, place, faults)
    shape = ShapeChecker(declared.shapes, faults).shape(equation.value)
    if shape is None or shape == expected:
        return
    hint = "transpose it" if shape[::-1] == expected else ""
    message = f"`{equation.target.text}[t]` is {shown(expected)}, the {place} is {shown(shape)}"
    faults.add("KCP121", message, equation.value.span, hint=hint)
