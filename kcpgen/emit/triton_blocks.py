"""Block equations of the derivation as Triton source: a monomial of two matrices becomes a dot, a diagonal a scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kcpgen.derivation.chunk_form import Equation, Factor, Monomial


def variable(factor: Factor) -> str:
    """`A[0]` is held in A_0, `L[1,0]` in L_1_0."""
    return "_".join([factor.name, *map(str, factor.index)])


@dataclass(frozen=True, kw_only=True)
class BlockPrinter:
    """Writes equations over the tiles of one kernel.

    accumulators: names held in fp32, whose rounded copy `<name>_low` feeds dots; all other names are tiles of scratch.
    rename: block name -> variable, e.g. the leaving state overwrites the entering one.
    decay: code that multiplies a state by decay_out, e.g. "decay[:, None]"; "" when there is no decay.
    """

    accumulators: frozenset[str]
    rename: Mapping[str, str]
    decay: str

    def name(self, factor: Factor) -> str:
        return self.rename.get(variable(factor), variable(factor))

    def operand(self, factor: Factor) -> str:
        """A factor as an operand of a dot."""
        low = self.name(factor) + ("_low" if factor.name in self.accumulators else "")
        return f"tl.trans({low})" if factor.transposed else low

    def right_side(self, terms: Sequence[Monomial]) -> str:
        text = ""
        for term in terms:
            sign = " - " if term.sign < 0 else " + "
            text += (sign if text else sign.strip() if term.sign < 0 else "") + self.monomial(term)
        return text

    def monomial(self, term: Monomial) -> str:
        factors = [f for f in term.factors if f.name != "decay_out"]
        scaled = len(factors) < len(term.factors) and self.decay
        if len(factors) == 1:
            code = self.name(factors[0]) + ("" if factors[0].name in self.accumulators else ".to(tl.float32)")
        else:
            left, right = factors
            code = f"dot({self.operand(left)}, {self.operand(right)}, PRECISION)"
        return f"{self.decay} * {code}" if scaled else code

    def assign(self, equation: Equation) -> str:
        return f"{self.name(equation.target)} = {self.right_side(equation.terms)}"

    def corrected(self, equation: Equation) -> list[str]:
        """An accumulator and its rounded copy; a bare tile of scratch is its own copy."""
        target = self.name(equation.target)
        if len(equation.terms) == 1 and len(equation.terms[0].factors) == 1 and equation.terms[0].sign > 0:
            return [f"{target}_low = {self.name(equation.terms[0].factors[0])}"]
        return [self.assign(equation), f"{target}_low = {target}.to(LOW)"]


def math(equation: Equation) -> str:
    """The equation for a person, e.g. `U_0 = U0_0 + W_0 S`."""
    def factor(f: Factor) -> str:
        return variable(f) + ("^T" if f.transposed else "")

    text = ""
    for term in equation.terms:
        sign = " - " if term.sign < 0 else " + "
        text += (sign if text else sign.strip() if term.sign < 0 else "") + " ".join(map(factor, term.factors))
    return f"{variable(equation.target)} = " + (f"{equation.mask}({text})" if equation.mask else text)
