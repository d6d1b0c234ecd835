"""The normal forms of shipped and made-up specs, and the verdict on updates that have none."""

from __future__ import annotations

import pytest
from made_specs import THREE_TERMS, TWO_FACTORS, shipped, spec_of

from kcpgen.derivation.normal_form import NormalForm, derive_normal_form
from kcpgen.diagnostics import SpecError

# decay, then per term: write, value, erase, "decayed" when the erase reads the decayed state
EXPECTED = {
    "simple_gla": ("g", [("k", "v", "0", "")]),
    "gla": ("g", [("k", "v", "0", "")]),
    "delta_rule": ("-", [("k", "beta*v", "-beta*k", "")]),
    "gdn": ("g", [("k", "beta*v", "-beta*k", "decayed")]),
    "kda": ("g", [("k", "beta*v", "-beta*k", "decayed")]),
    "gdn2": ("g", [("k", "v*w", "-b*k", "decayed")]),
    "comba": ("g", [("k", "beta*v", "-beta*p", "")]),
    "dplr": ("gk", [("k", "v", "0", ""), ("b", "0", "a", "")]),
}


def summary(nf: NormalForm) -> tuple[str, list[tuple[str, str, str, str]]]:
    terms = [(str(t.write), str(t.value), str(t.erase), "decayed" if t.erase_reads_decayed else "") for t in nf.terms]
    return ("-" if nf.decay is None else str(nf.decay.log)), terms


@pytest.mark.parametrize("name", EXPECTED)
def test_shipped_specs(name: str) -> None:
    nf = derive_normal_form(shipped(name))
    assert summary(nf) == EXPECTED[name]
    assert str(nf.read) == "q*scale"


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("(I + b a^T) S[t-1] + k v^T", ("-", [("k", "v", "0", ""), ("b", "0", "a", "")])),
        ("S[t-1] - beta k (S[t-1]^T k)^T + beta k v^T", ("-", [("k", "beta*v", "-beta*k", "")])),
        ("S[t-1] + beta k (v^T - k^T S[t-1])", ("-", [("k", "beta*v", "-beta*k", "")])),
        ("S[t-1] + (-2 beta k) v^T", ("-", [("k", "-2*beta*v", "0", "")])),
        ("exp(h) exp(h) S[t-1] + k v^T", ("2*h", [("k", "v", "0", "")])),
        ("exp(h) Diag(exp(g)) S[t-1] + k v^T", ("g + h", [("k", "v", "0", "")])),
        ("exp(h) (S[t-1] - k (S[t-1]^T k)^T) + k v^T", ("h", [("k", "v", "-k", "decayed")])),
        ("exp(h) S[t-1] - exp(2 h) k k^T S[t-1] + k v^T", ("h", [("k", "v", "-k*exp(2*h)", "")])),
        ("exp(h) S[t-1] - (1 + exp(h)) k k^T S[t-1] + k v^T", ("h", [("k", "v", "k*(-exp(h) - 1)", "")])),
        ("(I - Diag(b) k (Diag(p) k)^T) S[t-1] + (b ⊙ k) v^T", ("-", [("b*k", "v", "-k*p", "")])),
        ("S[t-1] + (k^T p) k v^T", ("-", [("k", "v*RowSum(k*p, K)", "0", "")])),
        ("S[t-1] + k v^T + p (v / 2)^T + 3 k w^T", ("-", [("k", "v + 3*w", "0", ""), ("p", "v/2", "0", "")])),
    ],
)
def test_written_in_other_ways(update: str, expected: tuple[str, list[tuple[str, str, str, str]]]) -> None:
    assert summary(derive_normal_form(spec_of(update))) == expected


def test_terms_that_write_come_first() -> None:
    decay, terms = summary(derive_normal_form(spec_of(THREE_TERMS)))
    assert decay == "g"
    assert terms == [("k", "v", "0", ""), ("b", "w", "-a", ""), ("p", "0", "c", "")]


def test_two_factors_read_each_other() -> None:
    _, terms = summary(derive_normal_form(spec_of(TWO_FACTORS)))
    assert terms == [
        ("k", "beta*v", "b*beta*RowSum(b*f*k, K) - beta*k", "decayed"),
        ("b", "0", "-b*f", "decayed"),
    ]


def test_cancelled_terms_vanish() -> None:
    _, terms = summary(derive_normal_form(spec_of("S[t-1] + k v^T + p (S[t-1]^T k)^T - p (S[t-1]^T k)^T + p v^T")))
    assert terms == [("k", "v", "0", ""), ("p", "v", "0", "")]


def test_a_gate_that_was_not_declared_a_log_decay_is_named() -> None:
    with pytest.raises(SpecError, match="add `log decay` to the declaration of `f` on line"):
        derive_normal_form(spec_of("exp(f) (I - k k^T) S[t-1] + k v^T"))


