"""Promised ranges of log decays: `in [-5, 0]` on an input, `in [lower_bound, 0]` on a rewrite."""

from __future__ import annotations

import math
from fractions import Fraction

from kcpgen.diagnostics import Faults
from kcpgen.language import statements as st
from kcpgen.spec import Bounds


def input_bounds(statement: st.Token, faults: Faults) -> Bounds | None:
    """The promise of a `token` line; a constant cannot bound an input, it may not be given."""
    if statement.promise is None:
        return None
    return bounds(statement.promise, "log_decay" if statement.log_decay else "data", "", faults)


def bounds(promise: st.Promise, role: str, given: str, faults: Faults) -> Bounds | None:
    """The range of a promise. Its lower bound may be the constant `given`, known to be passed ("" for none)."""
    fault, note = _fault(promise, role, given)
    if fault:
        faults.add("KCP123", fault, promise.span, note=note)
        return None
    assert not isinstance(promise.high, st.Word)
    high = float(promise.high)
    if isinstance(promise.low, st.Word):
        return Bounds(low=-math.inf, high=high, low_constant=given)
    return Bounds(low=float(promise.low), high=high)


def _fault(promise: st.Promise, role: str, given: str) -> tuple[str, str]:
    low, high = promise.low, promise.high
    if role != "log_decay":
        note = "a promise decides how a decay is computed; other inputs have no use for one"
        return "only a `log decay` has a promised range", note
    if isinstance(high, st.Word) or (isinstance(low, st.Word) and low.text != given):
        note = "the upper bound is a number, the lower one a number or the constant that the `when` above tests"
        return "this bound is not known here", note
    if high > 0:
        return "the promised range contains growth", "a log decay is at most 0, so that exp of it never grows the state"
    if isinstance(low, Fraction) and low > high:
        return "the promised range is empty", "the lower bound comes first"
    return "", ""
