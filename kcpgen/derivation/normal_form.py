"""The normal form every accepted update is brought to.

    u_i,t = v_i,t + S_{t-1}^T a_i,t          i = 1..n
    S_t   = D_t S_{t-1} + sum_i w_i,t u_i,t^T
    o_t   = S_t^T q_t

Vectors are elementwise (commutative) sympy expressions over symbols named like the spec's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import sympy

from kcpgen.derivation import faults
from kcpgen.derivation.contract import Part, contract
from kcpgen.derivation.decay import Decay, decay_of, undecayed
from kcpgen.derivation.letters import Word
from kcpgen.derivation.tree import walk
from kcpgen.derivation.words import Lowering
from kcpgen.diagnostics import Diagnostic, SpecError
from kcpgen.language.syntax import Name
from kcpgen.spec import Spec
from kcpgen.tokenwise import axis_of, names, split_scalar


@dataclass(frozen=True, kw_only=True)
class Term:
    """One rank-1 part of the update.

    write, erase: key-axis expressions; value: value-axis expression. erase == 0 is a pure write, value == 0 a pure
    erase. When `erase_reads_decayed`, a_i = exp(decay.log) * erase: the state is decayed before the erase reads it, and
    inside a chunk the exclusive cumulative decay turns into the inclusive one.
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


def derive_normal_form(spec: Spec) -> NormalForm:
    """The normal form of a checked spec.

    Raises SpecError with every fault of update and readout: not affine in the state, a decay that is no exponential of
    declared log decays, nothing written, a readout that is not S[t]^T times a key vector.
    """
    found: list[Diagnostic] = []
    read = _read(spec, found)
    decay, terms = _update(spec, found)
    if not found:
        form = NormalForm(spec=spec, decay=decay, terms=terms, read=read)
        found += _cancelled(form)
    if found:
        raise SpecError(found, spec.text)
    return form


def _update(spec: Spec, found: list[Diagnostic]) -> tuple[Decay | None, tuple[Term, ...]]:
    lowering = Lowering(spec)
    words = lowering.words(spec.update)
    found += lowering.diagnostics
    if lowering.diagnostics:  # a part that was refused is missing from the words: what follows would blame its absence
        return None, ()
    decay = decay_of(spec, words)
    if isinstance(decay, Diagnostic):
        found.append(decay)
        return None, ()
    terms = _terms(spec, words, decay)
    if not terms:
        found.append(faults.nothing_written(spec.update))
    return decay, terms


def _terms(spec: Spec, words: list[Word], decay: Decay | None) -> tuple[Term, ...]:
    """Rank-1 parts grouped by what they write along, up to a scalar; those that write a value come first."""
    groups: dict[sympy.Expr, list[Part]] = {}
    for part in map(contract, words):
        if part.column is not None:
            scalar, write = split_scalar(part.column, spec.axes)
            groups.setdefault(write, []).append(replace(part, coefficient=part.coefficient * scalar))
    terms = [_term(write, parts, decay) for write, parts in groups.items()]
    return tuple(sorted((t for t in terms if (t.value, t.erase) != (0, 0)), key=lambda term: term.value == 0))


def _term(write: sympy.Expr, parts: list[Part], decay: Decay | None) -> Term:
    erase = sympy.Add(*(part.coefficient * part.row for part in parts if part.on_state))
    value = sympy.Add(*(part.coefficient * part.row for part in parts if not part.on_state))
    stripped = undecayed(erase, decay)
    return Term(
        write=write,
        value=value,
        erase=erase if stripped is None else stripped,
        erase_reads_decayed=stripped is not None,
    )


def _cancelled(form: NormalForm) -> list[Diagnostic]:
    """Inputs that are written but have no part in the normal form, and vectors of which a scalar is left."""
    spec = form.spec
    vectors = [form.read, *(e for term in form.terms for e in (term.write, term.value, term.erase) if e != 0)]
    kept = {name for e in (*vectors, *([form.decay.log] if form.decay else [])) for name in names(e)}
    written = [node for root in (spec.update, spec.readout) for node in walk(root) if isinstance(node, Name)]
    lost = {node.name: node for node in reversed(written) if node.name not in kept | {spec.state}}
    faulty = [faults.cancelled(node, f"`{name}`") for name, node in sorted(lost.items())]
    if not faulty and not all(axis_of(vector, spec.axes) for vector in vectors):
        faulty.append(faults.cancelled(spec.update, "a vector's axis"))
    return faulty


def _read(spec: Spec, found: list[Diagnostic]) -> sympy.Expr:
    """The key vector q of o = S[t]^T q."""
    found += [faults.readout_before(node) for node in walk(spec.readout) if isinstance(node, Name) and node.offset < 0]
    if found:
        return sympy.S.Zero
    lowering = Lowering(spec, value_side=faults.output_scaled)
    parts = [contract(word) for word in lowering.words(spec.readout)]
    found += lowering.diagnostics
    if any(not part.on_state for part in parts):
        found.append(faults.readout_form(spec.readout, "a term of this does not read the state"))
    elif any(part.column is None for part in parts):
        found.append(faults.readout_form(spec.readout, "this is not S[t]^T times a key vector"))
    return sympy.Add(*(part.coefficient * (part.column or 0) for part in parts))
