"""Updates made up at random, with any number of writes, erases and factors: each one's chunk is proved equal to it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from made_specs import spec_of

from kcpgen.derivation import derive_chunk_form, derive_normal_form
from kcpgen.derivation.chunk_form import ChunkForm
from kcpgen.derivation.proof import prove
from kcpgen.diagnostics import SpecError

key = st.sampled_from(["k", "p", "a", "(b ⊙ k)", "(k + a)", "(Diag(b) p)", "beta k", "(k / (2 + f))"])
value = st.sampled_from(["v", "w", "(w ⊙ v)", "(v - beta w)", "(-v)", "sigmoid(v)"])
decayed = st.sampled_from(["S[t-1]", "exp(h) S[t-1]", "Diag(exp(g)) S[t-1]", "exp(h) Diag(exp(g)) S[t-1]"])
scalar = st.sampled_from(["", "beta ", "(k^T p) ", "2 ", "(1 - beta) ", "sum(v) "])


def spellings(x: str, y: str, v: str, state: str) -> list[str]:
    return [f"{x} (({state})^T {y})^T", f"{x} ({v} - ({state})^T {y})^T", f"{x} ({y}^T ({state}))"]


@st.composite
def updates(draw: st.DrawFn) -> str:
    """(product of I +- x y^T) decayed S + writes + erases of the decayed or undecayed state."""
    kept = draw(decayed)
    factors = draw(st.lists(st.tuples(st.sampled_from("+-"), scalar, key, key), max_size=2))
    transition = "".join(f"(I {sign} {c}{x} {y}^T) " for sign, c, x, y in factors)
    writes = [f"{draw(scalar)}{draw(key)} {draw(value)}^T" for _ in range(draw(st.integers(1, 2)))]
    erased = draw(st.lists(st.tuples(key, key, value, st.just(kept) | decayed), max_size=2))
    erases = [draw(st.sampled_from(spellings(x, y, v, state))) for x, y, v, state in erased]
    return f"{transition}({kept}) + " + " + ".join(draw(st.permutations([*writes, *erases])))


def form_of(update: str) -> ChunkForm | None:
    """None where terms happen to cancel; nothing else may be wrong with a made-up update."""
    try:
        return derive_chunk_form(derive_normal_form(spec_of(update)))
    except SpecError as error:
        if {diagnostic.code for diagnostic in error.diagnostics} != {"KCP209"}:
            raise
        return None


@settings(max_examples=40, deadline=None, derandomize=True)
@given(updates())
def test_the_chunk_of_any_update_is_proved(update: str) -> None:
    form = form_of(update)
    if form is None:
        return
    proof = prove(form, tokens=2 if len(form.normal_form.erasing) > 1 else 3)
    assert proof.holds, (update, [identity.claim for identity in proof.identities if not identity.holds])
