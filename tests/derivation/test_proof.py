"""The proof holds for every example, and for nothing that differs from it by a sign, a mask or a flag."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from made_specs import examples, spec_of

from kcpgen.derivation import derive_chunk_form, derive_normal_form
from kcpgen.derivation.chunk_form import ChunkForm, Monomial
from kcpgen.derivation.normal_form import Decay, NormalForm
from kcpgen.derivation.proof import prove

EXAMPLES = examples()
PARTS = ("implicit", "solved", "summary", "reverse_scan", "gradients", "summary_adjoint")


def form_of(name: str) -> ChunkForm:
    return derive_chunk_form(derive_normal_form(EXAMPLES[name]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_chunk_form_is_the_recurrence(name: str) -> None:
    start = time.perf_counter()
    proof = prove(form_of(name))
    assert proof.holds, [identity.claim for identity in proof.identities if not identity.holds]
    assert {"O", "S_next", "M S + S_ext", "dS", "dq_in"} <= {identity.claim for identity in proof.identities}
    assert proof.monomials > 50
    assert time.perf_counter() - start < 5


def test_other_sizes() -> None:
    assert prove(form_of("kda"), tokens=2, key=3, value=2).holds
    assert prove(form_of("dplr"), tokens=4, key=2, value=1).holds
    assert prove(form_of("three_terms"), tokens=1, key=1, value=1).holds


@pytest.mark.parametrize(
    "update",
    [
        "S[t-1] - (k / sqrt(k^T k)) (k / sqrt(k^T k))^T S[t-1] + k v^T",
        "exp(h) (S[t-1] - sigmoid(beta) k k^T S[t-1] / f) + k (softplus(beta) v / w)^T",
        "S[t-1] + (k^T p) (p^T k) k v^T",
        "S[t-1] - (k / f) (f * f * k)^T S[t-1] + k (sqrt(w) ⊙ sqrt(w))^T",
        "S[t-1] + (b ⊙ (k (k^T b))) v^T + p (w ⊙ ((k v^T)^T k))^T",
    ],
)
def test_updates_with_functions_and_inner_products(update: str) -> None:
    assert prove(derive_chunk_form(derive_normal_form(spec_of(update)))).holds


def flips(form: ChunkForm, part: str) -> list[tuple[str, ChunkForm]]:
    """The form with the sign of one monomial turned, for every monomial of a part."""
    found = []
    for place, equation in enumerate(getattr(form, part)):
        for at, term in enumerate(equation.terms):
            terms = list(equation.terms)
            terms[at] = Monomial(sign=-term.sign, factors=term.factors)
            equations = list(getattr(form, part))
            equations[place] = replace(equation, terms=tuple(terms))
            found.append((f"{part}: {equation.target}, {at}", replace(form, **{part: tuple(equations)})))
    return found


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["gla", "kda", "three_terms"])
def test_no_sign_can_be_turned(name: str, part: str) -> None:
    for what, wrong in flips(form_of(name), part):
        assert not prove(wrong).holds, what


def test_no_mask_can_be_changed() -> None:
    form = form_of("kda")
    for place, equation in enumerate(form.gradients):
        if equation.mask:
            equations = list(form.gradients)
            equations[place] = replace(equation, mask="")
            assert not prove(replace(form, gradients=tuple(equations))).holds


def with_normal_form(form: NormalForm, **changes: object) -> ChunkForm:
    return derive_chunk_form(replace(form, **changes))


def test_another_normal_form_is_refused() -> None:
    normal = derive_normal_form(EXAMPLES["kda"])
    (term,) = normal.terms
    changed = (
        replace(term, erase=-term.erase),
        replace(term, erase_reads_decayed=False),
        replace(term, value=2 * term.value),
        replace(term, write=-term.write),
    )
    assert not any(prove(with_normal_form(normal, terms=(wrong,))).holds for wrong in changed)
    assert not prove(with_normal_form(normal, read=2 * normal.read)).holds
    assert normal.decay is not None
    assert not prove(with_normal_form(normal, decay=Decay(axis="K", log=2 * normal.decay.log))).holds
