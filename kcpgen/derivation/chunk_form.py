"""The block algebra of one chunk of C tokens: equations among matrices, with their adjoints.

Quantities (i runs over erasing terms, j over all terms; 0-based indices follow the name):

    S          entering state            [K, V]      S_next     leaving state           [K, V]
    q_in       read, decayed from start  [C, K]      a_in[i]    erase, likewise         [C, K]
    w_out[j]   write, decayed to the end [C, K]      decay_out  diagonal of the chunk   [K, K]
    A[j]       read scores, s <= t       [C, C]      L[i,j]     erase scores, s < t     [C, C]
    T[i,e]     blocks of (I - L)^-1      [C, C]      W[i] = sum_e T[i,e] a_in[e]        [C, K]
    V[j]       values                    [C, V]      U[j]       corrected values        [C, V]
    U0[j]      U of a zero entering state             O          output                  [C, V]
    M, S_ext   rank summary: S_next = M S + S_ext     d<name>    adjoint of <name>
"""

from __future__ import annotations

from dataclasses import dataclass

from kcpgen.derivation.normal_form import NormalForm


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A block quantity such as `A[0]^T`: name, indices, transposed or not."""

    name: str
    index: tuple[int, ...] = ()
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class Monomial:
    sign: int
    factors: tuple[Factor, ...]


@dataclass(frozen=True, kw_only=True)
class Equation:
    """target = sum of monomials; `mask` is "", "tril" (s <= t) or "strict_tril" (s < t)."""

    target: Factor
    terms: tuple[Monomial, ...]
    mask: str = ""


@dataclass(frozen=True, kw_only=True)
class ChunkForm:
    normal_form: NormalForm
    implicit: tuple[Equation, ...]  # U = V + L U + a_in S; O; S_next: as the recurrence gives them
    solved: tuple[Equation, ...]  # W, U0, then U = U0 + W S, O, S_next: what the scan computes
    summary: tuple[Equation, ...]  # M and S_ext
    reverse_scan: tuple[Equation, ...]  # dU, dS of the solved form: the serial part of the backward
    gradients: tuple[Equation, ...]  # dV, dL, dA, da_in, dq_in, dw_out from dU, S, dS_next: chunk-parallel
    diagonal_summary: bool  # nothing is erased: M is decay_out, K numbers instead of K^2
