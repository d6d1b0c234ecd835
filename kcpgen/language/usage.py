"""What is declared for nothing, and what a recurrence cannot do without.

A keyword of the generated op that changes nothing is a trap for its user, so these are errors.
"""

from __future__ import annotations

from collections.abc import Iterable

from kcpgen.diagnostics import Faults
from kcpgen.language.declarations import Declarations
from kcpgen.language.reads import reads
from kcpgen.language.syntax import Expr, Span
from kcpgen.spec import Option


def check_usage(
    declared: Declarations, update: Expr, readout: Expr, options: Iterable[Option], end: Span, faults: Faults
) -> None:
    _check_recurrence(declared, update, readout, faults)
    _check_dimensions(declared, end, faults)
    recurrence = _names(update) | _names(readout)
    variants = [variant for option in options for variant in option.variants]
    rewrites = set().union(*(_names(rewrite.value) for variant in variants for rewrite in variant.rewrites))
    for given in declared.inputs:
        _check(given.name, recurrence, "read by neither the update nor the readout", declared, faults)
    for param in declared.params:
        _check(param.name, recurrence | rewrites, "read nowhere", declared, faults)
    for name in (*(constant.name for constant in declared.constants), *declared.flags):
        _check(name, {variant.when for variant in variants}, "tested by no `when`", declared, faults)


def _check(name: str, used: set[str], why: str, declared: Declarations, faults: Faults) -> None:
    if name not in used:
        faults.add("KCP119", f"`{name}` is declared but {why}", declared.words[name].span)


def _check_recurrence(declared: Declarations, update: Expr, readout: Expr, faults: Faults) -> None:
    state = declared.state.name.text if declared.state else ""
    if state not in _names(update):
        note = "without it nothing is carried over from one token to the next"
        faults.add("KCP109", f"the update does not read `{state}[t-1]`", update.span, note=note)
    if state not in _names(readout):
        faults.add(
            "KCP109", "the readout does not read the state", readout.span, hint=f"write `scale {state}[t]^T q[t]`"
        )
    elif "scale" not in _names(readout):
        note = "every op has the keyword `scale`, 1 / sqrt(K) by default"
        hint = f"write `scale {state}[t]^T q[t]`"
        faults.add("KCP118", "the readout does not use `scale`", readout.span, note=note, hint=hint)


def _check_dimensions(declared: Declarations, end: Span, faults: Faults) -> None:
    known = {given.heads for given in declared.inputs} | {given.axis for given in declared.inputs}
    for dimension in ("HV", "K", "V"):
        if dimension not in known:
            note = "generated code reads every dimension off a token input"
            faults.add("KCP122", f"no token input has the dimension `{dimension}`", end, note=note)


def _names(expr: Expr) -> set[str]:
    return {name.name for name in reads(expr)}
