"""The update's syntax as a noncommutative polynomial: a sum of words in columns, rows, diagonals and the state.

Every maximal token-local piece of the syntax becomes one letter, so that a word still knows where its parts were
written. What no normal form can hold is found here, at the smallest expression that cannot: a state that occurs twice,
sits inside a function, or is multiplied from its value side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from kcpgen.derivation import faults
from kcpgen.derivation.letters import STATES, TRANSPOSED, Kind, Letter, Word
from kcpgen.derivation.tree import walk
from kcpgen.diagnostics import Diagnostic
from kcpgen.language.syntax import (
    SCALAR,
    Call,
    Difference,
    Expr,
    Hadamard,
    Name,
    Negative,
    Node,
    Product,
    Quotient,
    Shape,
    Sum,
    Transpose,
)
from kcpgen.spec import Spec
from kcpgen.tokenwise import Local, NotLocal, evaluate, not_local

Fault: TypeAlias = Callable[[Node], Diagnostic]


@dataclass(frozen=True, kw_only=True)
class Polynomial:
    value: sympy.Expr
    shape: Shape


NOTHING = Polynomial(value=sympy.S.Zero, shape=SCALAR)


class Lowering:
    """One pass over one expression. `diagnostics` collects the faults; a faulty part counts as zero."""

    def __init__(self, spec: Spec, value_side: Fault = faults.value_side) -> None:
        self.diagnostics: list[Diagnostic] = []
        self._spec = spec
        self._value_side = value_side
        self._letters: dict[sympy.Symbol, Letter] = {}
        self._position = 0

    def words(self, expr: Expr) -> list[Word]:
        """The words of an expression in the order their letters were written."""
        return sorted(self._split(self._lower(expr).value), key=lambda word: word.positions)

    def _split(self, value: sympy.Expr) -> list[Word]:
        return [self._word(term) for term in sympy.Add.make_args(value) if term != 0]

    def _word(self, term: sympy.Expr) -> Word:
        commutative, matrices = term.args_cnc()
        known = self._letters
        return Word(
            coefficient=sympy.Mul(*(factor for factor in commutative if factor not in known)),
            scalars=tuple(known[factor] for factor in commutative if factor in known),
            letters=tuple(known[factor] for factor in matrices),
        )

    def _symbol(self, letter: Letter) -> sympy.Symbol:
        symbol = sympy.Symbol(f"{letter.kind.value}{len(self._letters)}", commutative=letter.kind is Kind.SCALAR)
        self._letters[symbol] = letter
        return symbol

    def _write(self, kind: Kind, node: Expr, value: sympy.Expr, axis: str) -> sympy.Symbol:
        self._position += 1
        return self._symbol(Letter(kind=kind, node=node, value=value, axis=axis, position=self._position))

    def _lower(self, expr: Expr) -> Polynomial:
        try:
            return self._local(expr, evaluate(expr, self._spec))
        except NotLocal as verdict:
            return self._composite(expr, verdict)

    def _local(self, expr: Expr, local: Local) -> Polynomial:
        rows, columns = local.shape
        if local.shape == SCALAR:
            symbol = self._write(Kind.SCALAR, expr, local.value, "")
        elif local.diagonal:
            symbol = self._write(Kind.DIAGONAL, expr, local.value, rows)
        elif columns == "1":
            symbol = self._write(Kind.COLUMN, expr, local.value, rows)
        else:
            symbol = self._write(Kind.ROW, expr, local.value, columns)
        return Polynomial(value=symbol, shape=local.shape)

    def _composite(self, expr: Expr, verdict: NotLocal) -> Polynomial:
        match expr:
            case Name() if expr.name == self._spec.state:
                shape = self._spec.shapes[expr.name]
                return Polynomial(value=self._write(Kind.STATE, expr, sympy.S.One, ""), shape=shape)
            case Negative():
                operand = self._lower(expr.operand)
                return Polynomial(value=sympy.expand_mul(-operand.value), shape=operand.shape)
            case Transpose():
                return self._transpose(self._lower(expr.operand))
            case Sum() | Difference():
                return self._sum(expr, self._lower(expr.left), self._lower(expr.right))
            case Product():
                return self._product(expr, self._lower(expr.left), self._lower(expr.right))
            case Hadamard():
                return self._hadamard(expr, verdict)
            case Quotient():
                return self._quotient(expr)
            case Call() if self._reads_state(expr):
                return self._fault(faults.state_inside(expr, f"{expr.function}(...)"))
            case _:
                return self._not_local(verdict)

    def _sum(self, expr: Sum | Difference, left: Polynomial, right: Polynomial) -> Polynomial:
        value = left.value + right.value if isinstance(expr, Sum) else left.value - right.value
        return Polynomial(value=sympy.expand_mul(value), shape=left.shape if left.value != 0 else right.shape)

    def _transpose(self, operand: Polynomial) -> Polynomial:
        """Every word reversed, its letters transposed."""
        words = self._split(operand.value)
        value = sympy.Add(*(sympy.Mul(self._scalar(word), *self._reversed(word)) for word in words))
        return Polynomial(value=value, shape=(operand.shape[1], operand.shape[0]))

    def _scalar(self, word: Word) -> sympy.Expr:
        return sympy.Mul(word.coefficient, *(self._symbol(letter) for letter in word.scalars))

    def _reversed(self, word: Word) -> list[sympy.Symbol]:
        kinds = [(TRANSPOSED.get(letter.kind, letter.kind), letter) for letter in reversed(word.letters)]
        return [
            self._symbol(Letter(kind=kind, node=old.node, value=old.value, axis=old.axis, position=old.position))
            for kind, old in kinds
        ]

    def _product(self, expr: Expr, left: Polynomial, right: Polynomial) -> Polynomial:
        """left right, expanded; a scalar factor goes to the left, where words expect it."""
        if right.shape == SCALAR:
            left, right = right, left
        shape = right.shape if left.shape == SCALAR else (left.shape[0], right.shape[1])
        value = sympy.expand_mul(left.value * right.value)
        for word in self._split(value):
            fault = self._fault_of(word)
            if fault is not None:
                return self._fault(fault(expr))
        return Polynomial(value=value, shape=shape)

    def _fault_of(self, word: Word) -> Fault | None:
        """What keeps a word out of every normal form: S must be its last letter, S^T its first."""
        places = [i for i, letter in enumerate(word.letters) if letter.kind in STATES]
        if len(places) > 1:
            return faults.not_affine
        last = len(word.letters) - 1
        if places and places[0] != (last if word.letters[places[0]].kind is Kind.STATE else 0):
            return self._value_side
        return None

    def _hadamard(self, expr: Hadamard, verdict: NotLocal) -> Polynomial:
        """A vector times a token-local vector is a diagonal acting on it."""
        for side, other in ((expr.left, expr.right), (expr.right, expr.left)):
            local = self._try(side)
            if local is not None and "1" in local.shape:
                return self._scaled(expr, local, side, self._lower(other))
        if self._reads_state(expr.left) and self._reads_state(expr.right):
            return self._fault(faults.not_affine(expr))
        return self._not_local(NotLocal(expr, "this is an elementwise product of matrices"))

    def _scaled(self, expr: Expr, local: Local, side: Expr, other: Polynomial) -> Polynomial:
        if local.shape == SCALAR:
            return self._product(expr, self._local(side, local), other)
        axis = local.shape[0] if local.shape[1] == "1" else local.shape[1]
        diagonal = Polynomial(value=self._write(Kind.DIAGONAL, side, local.value, axis), shape=(axis, axis))
        return self._product(expr, diagonal, other) if local.shape[1] == "1" else self._product(expr, other, diagonal)

    def _quotient(self, expr: Quotient) -> Polynomial:
        if self._reads_state(expr.right):
            return self._fault(faults.state_inside(expr, "a denominator"))
        try:
            divisor = evaluate(expr.right, self._spec)
        except NotLocal as verdict:
            return self._not_local(verdict)
        inverse = Local(value=1 / divisor.value, shape=divisor.shape)
        return self._scaled(expr, inverse, expr.right, self._lower(expr.left))

    def _try(self, expr: Expr) -> Local | None:
        try:
            return evaluate(expr, self._spec)
        except NotLocal:
            return None

    def _reads_state(self, expr: Expr) -> bool:
        return any(isinstance(node, Name) and node.name == self._spec.state for node in walk(expr))

    def _not_local(self, verdict: NotLocal) -> Polynomial:
        return self._fault(not_local(verdict))

    def _fault(self, diagnostic: Diagnostic) -> Polynomial:
        self.diagnostics.append(diagnostic)
        return NOTHING
