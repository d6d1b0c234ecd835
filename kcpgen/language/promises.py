"""Promised ranges of log decays: `in [-5, 0]` on an input, `in [lower_bound, 0]` on a rewrite."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from kcpgen.diagnostics import Diagnostic
from kcpgen.language import statements as st
from kcpgen.spec import Bounds

Report = Callable[[Diagnostic], None]


def input_bounds(statement: st.Token, report: Report) -> Bounds | None:
    """The promise of a `token` line; only a log decay carries one, and only with numbers."""
    promise = statement.promise
    if promise is None:
        return None
    if not statement.log_decay:
        note = "a promise chooses how a decay is computed; other inputs have no use for one"
        hints = ("declare the input a `log decay`, or drop the range",)
        _fault(report, "only a log decay has a promised range", promise, notes=(note,), hints=hints)
        return None
    return bounds(promise, frozenset(), report)


def bounds(promise: st.Promise, constants: frozenset[str], report: Report) -> Bounds | None:
    """The range of a promise; its lower bound may be one of `constants`, those sure to be given at run time."""
    if isinstance(promise.high, st.Word) or (isinstance(promise.low, st.Word) and promise.low.text not in constants):
        note = "the upper bound is a number, the lower one a number or the constant that its `when` tests"
        _fault(report, "a bound that is not known here", promise, notes=(note,))
        return None
    low = Fraction(0) if isinstance(promise.low, st.Word) else promise.low
    if promise.high > 0:
        note = "a log decay is at most 0: exp of it never grows the state"
        _fault(report, "the promised range contains growth", promise, notes=(note,), hints=("write `0` as the upper bound",))
        return None
    if low > promise.high:
        _fault(report, "the promised range is empty", promise, hints=("the lower bound comes first",))
        return None
    if isinstance(promise.low, st.Word):
        return Bounds(low=-math.inf, high=float(promise.high), low_constant=promise.low.text)
    return Bounds(low=float(low), high=float(promise.high))


def _fault(report: Report, message: str, promise: st.Promise, notes: tuple[str, ...] = (), hints: tuple[str, ...] = ()) -> None:
    report(Diagnostic(code="KCP123", message=message, span=promise.span, notes=notes, hints=hints))
