"""What a chunk form says about the kernels it needs, as facts a person can read."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from kcpgen.derivation.chunk_form import ChunkForm
from kcpgen.derivation.decay import Decay
from kcpgen.derivation.normal_form import NormalForm, Term
from kcpgen.tokenwise import split_scalar

# exp of these turns an operand of one token into an operand of the chunk
FROM_START, BEFORE, TO_END = "G", "X", "G_C - G"


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A block that enters the equations: name, exp(decay) * vector."""

    name: str
    vector: sympy.Expr
    decay: str  # FROM_START, BEFORE or TO_END; "" where nothing decays


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A block of inner products: left_t . right_s, decayed from s to t; s <= t, or s < t if `strict`."""

    name: str
    left: sympy.Expr
    right: sympy.Expr
    until: str  # FROM_START or BEFORE: whether token t's own decay is included; "" where nothing decays
    strict: bool


@dataclass(frozen=True, kw_only=True)
class SharedVector:
    """One key-side vector that several operands are scalar multiples of."""

    base: sympy.Expr
    users: tuple[str, ...]


def operands(form: NormalForm) -> tuple[Operand, ...]:
    """q_in, then a_in of every erasing term, then w_out of every term."""
    return (
        Operand(name="q_in", vector=form.read, decay=_decayed(form, FROM_START)),
        *(
            Operand(name=f"a_in[{i}]", vector=form.terms[i].erase, decay=until(form, form.terms[i]))
            for i in form.erasing
        ),
        *(Operand(name=f"w_out[{j}]", vector=t.write, decay=_decayed(form, TO_END)) for j, t in enumerate(form.terms)),
    )


def scores(form: NormalForm) -> tuple[Scores, ...]:
    """A of every term, then L of every erasing term against every term."""
    reads = [
        Scores(name=f"A[{j}]", left=form.read, right=term.write, until=_decayed(form, FROM_START), strict=False)
        for j, term in enumerate(form.terms)
    ]
    erases = [
        Scores(
            name=f"L[{i},{j}]",
            left=form.terms[i].erase,
            right=term.write,
            until=until(form, form.terms[i]),
            strict=True,
        )
        for i in form.erasing
        for j, term in enumerate(form.terms)
    ]
    return (*reads, *erases)


def until(form: NormalForm, term: Term) -> str:
    """Up to where a term's erase is decayed: its own token's decay counts if the erase reads the decayed state."""
    return _decayed(form, FROM_START if term.erase_reads_decayed else BEFORE)


def _decayed(form: NormalForm, kind: str) -> str:
    return kind if form.decay is not None else ""


def shared_vectors(form: NormalForm) -> tuple[SharedVector, ...]:
    """Key-side vectors with more than one user, up to a scalar per token: their inner products are computed once."""
    vectors = {"read": form.read}
    for j, term in enumerate(form.terms):
        vectors[f"w_{j}"] = term.write
        if term.erase != 0:
            vectors[f"a_{j}"] = term.erase
    users: dict[sympy.Expr, list[str]] = {}
    for name, vector in vectors.items():
        users.setdefault(split_scalar(vector, form.spec.axes)[1], []).append(name)
    return tuple(SharedVector(base=base, users=tuple(names)) for base, names in users.items() if len(names) > 1)


def decay_in_words(decay: Decay | None) -> str:
    if decay is None:
        return "none"
    return "one per head" if decay.axis == "" else "one per key channel"


def erase_in_words(form: NormalForm, term: Term) -> str:
    """What a term's erase reads."""
    if term.erase == 0:
        return "writes only"
    does = "writes and erases" if term.value != 0 else "erases only"
    if form.decay is None:
        return f"{does}, no decay to read through"
    return f"{does}, reads the state {'after' if term.erase_reads_decayed else 'before'} its decay"


def facts(form: ChunkForm) -> tuple[str, ...]:
    """One line per structural property."""
    normal = form.normal_form
    shared = "; ".join(f"{_spoken(each.users)} along {each.base}" for each in shared_vectors(normal)) or "none"
    return (
        f"terms: {len(normal.erasing)} erasing, {len(normal.pure_writes)} pure writes",
        f"decay: {decay_in_words(normal.decay)}",
        f"triangular solve: {_solve_in_words(len(normal.erasing))}",
        f"rank summary M: {'diagonal, K numbers' if form.diagonal_summary else 'dense, K x K numbers'}",
        f"shared key vectors: {shared}",
    )


def _solve_in_words(erasing: int) -> str:
    side = "C" if erasing == 1 else f"{erasing}C"
    return f"{side} x {side} a chunk" if erasing else "none, nothing is erased"


def _spoken(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
