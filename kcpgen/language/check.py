"""Statements -> a checked Spec: every name declared, every shape fits, nothing reads the future."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kcpgen.diagnostics import Diagnostic, SpecError
from kcpgen.language import statements as st
from kcpgen.language.declarations import Declarations, Report, check_name, declarations
from kcpgen.language.lexer import Lexed
from kcpgen.language.options import options
from kcpgen.language.reads import check_reads, reads
from kcpgen.language.shapes import ShapeChecker, shown
from kcpgen.language.syntax import Expr, Shape
from kcpgen.spec import Option, Spec


def check(statements: Sequence[st.Statement], lexed: Lexed, text: str, path: str) -> Spec:
    """Raises SpecError with every fault of names, shapes and time."""
    faults: list[Diagnostic] = []
    declared = declarations(statements, lexed.end, faults.append)
    update, readout = _equations(statements, declared, lexed, faults.append)
    checked_options = options(statements, declared, faults.append)
    if not faults and update and readout:
        faults.extend(_unused(declared, update.value, readout.value, checked_options, lexed))
    if faults or not (declared.op and declared.state and update and readout):
        raise SpecError(faults, text)
    return Spec(
        name=declared.op.name.text,
        title=declared.op.title,
        path=path,
        text=text,
        inputs=declared.inputs,
        params=declared.params,
        constants=declared.constants,
        flags=declared.flags,
        options=checked_options,
        state=declared.state.name.text,
        output=readout.target.text,
        update=update.value,
        readout=readout.value,
    )


def shape_of(expr: Expr, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of a checked expression, names looked up in `shapes`. Raises SpecError where shapes do not fit."""
    faults: list[Diagnostic] = []
    shape = ShapeChecker(shapes, faults.append).shape(expr)
    if shape is None or faults:
        unknown = [name for name in reads(expr) if name.name not in shapes]
        faults += [Diagnostic(code="KCP101", message=f"`{n.name}` is not declared", span=n.span) for n in unknown]
        raise SpecError(faults)
    return shape


def _equations(
    statements: Sequence[st.Statement], declared: Declarations, lexed: Lexed, report: Report
) -> tuple[st.Equation | None, st.Equation | None]:
    found = [s for s in statements if isinstance(s, st.Equation)]
    state = declared.state.name.text if declared.state else ""
    updates = [equation for equation in found if equation.target.text == state]
    readouts = [equation for equation in found if equation.target.text != state]
    for what, equations, example in (
        ("update", updates, f"{state or 'S'}[t] = exp(g[t]) {state or 'S'}[t-1] + k[t] v[t]^T"),
        ("readout", readouts, f"o[t] = scale {state or 'S'}[t]^T q[t]"),
    ):
        _check_count(what, equations, example, lexed, report)
    if declared.state:
        for update in updates:
            _check_equation(update, declared, "update", ("K", "V"), report)
        for readout in readouts:
            _check_target(readout.target, declared, report)
            _check_equation(readout, declared, "readout", ("V", "1"), report)
    return (updates[0] if updates else None), (readouts[0] if readouts else None)


def _check_count(what: str, found: list[st.Equation], example: str, lexed: Lexed, report: Report) -> None:
    if not found:
        hints = (f"add an equation such as `{example}`",)
        report(Diagnostic(code="KCP110", message=f"no {what}", span=lexed.end, hints=hints))
    for extra in found[1:]:
        notes = (f"the first one is on line {found[0].span.line}",)
        report(Diagnostic(code="KCP111", message=f"a spec has one {what}", span=extra.target.span, notes=notes))


def _check_target(target: st.Word, declared: Declarations, report: Report) -> None:
    check_name(target, report)
    if target.text in declared.words:
        line = declared.words[target.text].span.line
        notes = (f"declared at line {line}; the readout names something new",)
        report(Diagnostic(code="KCP102", message=f"`{target.text}` has a value already", span=target.span, notes=notes))


def _check_equation(equation: st.Equation, declared: Declarations, place: str, expected: Shape, report: Report) -> None:
    check_reads(equation.value, declared, place, report)
    shape = ShapeChecker(declared.shapes, report).shape(equation.value)
    if shape is None or shape == expected:
        return
    target = equation.target.text
    hints = (f"transpose it: {shown((shape[1], shape[0]))} would fit",) if shape[::-1] == expected else ()
    message = f"`{target}[t]` is {shown(expected)}, the {place} {shown(shape)}"
    report(Diagnostic(code="KCP121", message=message, span=equation.value.span, hints=hints))


def _unused(
    declared: Declarations, update: Expr, readout: Expr, checked: tuple[Option, ...], lexed: Lexed
) -> Iterator[Diagnostic]:
    """What is declared for nothing: a keyword of the generated op that does nothing is a trap for its user."""
    recurrence = {name.name for expr in (update, readout) for name in reads(expr)}
    variants = [variant for option in checked for variant in option.variants]
    rewritten = {name.name for variant in variants for rewrite in variant.rewrites for name in reads(rewrite.value)}
    tested = {variant.when for variant in variants}
    for declared_input in declared.inputs:
        if declared_input.name not in recurrence:
            yield _for_nothing(declared.words[declared_input.name], "read by neither the update nor the readout")
    for param in declared.params:
        if param.name not in recurrence | rewritten:
            yield _for_nothing(declared.words[param.name], "read nowhere")
    for name in (*(constant.name for constant in declared.constants), *declared.flags):
        if name not in tested:
            yield _for_nothing(declared.words[name], "tested by no `when`")
    yield from _missing_reads(declared, update, readout, lexed)


def _for_nothing(word: st.Word, why: str) -> Diagnostic:
    return Diagnostic(code="KCP119", message=f"`{word.text}` is declared but {why}", span=word.span)


def _missing_reads(declared: Declarations, update: Expr, readout: Expr, lexed: Lexed) -> Iterator[Diagnostic]:
    state = declared.state.name.text if declared.state else ""
    read = {name.name for name in reads(readout)}
    if "scale" not in read:
        hints = (f"write `scale {state}[t]^T q[t]`",)
        yield Diagnostic(code="KCP118", message="the readout does not use `scale`", span=readout.span, hints=hints)
    if state not in read:
        yield Diagnostic(code="KCP109", message="the readout does not read the state", span=readout.span)
    if state not in {name.name for name in reads(update)}:
        message = f"the update does not read `{state}[t-1]`"
        yield Diagnostic(code="KCP109", message=message, span=update.span, notes=("without it nothing is carried over",))
    for dimension, known in (
        ("HV", {i.heads for i in declared.inputs}),
        ("K", {i.axis for i in declared.inputs}),
        ("V", {i.axis for i in declared.inputs}),
    ):
        if dimension not in known:
            note = "generated code reads every dimension off a token input"
            message = f"no token input has the dimension `{dimension}`"
            yield Diagnostic(code="KCP122", message=message, span=lexed.end, notes=(note,))
