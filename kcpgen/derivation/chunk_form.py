"""The block algebra of one chunk of C tokens: equations among matrices, with their adjoints.

Quantities (i, e run over erasing terms, p over pure writes, j over all terms; 0-based indices follow the name):

    S          entering state            [K, V]      S_next     leaving state           [K, V]
    q_in       read, decayed from start  [C, K]      a_in[i]    erase, likewise         [C, K]
    w_out[j]   write, decayed to the end [C, K]      decay_out  diagonal of the chunk   [K, K]
    A[j]       read scores, s <= t       [C, C]      L[i,j]     erase scores, s < t     [C, C]
    T[i,e]     blocks of (I - L)^-1      [C, C]      W[i] = sum_e T[i,e] a_in[e]        [C, K]
    V[j]       values                    [C, V]      U[j]       corrected values        [C, V]
    U0[j]      U of a zero entering state             O          output                  [C, V]
    R[e]       right-hand side of the solve U = L U + R         [C, V]
    M, S_ext   rank summary: S_next = M S + S_ext     d<name>    adjoint of <name>
    Q_eff      O = Q_eff S + (what a zero entering state gives) [C, K]
    dS_ext     the backward's S_ext: dS = M^T dS_next + dS_ext  [K, V]

Without a decay `decay_out` is the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy

from kcpgen.derivation.blocks import Blocks, Equation, Factor, Monomial, pull_back
from kcpgen.derivation.normal_form import NormalForm

__all__ = ["ChunkForm", "Equation", "Factor", "Monomial", "derive_chunk_form"]


@dataclass(frozen=True, kw_only=True)
class ChunkForm:
    normal_form: NormalForm
    implicit: tuple[Equation, ...]  # U = V + L U + a_in S; O; S_next: as the recurrence gives them
    solved: tuple[Equation, ...]  # W, U0, then U = U0 + W S, O, S_next
    summary: tuple[Equation, ...]  # M and S_ext
    reverse_scan: tuple[Equation, ...]  # dU, dS of the solved form: the serial part of the backward
    gradients: tuple[Equation, ...]  # dR, dV, dL, dA, da_in, dq_in, dw_out from dU, S, dS_next: chunk-parallel
    summary_adjoint: tuple[Equation, ...]  # Q_eff, dS_ext and dS = M^T dS_next + dS_ext: the backward's rank summary
    diagonal_summary: bool  # nothing is erased: M is decay_out, K numbers instead of K^2

    @property
    def transition(self) -> Literal["dense", "diagonal", "scalar", "identity"]:
        """How many numbers M is made of, per head: K^2, K, one or none."""
        decay = self.normal_form.decay
        if not self.diagonal_summary:
            return "dense"
        if decay is None:
            return "identity"
        return "diagonal" if decay.axis else "scalar"


def derive_chunk_form(normal_form: NormalForm) -> ChunkForm:
    """The chunk form of a normal form, for any number of terms: solved, summarised and differentiated by algebra."""
    implicit = _implicit(normal_form)
    solved = _solve(normal_form, implicit)
    summary, effective_read = _summarise(solved)
    return ChunkForm(
        normal_form=normal_form,
        implicit=implicit,
        solved=solved,
        summary=summary,
        reverse_scan=_reverse_scan(normal_form, solved),
        gradients=_gradients(normal_form, implicit),
        summary_adjoint=_summary_adjoint(effective_read),
        diagonal_summary=not normal_form.erasing,
    )


def _implicit(normal_form: NormalForm) -> tuple[Equation, ...]:
    """The recurrence, its time axis stacked: u_t reads S_{t-1}, which is S and what the tokens before t wrote."""
    block = Blocks()
    terms, S = range(len(normal_form.terms)), block("S")
    corrected = []
    for j, term in enumerate(normal_form.terms):
        value = block("V", j) if term.value != 0 else sympy.S.Zero
        if term.erase != 0:
            value += sympy.Add(*(block("L", j, s) * block("U", s) for s in terms)) + block("a_in", j) * S
        corrected.append(block.equation(Factor(name="U", index=(j,)), value))
    output = block("q_in") * S + sympy.Add(*(block("A", j) * block("U", j) for j in terms))
    written = (block.transpose(block("w_out", j)) * block("U", j) for j in terms)
    leaving = block("decay_out") * S + sympy.Add(*written)
    return (
        *corrected,
        block.equation(Factor(name="O"), output),
        block.equation(Factor(name="S_next"), leaving),
    )


def _solve(normal_form: NormalForm, implicit: tuple[Equation, ...]) -> tuple[Equation, ...]:
    """(I - L) U = R among the erasing terms, solved by T; R is split into what S enters and what it does not."""
    block = Blocks()
    S, erasing = block("S"), normal_form.erasing
    right = {i: block.expression(equation.terms) for i, equation in enumerate(implicit[: len(normal_form.terms)])}
    unknown = {block("U", i): sympy.S.Zero for i in erasing}
    known = {block("U", p): right[p] for p in normal_form.pure_writes}
    weights, free, corrected = [], [], []
    for j in right:
        if j in erasing:
            rest = {e: right[e].xreplace(unknown).xreplace(known) for e in erasing}
            value = sympy.expand(sympy.Add(*(block("T", j, e) * rest[e] for e in erasing)))
        else:
            value = right[j]
        on_state, alone = block.split_on(value, S)
        free.append(block.equation(Factor(name="U0", index=(j,)), alone))
        total = block("U0", j)
        if on_state != 0:
            weights.append(block.equation(Factor(name="W", index=(j,)), on_state))
            total += block("W", j) * S
        corrected.append(block.equation(Factor(name="U", index=(j,)), total))
    return (*weights, *free, *corrected, *implicit[len(normal_form.terms) :])


def _summarise(solved: tuple[Equation, ...]) -> tuple[tuple[Equation, ...], Equation]:
    """M and S_ext of S_next = M S + S_ext, and Q_eff of O = Q_eff S + ..., with U put in."""
    block = Blocks()
    S = block("S")
    scan = {str(e.target): block.expression(e.terms) for e in solved}
    corrected = {block.symbol(e.target): scan[str(e.target)] for e in solved if e.target.name == "U"}
    transition, external = block.split_on(sympy.expand(scan["S_next"].xreplace(corrected)), S)
    effective, _ = block.split_on(sympy.expand(scan["O"].xreplace(corrected)), S)
    summary = (block.equation(Factor(name="M"), transition), block.equation(Factor(name="S_ext"), external))
    return summary, block.equation(Factor(name="Q_eff"), effective)


def _summary_adjoint(effective_read: Equation) -> tuple[Equation, ...]:
    """The adjoint of S_next = M S + S_ext, O = Q_eff S + ...: the forward's M, transposed, and a dS_ext of its own."""
    S = Factor(name="S")
    read = Equation(target=Factor(name="O"), terms=(_product(Factor(name="Q_eff"), S),))
    step = Equation(target=Factor(name="S_next"), terms=(_product(Factor(name="M"), S),))
    external = Factor(name="dS_ext")
    return (
        effective_read,
        Equation(target=external, terms=pull_back(read, S, Factor(name="dO"))),
        Equation(target=Factor(name="dS"), terms=(*pull_back(step, S, Factor(name="dS_next")), _product(external))),
    )


