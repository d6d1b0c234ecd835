"""The normal form every accepted update is brought to.

    u_i,t = v_i,t + S_{t-1}^T a_i,t          i = 1..n
    S_t   = D_t S_{t-1} + sum_i w_i,t u_i,t^T
    o_t   = S_t^T q_t

Vectors are elementwise (commutative) sympy expressions over symbols named like the spec's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import sympy

from kcpgen.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Decay:
    """D_t = exp(log), one number per head (axis "") or one per key channel (axis "K")."""

    axis: str
    log: sympy.Expr


@dataclass(frozen=True, kw_only=True)
class Term:
    """One rank-1 part of the update.

    write, erase: key-axis expressions; value: value-axis expression. erase == 0 is a pure write, value == 0 a pure erase.
    When `erase_reads_decayed`, a_i = exp(decay.log) * erase: the state is decayed before the erase reads it, and inside a
    chunk the exclusive cumulative decay turns into the inclusive one.
    """

    write: sympy.Expr
    value: sympy.Expr
    erase: sympy.Expr
    erase_reads_decayed: bool


@dataclass(frozen=True, kw_only=True)
class NormalForm:
    spec: Spec
    decay: Decay | None
    terms: tuple[Term, ...]
    read: sympy.Expr  # q_t, the scale included

    @cached_property
    def erasing(self) -> tuple[int, ...]:
        """Indices of the terms that read the state (rows of the triangular solve)."""
        return tuple(i for i, term in enumerate(self.terms) if term.erase != 0)

    @cached_property
    def pure_writes(self) -> tuple[int, ...]:
        return tuple(i for i, term in enumerate(self.terms) if term.erase == 0)
