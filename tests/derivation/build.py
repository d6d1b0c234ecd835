"""Specs for the tests of the derivation, parsed from a few lines without the name and shape checks of the language."""

from __future__ import annotations

from pathlib import Path

from kcpgen.language import statements as st
from kcpgen.language.parser import parse_statements
from kcpgen.spec import Spec, TokenInput

HEADER = """op {name}
state S: [K, V]
"""


def spec_of(name: str, update: str, readout: str = "scale S[t]^T q", **axes: str) -> Spec:
    """A spec with inputs named in `axes`: axis "K", "V" or "" and, behind a colon, "decay" for a log decay."""
    text = HEADER.format(name=name) + f"S[t] = {update}\no[t] = {readout}\n"
    statements, _ = parse_statements(text, f"{name}.kcp")
    update_equation, readout_equation = (s for s in statements if isinstance(s, st.Equation))
    return Spec(
        name=name,
        title=name,
        path=f"{name}.kcp",
        text=text,
        inputs=tuple(_input(given, kind, update_equation) for given, kind in axes.items()),
        params=(),
        constants=(),
        flags=(),
        options=(),
        state="S",
        output="o",
        update=update_equation.value,
        readout=readout_equation.value,
    )


def _input(name: str, kind: str, near: st.Equation) -> TokenInput:
    axis, _, role = kind.partition(":")
    return TokenInput(
        name=name,
        heads="H" if axis == "K" else "HV",
        axis=axis,
        role="log_decay" if role else "data",
        bounds=None,
        span=near.span,
    )