def _product(*factors: Factor) -> Monomial:
    return Monomial(sign=1, factors=factors)


def _reverse_scan(normal_form: NormalForm, solved: tuple[Equation, ...]) -> tuple[Equation, ...]:
    """dU of every term, then dS. U is fed by U0 + W S only, so dU needs no solve."""
    sources = [equation for equation in solved if equation.target.name in ("U", "O", "S_next")]
    targets = [Factor(name="U", index=(j,)) for j in range(len(normal_form.terms))]
    return tuple(_gradient(wrt, sources) for wrt in (*targets, Factor(name="S")))


def _gradients(normal_form: NormalForm, implicit: tuple[Equation, ...]) -> tuple[Equation, ...]:
    """Everything off the serial path.

    U = L U + R gives dR = (I - L)^-T dU; what feeds R then gets its gradient from dR, the masked blocks masked.
    """
    terms, erasing = range(len(normal_form.terms)), normal_form.erasing
    sources = [_with_right_hand_side(normal_form, equation) for equation in implicit]
    written = [j for j in terms if normal_form.terms[j].value != 0]
    return (
        *(_right_hand_side(normal_form, e) for e in erasing),
        *(_value_gradient(normal_form, sources, j) for j in written),
        *(_gradient(Factor(name="L", index=(e, j)), sources, "strict_tril") for e in erasing for j in terms),
        *(_gradient(Factor(name="A", index=(j,)), sources, "tril") for j in terms),
        *(_gradient(Factor(name="a_in", index=(e,)), sources) for e in erasing),
        _gradient(Factor(name="q_in"), sources),
        *(_gradient(Factor(name="w_out", index=(j,)), sources) for j in terms),
        *([_gradient(Factor(name="decay_out"), sources, "diagonal")] if normal_form.decay is not None else []),
    )


def _with_right_hand_side(normal_form: NormalForm, equation: Equation) -> Equation:
    """An erasing term's equation defines R: its gradient is dR, not dU."""
    solved_for = equation.target.name == "U" and equation.target.index[0] in normal_form.erasing
    if not solved_for:
        return equation
    return Equation(target=Factor(name="R", index=equation.target.index), terms=equation.terms)


def _right_hand_side(normal_form: NormalForm, e: int) -> Equation:
    """dR[e] = sum_i T[i,e]^T dU[i], the adjoint of U[i] = sum_e T[i,e] R[e]."""
    wrt = Factor(name="R", index=(e,))
    solve = [
        Equation(target=Factor(name="U", index=(i,)), terms=(_product(Factor(name="T", index=(i, e)), wrt),))
        for i in normal_form.erasing
    ]
    return _gradient(wrt, solve)


def _value_gradient(normal_form: NormalForm, sources: list[Equation], j: int) -> Equation:
    """dV, through U where the term is a pure write: its dU lacks what the solve read of it."""
    value, corrected = Factor(name="V", index=(j,)), Factor(name="U", index=(j,))
    if j in normal_form.erasing:
        return _gradient(value, sources)
    through_solve = [m for e in sources if e.target.name == "R" for m in pull_back(e, corrected, e.target.adjoint)]
    return Equation(target=value.adjoint, terms=(_product(corrected.adjoint), *through_solve))


def _gradient(wrt: Factor, sources: list[Equation], mask: str = "") -> Equation:
    block = Blocks()
    found = [monomial for source in sources for monomial in pull_back(source, wrt, source.target.adjoint)]
    return block.equation(wrt.adjoint, block.expression(found), mask)
