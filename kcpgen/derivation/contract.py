"""A word of columns, rows and diagonals as one rank-1 or diagonal part, its inner products taken."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from kcpgen.derivation.letters import STATES, Kind, Letter, Word
from kcpgen.tokenwise import row_sum


@dataclass(frozen=True, kw_only=True)
class Part:
    """coefficient * column row^T, or coefficient * Diag(diagonal) where there is no column.

    `row` is 1 where the word ends in a column. `on_state`: the part multiplies the state (the new one, for a readout).
    """

    coefficient: sympy.Expr
    column: sympy.Expr | None
    row: sympy.Expr
    diagonal: sympy.Expr
    on_state: bool


def contract(word: Word) -> Part:
    """Reads a word from left to right.

    A diagonal scales the column to its right or the row to its left; a row that meets a column becomes a scalar.
    """
    scale = sympy.Mul(word.coefficient, *(letter.value for letter in word.scalars))
    reading = _Reading(scale)
    for letter in word.letters:
        if letter.kind not in STATES:
            reading.take(letter)
    on_state = any(letter.kind in STATES for letter in word.letters)
    return reading.part(on_state)


class _Reading:
    def __init__(self, coefficient: sympy.Expr) -> None:
        self._coefficient = coefficient
        self._column: sympy.Expr | None = None
        self._row: sympy.Expr | None = None
        self._diagonal: sympy.Expr = sympy.S.One

    def take(self, letter: Letter) -> None:
        match letter.kind:
            case Kind.DIAGONAL if self._row is not None:
                self._row = self._row * letter.value
            case Kind.DIAGONAL:
                self._diagonal = self._diagonal * letter.value
            case Kind.COLUMN if self._row is not None:
                self._coefficient = self._coefficient * row_sum(self._row * letter.value, letter.axis)
                self._row = None
            case Kind.COLUMN:
                self._column, self._diagonal = self._diagonal * letter.value, sympy.S.One
            case _:
                self._row = letter.value

    def part(self, on_state: bool) -> Part:
        return Part(
            coefficient=self._coefficient,
            column=self._column,
            row=self._row if self._row is not None else sympy.S.One,
            diagonal=self._diagonal,
            on_state=on_state,
        )