def faults(update: str, readout: str = "scale S[t]^T q") -> list[tuple[str, str]]:
    """(code, underlined text) of every diagnostic."""
    spec = spec_of(update, readout)
    with pytest.raises(SpecError) as caught:
        derive_normal_form(spec)
    lines = spec.text.split("\n")
    spans = [(d.code, d.span) for d in caught.value.diagnostics]
    assert all(d.label and d.hints for d in caught.value.diagnostics)
    assert str(caught.value).count("^") > 0
    return [(code, lines[span.line - 1][span.column - 1 : span.end_column - 1]) for code, span in spans]


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("S[t-1] + k (S[t-1]^T S[t-1] v)^T", ("KCP201", "S[t-1]^T S[t-1]")),
        ("S[t-1] + k exp(S[t-1]^T k + v)^T", ("KCP201", "exp(S[t-1]^T k + v)")),
        ("S[t-1] + k ((S[t-1]^T k) ⊙ (S[t-1]^T p) + v)^T", ("KCP201", "(S[t-1]^T k) ⊙ (S[t-1]^T p)")),
        ("S[t-1] / sum(S[t-1]^T k) + k v^T", ("KCP201", "S[t-1] / sum(S[t-1]^T k)")),
        ("S[t-1] v v^T + k v^T", ("KCP202", "S[t-1] v")),
        ("S[t-1] Diag(w) + k v^T", ("KCP202", "S[t-1] Diag(w)")),
        ("S[t-1] + k (w ⊙ (S[t-1]^T k))^T", ("KCP202", "(w ⊙ (S[t-1]^T k))")),
        ("(1 - f) S[t-1] + k v^T", ("KCP203", "(1 - f)")),
        ("Diag(b) S[t-1] + k v^T", ("KCP203", "b")),
        ("(I - Diag(b)) S[t-1] + k v^T", ("KCP203", "(I - Diag(b))")),
        ("2 S[t-1] + k v^T", ("KCP203", "2")),
        ("exp(f) S[t-1] + k v^T", ("KCP203", "f")),
        ("exp(-h) S[t-1] + k v^T", ("KCP203", "-h")),
        ("exp(f + h) S[t-1] + k v^T", ("KCP203", "f")),
        ("exp(f) (I - k k^T) S[t-1] + k v^T", ("KCP203", "f")),
        ("f S[t-1] + S[t-1] + k v^T", ("KCP203", "f S[t-1] + S[t-1]")),
        ("k (S[t-1]^T k)^T + k v^T", ("KCP204", "k (S[t-1]^T k)^T + k v^T")),
        ("exp(h) S[t-1] + k v^T - k v^T", ("KCP205", "exp(h) S[t-1] + k v^T - k v^T")),
        ("S[t-1] + k (v / v)^T", ("KCP209", "v")),
        ("S[t-1] + k ((v / v) sum(v))^T", ("KCP209", "S[t-1] + k ((v / v) sum(v))^T")),
        ("exp(h) exp(-h) S[t-1] + k v^T", ("KCP209", "h")),
        ("S[t-1] ⊙ (k v^T) + k v^T", ("KCP208", "S[t-1] ⊙ (k v^T)")),
    ],
)
def test_rejected_updates(update: str, expected: tuple[str, str]) -> None:
    assert faults(update) == [expected]


@pytest.mark.parametrize(
    ("readout", "expected"),
    [
        ("scale S[t]^T q + v", ("KCP206", "scale S[t]^T q + v")),
        ("scale (v ⊙ (S[t]^T q))", ("KCP206", "(v ⊙ (S[t]^T q))")),
        ("scale exp(S[t]^T q)", ("KCP201", "exp(S[t]^T q)")),
        ("scale v (v^T (S[t]^T q))", ("KCP206", "(v^T (S[t]^T q))")),
    ],
)
def test_rejected_readouts(readout: str, expected: tuple[str, str]) -> None:
    assert faults("S[t-1] + k v^T", readout) == [expected]


def test_every_cancelled_input_is_named() -> None:
    assert faults("S[t-1] + k v^T + b w^T - b w^T") == [("KCP209", "b"), ("KCP209", "w")]


def test_update_and_readout_are_reported_together() -> None:
    assert faults("(1 - f) S[t-1] + k v^T", "scale exp(S[t]^T q)") == [
        ("KCP203", "(1 - f)"),
        ("KCP201", "exp(S[t]^T q)"),
    ]


def test_readout_may_combine_reads() -> None:
    nf = derive_normal_form(spec_of("S[t-1] + k v^T", "scale S[t]^T q + f S[t]^T (b ⊙ p)"))
    assert str(nf.read) == "b*f*p + q*scale"


@pytest.mark.parametrize("readout", ["scale S[t-1]^T q", "scale (S[t-1] + Diag(b) k v^T)^T q"])
def test_a_readout_of_the_old_state_is_named_as_unsupported(readout: str) -> None:
    assert faults("S[t-1] + k v^T", readout) == [("KCP207", "S[t-1]")]
    with pytest.raises(SpecError, match="not supported yet"):
        derive_normal_form(spec_of("S[t-1] + k v^T", readout))


def test_a_readout_of_the_old_state_hides_no_fault_of_the_update() -> None:
    found = faults("(1 - f) S[t-1] + k v^T", "scale S[t-1]^T q")
    assert found == [("KCP203", "(1 - f)"), ("KCP207", "S[t-1]")]
