"""Every spelling of one recurrence makes the same spec."""

from __future__ import annotations

import pytest

from kcpgen.language import format_spec, parse
from kcpgen.language.format import format_expr, without_spans
from kcpgen.language.parser import parse_statements
from kcpgen.language.statements import Equation
from kcpgen.spec import Bounds, Spec

PLAIN = """op ours "Ours"
token q, k : [H, K]
token v : [HV, V]
token g : [HV, K] log decay in [-5, 0]
token beta : [HV]
token w : [HV, V]
state S : [HV, K, V]
S[t] = (I - beta[t] k[t] k[t]^T) Diag(exp(g[t])) S[t-1] + beta[t] k[t] (w[t] .* v[t])^T
o[t] = scale S[t]^T q[t]
option keys:
  k <- l2norm(k)
"""


def spec(*changes: tuple[str, str]) -> Spec:
    text = PLAIN
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return without_spans(parse(text, "ours.kcp"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("beta", "β"),
        ("^T", "ᵀ"),
        ("^T", "^⊤"),
        ("^T", "^{T}"),
        (".*", "⊙"),
        (".*", "∘"),
        ("<-", "←"),
        (" in [", " ∈ ["),
        ("I - ", "I − "),
        ("[-5", "[−5"),
        ("[t-1]", "[t−1]"),
        ("S[t]^T ", "S[t]^T*"),
        ("S[t]^T ", "S[t]^T · "),
        ("k[t]", "k"),
        ("S[t-1]", "S[ t - 1 ]"),
        ("k[t] k[t]^T", "k[t]k[t]^T"),
        ("-5", "-5.0"),
        ("-5", "-50e-1"),
        (" + beta", "\n    + beta"),
        (" + beta", " +\n\n  # what is written\n  beta"),
        ("(I - beta[t]", "(I -\nbeta[t]"),
        (") Diag", "\n) Diag"),
        ("option keys:\n  k", "option keys: k"),
        ("token q, k : [H, K]", "token q : [H, K]\ntoken k : [H, K]"),
        ("\n", "\r\n"),
        ("\n", '  # comment with "quotes", \\ and β\n'),
        ("op ours", "\ufeff\n\n\top ours"),
    ],
)
def test_one_meaning(old: str, new: str) -> None:
    assert spec((old, new)) == spec()


def test_order_of_declarations_is_free() -> None:
    first, second, *rest = PLAIN.splitlines()
    equations = [line for line in rest if "[t] =" in line]
    others = [line for line in rest if "[t] =" not in line]
    text = "\n".join([*equations, *others[:-2], second, first, *others[-2:]])
    assert {i.name for i in parse(text, "ours.kcp").inputs} == {i.name for i in spec().inputs}
    assert without_spans(parse(text, "ours.kcp")).update == spec().update


def test_promise_is_kept() -> None:
    (decay,) = (given for given in spec().inputs if given.role == "log_decay")
    assert decay.bounds == Bounds(low=-5.0, high=0.0)


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("2 k * 3", "2 k * 3"),
        ("k .* g v^T", "k .* (g v^T)"),  # juxtaposition binds tighter
        ("b k .* v .* w", "(b k) .* v .* w"),
        ("-k - -q", "-k - (-q)"),
        ("(k^T q) k", "k^T q k"),
        ("k (q^T k)", "k (q^T k)"),
        ("k / (2 g)", "k / (2 g)"),
        ("0.0000001 k", "0.0000001 k"),
        ("1e-20 k", "1e-20 k"),
        ("1000000000 k", "1e9 k"),
        ("0.50 k", "0.5 k"),
    ],
)
def test_printing(source: str, printed: str) -> None:
    (statement,) = parse_statements(f"x[t] = {source}", "x.kcp")
    assert isinstance(statement, Equation)
    assert format_expr(statement.value) == printed


def test_format_is_a_fixed_point() -> None:
    once = format_spec(parse(PLAIN, "ours.kcp"))
    assert format_spec(parse(once, "ours.kcp")) == once


@pytest.mark.parametrize("name", ["E", "N", "beta_1", "Q", "alpha", "C", "S0", "oo", "zoo", "re", "im"])
def test_ordinary_names(name: str) -> None:
    """Names that computer algebra gives a meaning of its own are nothing special here."""
    assert name in [given.name for given in spec(("beta", name)).inputs]
