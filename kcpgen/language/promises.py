"""Promised ranges of log decays: `in [-5, 0]` on an input, `in [lower_bound, 0]` on a rewrite."""

from __future__ import annotations

import math
from fractions import Fraction

from kcpgen.diagnostics import Faults
from kcpgen.language import statements as st
from kcpgen.language.format import format_number
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
        hint = _hint(promise, given) if role == "log_decay" else ""
        faults.add("KCP123", fault, promise.span, note=note, hint=hint)
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
    if isinstance(high, st.Word):
        return f"the upper bound is `{high.text}`, not a number", ""
    if isinstance(low, st.Word) and low.text != given:
        note = "it is a number, or the constant that the `when` above tests"
        return f"the lower bound `{low.text}` is not known here", note
    if high > 0:
        note = "a log decay is at most 0, so that exp of it never grows the state"
        return f"the upper bound, {_shown(high)}, is above 0", note
    if isinstance(low, Fraction) and low > high:
        note = "the lower bound comes first"
        return f"the promised range is empty: the lower bound, {_shown(low)}, is above the upper one", note
    return "", ""


def _hint(promise: st.Promise, given: str) -> str:
    """A range that may be promised, near the one that was."""
    low, high = promise.low, promise.high
    least = Fraction(-5) if isinstance(low, st.Word) else min(low, Fraction(0))
    most = Fraction(0) if isinstance(high, st.Word) else min(high, Fraction(0))
    least, most = sorted((least, most)) if least != most else (Fraction(-5), Fraction(0))
    lowest = given if given and isinstance(low, st.Word) else _shown(least)
    return f"write `in [{lowest}, {_shown(most)}]`"


def _shown(bound: Fraction) -> str:
    return "-" * (bound < 0) + format_number(abs(bound))
