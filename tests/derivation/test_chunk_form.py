"""Every equation of the chunk form in float64, against autograd of the recurrence as it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import witness
from made_specs import examples, spec_of

from kcpgen.derivation import derive_chunk_form, derive_normal_form
from kcpgen.derivation.chunk_form import ChunkForm, Equation, Monomial
from kcpgen.spec import Spec

TOKENS = 6
PARTS = ("implicit", "solved", "summary", "reverse_scan", "gradients", "summary_adjoint")
EXAMPLES = examples()


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1.0))


def discrepancies(form: ChunkForm, spec: Spec, seed: int = 0) -> dict[str, float]:
    """Largest relative error of each quantity the chunk form computes."""
    values = witness.random_inputs(spec, TOKENS, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    S = draw(witness.SIZES["K"], witness.SIZES["V"]).requires_grad_()
    dO, dS_next = draw(TOKENS, witness.SIZES["V"]), draw(witness.SIZES["K"], witness.SIZES["V"])

    out, S_next = witness.recurrence(spec, values, S)
    used = {name: value for name, value in values.items() if name in read_by(spec)}
    loss = (out * dO).sum() + (S_next * dS_next).sum()
    *expected, dS = torch.autograd.grad(loss, [*used.values(), S])

    blocks = witness.forward(form, values, S)
    blocks |= {"dO": dO, "dS_next": dS_next}
    found = {"O": error(blocks["O"], out), "S_next": error(blocks["S_next"], S_next)}
    found["summary"] = error(blocks["M"] @ S + blocks["S_ext"], S_next)
    for equation in form.implicit:
        found[f"implicit {equation.target}"] = error(witness.value_of(equation, blocks), blocks[str(equation.target)])

    witness.run(form.reverse_scan, blocks)
    found["dS"] = error(blocks["dS"], dS)
    witness.run(form.gradients, blocks)
    leaves = {name: value for name, value in witness.operands(form.normal_form, values).items() if f"d{name}" in blocks}
    pulled = torch.autograd.grad(
        list(leaves.values()), list(used.values()), [blocks[f"d{name}"].detach() for name in leaves], allow_unused=True
    )
    found |= {f"d{name}": error(a, b) for name, a, b in zip(used, pulled, expected, strict=True)}

    witness.run(form.summary_adjoint, blocks)
    found["summary dS"] = error(blocks["dS"], dS)
    return found


def read_by(spec: Spec) -> set[str]:
    return {given.name for given in spec.inputs} | {"scale"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_equation(name: str) -> None:
    spec = EXAMPLES[name]
    found = discrepancies(derive_chunk_form(derive_normal_form(spec)), spec)
    assert max(found.values()) < 1e-12, found


def flipped(form: ChunkForm, part: str, place: int) -> ChunkForm:
    """The form with the sign of one equation's last monomial turned: what a slip in the derivation would give."""
    equations: list[Equation] = list(getattr(form, part))
    terms = list(equations[place].terms)
    terms[-1] = Monomial(sign=-terms[-1].sign, factors=terms[-1].factors)
    equations[place] = replace(equations[place], terms=tuple(terms))
    return replace(form, **{part: tuple(equations)})


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_sign_anywhere_is_caught(part: str) -> None:
    spec = EXAMPLES["three_terms"]
    form = derive_chunk_form(derive_normal_form(spec))
    for place, equation in enumerate(getattr(form, part)):
        found = discrepancies(flipped(form, part, place), spec)
        assert max(found.values()) > 1e-3, f"{part}: {equation.target}"


def test_the_decayed_erase_flag_matters() -> None:
    """A normal form that says the erase reads the undecayed state is another recurrence."""
    spec = EXAMPLES["kda"]
    normal = derive_normal_form(spec)
    wrong = replace(normal, terms=tuple(replace(term, erase_reads_decayed=False) for term in normal.terms))
    assert max(discrepancies(derive_chunk_form(wrong), spec).values()) > 1e-3


def test_the_summary_is_diagonal_where_nothing_is_erased() -> None:
    forms = {name: derive_chunk_form(derive_normal_form(spec)) for name, spec in EXAMPLES.items()}
    assert {name for name, form in forms.items() if form.diagonal_summary} == {"gla", "simple_gla"}


def test_the_two_forms_of_the_backward_state_are_one() -> None:
    """dS = M^T dS_next + Q_eff^T dO, expanded, is the reverse scan's dS with dU put in."""
    for spec in EXAMPLES.values():
        form = derive_chunk_form(derive_normal_form(spec))
        assert expanded(form, "reverse_scan") == expanded(form, "summary_adjoint")


def expanded(form: ChunkForm, part: str) -> set[str]:
    """The words of dS with every target of the part, and M, put in."""
    known = {str(e.target): e.terms for e in (*form.summary, *getattr(form, part)) if str(e.target) != "dS"}
    (target,) = (e for e in getattr(form, part) if str(e.target) == "dS")
    words = list(target.terms)
    while any(str(f).removesuffix("^T") in known for word in words for f in word.factors):
        words = [replacement for word in words for replacement in put_in(word, known)]
    assert all(word.sign == 1 for word in words)
    return {" ".join(map(str, word.factors)) for word in words}


def put_in(word: Monomial, known: dict[str, tuple[Monomial, ...]]) -> list[Monomial]:
    for place, f in enumerate(word.factors):
        terms = known.get(str(f).removesuffix("^T"))
        if terms is not None:
            before, after = word.factors[:place], word.factors[place + 1 :]
            inside = [term.T if f.transposed else term for term in terms]
            return [Monomial(sign=word.sign * t.sign, factors=(*before, *t.factors, *after)) for t in inside]
    return [word]


def test_the_gradient_of_the_log_decay() -> None:
    """dg from products of vectors and their gradients alone, the formula that kernels use.

    Each vector here serves one purpose, so that its input's gradient is that of a read, a write or an erase;
    `a` is read after the decay, `c` before it.
    """
    spec = spec_of("Diag(exp(g)) S[t-1] + b (w - (Diag(exp(g)) S[t-1])^T a)^T + p (S[t-1]^T c)^T + k v^T")
    form = derive_chunk_form(derive_normal_form(spec))
    values = witness.random_inputs(spec, TOKENS)
    S = torch.randn(witness.SIZES["K"], witness.SIZES["V"], dtype=torch.float64)
    out, S_next = witness.recurrence(spec, values, S)
    dO, dS_next = torch.randn_like(out), torch.randn_like(S_next)
    names = [given.name for given in spec.inputs]
    found = torch.autograd.grad((out * dO).sum() + (S_next * dS_next).sum(), [values[name] for name in names])
    share = {name: (values[name] * gradient).detach() for name, gradient in zip(names, found, strict=True)}

    blocks = witness.forward(form, values, S) | {"dO": dO, "dS_next": dS_next}
    witness.run((*form.reverse_scan, *form.gradients), blocks)
    dG = share["q"] - share["k"] - share["b"] - share["p"] + share["a"]
    dX = share["c"]
    leaving = [blocks[f"w_out[{j}]"] * blocks[f"dw_out[{j}]"] for j in range(3)]
    dG[-1] += torch.cat(leaving).sum(0).detach() + (blocks["decay_out"] * blocks["ddecay_out"]).sum(1).detach()
    suffix = lambda x: x.flip(0).cumsum(0).flip(0)  # noqa: E731
    assert error(suffix(dG) + suffix(dX) - dX, found[names.index("g")]) < 1e-12
