"""Words of columns, rows, diagonals and the state, whose letters know where in the source they were written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import sympy

from kcpgen.language.syntax import Expr


class Kind(Enum):
    SCALAR = "c"
    COLUMN = "x"
    ROW = "y"
    DIAGONAL = "d"
    STATE = "S"
    STATE_TRANSPOSED = "R"


STATES = (Kind.STATE, Kind.STATE_TRANSPOSED)
TRANSPOSED = {
    Kind.COLUMN: Kind.ROW,
    Kind.ROW: Kind.COLUMN,
    Kind.STATE: Kind.STATE_TRANSPOSED,
    Kind.STATE_TRANSPOSED: Kind.STATE,
}


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A token-local value with its axis, or an occurrence of the state; `position` counts through the source."""

    kind: Kind
    node: Expr
    value: sympy.Expr
    axis: str
    position: int


@dataclass(frozen=True, kw_only=True)
class Word:
    """A product: a rational coefficient, scalar letters, then matrix letters in their order."""

    coefficient: sympy.Expr
    scalars: tuple[Letter, ...]
    letters: tuple[Letter, ...]

    @property
    def positions(self) -> list[int]:
        return [letter.position for letter in (*self.letters, *self.scalars)]
