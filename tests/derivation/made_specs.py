"""Specs for the tests of the derivation: the ones that ship, and small ones from two equations."""

from __future__ import annotations

import re
from pathlib import Path

from kcpgen.language import load, parse
from kcpgen.spec import Spec

SPECS = Path(__file__).parents[2] / "specs"
SHIPPED = tuple(sorted(path.stem for path in SPECS.glob("*.kcp")))

DECLARATIONS = {
    **{name: f"token {name} : [H, K]" for name in ("q", "k", "a", "b", "c", "p")},
    **{name: f"token {name} : [HV, V]" for name in ("v", "w")},
    **{name: f"token {name} : [HV]" for name in ("beta", "f")},
    "g": "token g : [HV, K] log decay",
    "h": "token h : [HV] log decay",
}

# Two erases, three terms; one term writes and erases, one only writes, one only erases.
THREE_TERMS = "Diag(exp(g)) S[t-1] + k v^T + b (w - S[t-1]^T a)^T + p (S[t-1]^T c)^T"
# Two Householder-like factors: erases that read what the other one wrote within the token.
TWO_FACTORS = "(I - beta k k^T) (I - f b b^T) Diag(exp(g)) S[t-1] + beta k v^T"
# Both gates at once, an erase of the state before its decay and one after.
TWO_GATES = "(exp(h) Diag(exp(g)) - b a^T) S[t-1] + beta k (v - (exp(h) Diag(exp(g)) S[t-1])^T p)^T"


def shipped(name: str) -> Spec:
    return load(SPECS / f"{name}.kcp")


def spec_of(update: str, readout: str = "scale S[t]^T q") -> Spec:
    """A spec that declares exactly the names its two equations use."""
    return parse(text_of(update, readout), "test.kcp")


def text_of(update: str, readout: str = "scale S[t]^T q") -> str:
    used = set(re.findall(r"[A-Za-z]+", f"{update} {readout}"))
    declared = [line for name, line in DECLARATIONS.items() if name in used]
    return "\n".join(["op test", *declared, "state S : [HV, K, V]", f"S[t] = {update}", f"o[t] = {readout}", ""])


def examples() -> dict[str, Spec]:
    """Every spec the numeric and symbolic checks run over, by name."""
    made = {"three_terms": THREE_TERMS, "two_factors": TWO_FACTORS, "two_gates": TWO_GATES}
    return {**{name: shipped(name) for name in SHIPPED}, **{name: spec_of(update) for name, update in made.items()}}
