"""Block equations of the derivation as Triton source: a product of two matrices becomes a dot, a diagonal a scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kcpgen.derivation.blocks import DIAGONALS
from kcpgen.derivation.chunk_form import Equation, Factor, Monomial


def variable(factor: Factor) -> str:
    """`A[0]` is held in A_0, `L[1,0]` in L_1_0."""
    return "_".join([factor.name, *map(str, factor.index)])


def math(equation: Equation) -> str:
    """The equation for a person, e.g. `U_0 = B_0_0 V_0 + W_0 S`."""
    text = _signed(equation.terms, _juxtaposed)
    return f"{variable(equation.target)} = " + (f"{equation.mask}({text})" if equation.mask else text)


def _juxtaposed(term: Monomial) -> str:
    return " ".join(variable(f) + ("^T" if f.transposed else "") for f in term.factors)


def _signed(terms: Sequence[Monomial], write: Callable[[Monomial], str]) -> str:
    text = ""
    for term in terms:
        sign = " - " if term.sign < 0 else " + "
        text += (sign if text else sign.strip() if term.sign < 0 else "") + write(term)
    return text


@dataclass(frozen=True, kw_only=True)
class BlockPrinter:
    """Writes equations over the tiles of one kernel.

    accumulators: names held in fp32 registers, whose rounded copy `<variable>_low` feeds dots; all others are tiles
    of scratch, named `<variable><tile_suffix>`. A transposed printer holds accumulators transposed, in `<variable>_T`,
    and writes every equation transposed: (A U)^T = U^T A^T.
    in_two: tiles that scratch holds as a rounded part and its rest, `<variable>_rest`; they enter products in two dots.
    in_sum: tiles held in two such parts, whose rest counts where they stand alone only.
    kept_whole: accumulators that enter products as a rounded part and its rest too, `<variable>_low` and `_rest`.
    turned: tiles that scratch holds transposed, in `<variable>_T`.
    rename: block variable -> kernel variable, e.g. the leaving state overwrites the entering one.
    decay: the variable of decay_out, "" without a decay; `decay_axis` is "K" for one number per key channel.
    row_decays: vectors, by name, that tiles hold as they are, and the variable with what scales each row of them. Of a
    transposed printer: the product is scaled or, where rows are summed over, the other factor as it feeds dots, which
    is rounded to `low` again: a replay, which has no more than that, comes to the same numbers.
    """

    accumulators: frozenset[str]
    rename: Mapping[str, str]
    in_two: frozenset[str] = frozenset()
    in_sum: frozenset[str] = frozenset()
    kept_whole: frozenset[str] = frozenset()
    turned: frozenset[str] = frozenset()
    tile_suffix: str = ""
    transposed: bool = False
    decay: str = ""
    decay_axis: str = ""
    row_decays: Mapping[str, str] = field(default_factory=dict)
    low: str = ""

    def name(self, factor: Factor) -> str:
        plain = self.rename.get(variable(factor), variable(factor))
        if factor.name in self.accumulators or factor.name == "O":
            return plain + ("_T" if self.transposed else "")
        return plain + ("_T" if factor.name in self.turned else "") + self.tile_suffix

    def operand(self, factor: Factor) -> str:
        """A factor as an operand of a dot."""
        accumulator = factor.name in self.accumulators
        low = self.name(factor) + ("_low" if accumulator else "")
        held_transposed = (accumulator and self.transposed) or factor.name in self.turned
        return low if factor.transposed == held_transposed else f"tl.trans({low})"

    def right_side(self, terms: Sequence[Monomial]) -> str:
        return _signed(terms, self.monomial)

    def monomial(self, term: Monomial) -> str:
        factors = [f for f in term.factors if f.name not in DIAGONALS]
        if self.transposed:
            factors = [replace(f, transposed=not f.transposed) for f in reversed(factors)]
        code = self._product(factors)
        (diagonal, *_) = [*(f for f in term.factors if f not in factors and f.name in DIAGONALS), None]
        scale = "" if diagonal is None else self._diagonal(diagonal)
        return f"{code} * {scale}" if scale else code

    def _product(self, factors: Sequence[Factor]) -> str:
        if len(factors) == 1:
            (only,) = factors
            if only.name in self.accumulators:
                return self.name(only)
            whole = f"{self.operand(only)}.to(tl.float32)"
            return f"({whole} + {self._rest(only)}.to(tl.float32))" if only.name in self.in_sum else whole
        left, right = factors
        rows = self.row_decays.get(right.name)
        if rows and not right.transposed:
            return f"dot({self._scaled(left, rows)}, {self.operand(right)}, PRECISION)"
        return self._dots(left, right) + (f" * {rows}[None, :]" if rows else "")

    def _scaled(self, factor: Factor, rows: str) -> str:
        return f"({self.operand(factor)} * {rows}[None, :]).to({self.low})"

    def _dots(self, left: Factor, right: Factor) -> str:
        if left.name in self.kept_whole:
            low = self.operand(left)
            return f"dot_two({low}, {low.replace('_low', '_rest')}, {self.operand(right)}, PRECISION)"
        parts = [(self.operand(left), self.operand(right))]
        parts += [(self._rest(left), self.operand(right))] if left.name in self.in_two else []
        parts += [(self.operand(left), self._rest(right))] if right.name in self.in_two else []
        return " + ".join(f"dot({a}, {b}, PRECISION)" for a, b in parts)

    def _rest(self, factor: Factor) -> str:
        name = self.name(factor)
        return self.operand(factor).replace(name, f"{name.removesuffix(self.tile_suffix)}_rest{self.tile_suffix}")

    def _diagonal(self, factor: Factor) -> str:
        """The scaling that a diagonal matrix is; "" for a decay that there is not."""
        name, is_number = variable(factor), False
        if factor.name == "decay_out":
            name, is_number = self.decay, not self.decay_axis
        return name if is_number else f"{name}[None, :]" if self.transposed else f"{name}[:, None]"

    def assign(self, equation: Equation) -> str:
        return f"{self.name(equation.target)} = {self.right_side(equation.terms)}"

    def corrected(self, equation: Equation, low: str) -> list[str]:
        """An accumulator and its copy rounded to `low`; a bare tile of scratch is its own copy."""
        target = self.name(equation.target)
        (only, *more) = equation.terms
        if not more and len(only.factors) == 1 and only.sign > 0:
            factor = replace(only.factors[0], transposed=self.transposed)
            return [f"{target}_low = {self.operand(factor)}"]
        return [self.assign(equation), f"{target}_low = {target}.to({low})"]
