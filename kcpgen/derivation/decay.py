"""D_t of the normal form: recognised as exp of declared log decays, and taken out of what reads the state after it."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from kcpgen.derivation import faults
from kcpgen.derivation.contract import contract
from kcpgen.derivation.letters import STATES, Word
from kcpgen.derivation.tree import smallest_around, walk
from kcpgen.diagnostics import Diagnostic
from kcpgen.language.syntax import Call, Expr, Name
from kcpgen.spec import Spec
from kcpgen.tokenwise import axis_of, expand_exponentials, symbol


@dataclass(frozen=True, kw_only=True)
class Decay:
    """D_t = exp(log), one number per head (axis "") or one per key channel (axis "K")."""

    axis: str
    log: sympy.Expr


def decay_of(spec: Spec, words: list[Word]) -> Decay | Diagnostic | None:
    """The decay made by the words that carry S[t-1] through diagonals only; None where it is the identity."""
    parts = [(word, contract(word)) for word in words]
    kept = [(word, part) for word, part in parts if part.on_state and part.column is None]
    factor = expand_exponentials(sympy.Add(*(part.coefficient * part.diagonal for _, part in kept)))
    if factor == 1:
        return None
    if factor == 0:
        return faults.dropped(spec.update)
    log = _log(factor)
    if log is None or not _declared(spec, log):
        return _fault(spec, _culprit(spec, [word for word, _ in kept]))
    return Decay(axis=axis_of(log, spec.axes), log=log)


def undecayed(erase: sympy.Expr, decay: Decay | None) -> sympy.Expr | None:
    """erase / exp(decay.log) where every term of it carries exactly that factor, else None."""
    if decay is None or erase == 0:
        return None
    inverse = sympy.Mul(*(sympy.exp(-part) for part in sympy.Add.make_args(decay.log)))
    terms = sympy.Add.make_args(expand_exponentials(erase))
    rest = sympy.Add(*(term * inverse for term in terms))
    return None if rest.free_symbols & decay.log.free_symbols else rest


def _log(factor: sympy.Expr) -> sympy.Expr | None:
    factors = sympy.Mul.make_args(factor)
    if not all(isinstance(part, sympy.exp) for part in factors):
        return None
    return sympy.Add(*(part.args[0] for part in factors))


def _declared(spec: Spec, log: sympy.Expr) -> bool:
    """A sum of declared log decays with positive coefficients: what keeps exp(log) <= 1 when they are <= 0."""
    decays = {symbol(given.name) for given in spec.inputs if given.role == "log_decay"}
    pairs = [term.as_coeff_Mul() for term in sympy.Add.make_args(sympy.expand_mul(log))]
    return all(rest in decays and coefficient > 0 for coefficient, rest in pairs)


def _culprit(spec: Spec, words: list[Word]) -> Expr:
    """The smallest expression that holds every factor the state is carried with."""
    bare = any(len(word.positions) == 1 for word in words)
    letters = [letter for word in words for letter in (*word.scalars, *word.letters)]
    return smallest_around(spec.update, [letter.node for letter in letters if bare or letter.kind not in STATES])


def _fault(spec: Spec, culprit: Expr) -> Diagnostic:
    """The one name in an exp that is no log decay; or else, inside a lone exp, its argument."""
    while isinstance(culprit, Call) and culprit.function == "Diag":
        culprit = culprit.argument
    decays = {given.name for given in spec.inputs if given.role == "log_decay"}
    exps = [node for node in walk(culprit) if isinstance(node, Call) and node.function == "exp"]
    others = [n for node in exps for n in walk(node) if isinstance(n, Name) and n.name not in decays]
    if len(others) == 1:
        return faults.no_log_decay(others[0], spec)
    if not (isinstance(culprit, Call) and culprit.function == "exp"):
        return faults.decay_form(culprit, spec, "this is not exp of a sum of declared log decays")
    return faults.decay_form(culprit.argument, spec, "this is not a sum of declared log decays")
