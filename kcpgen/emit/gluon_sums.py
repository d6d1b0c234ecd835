"""Sums of products as kernels in roles work them out: a line begins each product, another waits for the sum.

Products are done in the order in which they are begun, so a wait names how many later ones may still be under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kcpgen.derivation.blocks import DIAGONALS
from kcpgen.derivation.chunk_form import Equation, Factor, Monomial
from kcpgen.emit.triton_blocks import variable
from kcpgen.emit.triton_scratch import field_of, row_decays
from kcpgen.plan import KernelPlan


@dataclass(frozen=True, kw_only=True)
class Sum:
    """An equation as it is worked out, transposed or upright: elementwise terms, then products.

    scaled: products whose sum is scaled by `scale`, and so come before the others; there is no elementwise term then.
    """

    name: str
    start: str
    products: tuple[tuple[str, str], ...]
    scaled: tuple[tuple[str, str], ...] = ()
    scale: str = ""

    @property
    def opening(self) -> tuple[tuple[str, str], ...]:
        return self.scaled or self.products

    @property
    def closing(self) -> tuple[tuple[str, str], ...]:
        """What is begun once the opening has been scaled."""
        return self.products if self.scaled else ()

    def lines(self) -> Iterator[str]:
        yield from self.beginning()
        yield from self.opened()

    def beginning(self) -> Iterator[str]:
        """To stand before any product that is under way meanwhile: ptxas would wait for it."""
        if self.start and self.start != self.name:
            yield f"{self.name} = {self.start}"

    def opened(self) -> Iterator[str]:
        begin, into = ("product", self.name) if self.start else ("fresh_product", "nothing")
        for left, right in self.opening:
            yield f"{self.name} = {begin}({left}, {right}, {into})"
            begin, into = "product", self.name

    def settled(self, later: str) -> Iterator[str]:
        """Once the opening is done but for `later` products that were begun after it."""
        if self.scaled:
            yield self.awaited(later)
            yield f"{self.name} = {self.name} * {self.scale}"

    def closed(self) -> Iterator[str]:
        for left, right in self.closing:
            yield f"{self.name} = product({left}, {right}, {self.name})"

    def awaited(self, later: str) -> str:
        return f"{self.name} = warpgroup_mma_wait({later}, deps=({self.name},))"


@dataclass(frozen=True, kw_only=True)
class Products:
    """Writes sums over the tiles of one kernel.

    state: the letter held in registers as [BV, KP], and `corrected` those held as [BV, C]; all others are tiles.
    rename: letter -> name in the kernel, as in `BlockPrinter`. in_two: tiles held in two parts, which count where they
    stand alone. upright: whether equations are worked out as they are written, not transposed (`gluon_upright`).
    """

    plan: KernelPlan
    state: str
    corrected: frozenset[str]
    rename: Mapping[str, str]
    in_two: frozenset[str] = frozenset()
    upright: bool = False

    def name(self, factor: Factor) -> str:
        return self.rename.get(variable(factor), variable(factor))

    def sum(self, equation: Equation, terms: Sequence[Monomial] | None = None, halves: bool = False) -> Sum:
        """Of all terms, or of some. halves: whether the state enters products in two parts."""
        target = self.name(equation.target) + ("" if self.upright else "_T")
        layout = self._layout(equation.target)
        operands = self._upright if self.upright else self._transposed
        start: list[str] = []
        products: list[tuple[str, str]] = []
        scaled: list[tuple[str, str]] = []
        scale = ""
        for term in equation.terms if terms is None else terms:
            factors = [f for f in term.factors if f.name not in DIAGONALS]
            if len(factors) == 1:
                start.append(self._alone(term, factors[0], layout))
                continue
            rows, _ = row_decays(self.plan).get(factors[0].name, ("", ""))
            if rows and not factors[0].transposed:
                scale = self.numbers(rows, layout)
                scaled += operands(factors[0], factors[1], layout, halves, "")
            else:
                products += operands(factors[0], factors[1], layout, halves, rows)
        return Sum(name=target, start=" + ".join(start), products=tuple(products), scaled=tuple(scaled), scale=scale)

    def numbers(self, name: str, layout: str = "of_tokens") -> str:
        """Those of tokens, to scale a sum or values by."""
        return f"{name}_tile{'.permute([1, 0])' if self.upright else ''}.load({layout})"

    def values(self, name: str, layout: str = "of_tokens") -> str:
        """A tile of values, laid out as sums are."""
        return f"{name}_tile{'' if self.upright else '.permute([1, 0])'}.load({layout})"

    def _layout(self, target: Factor) -> str:
        return "of_keys" if self.name(target) == self.state and not self.upright else "of_tokens"

    def _upright(self, left: Factor, right: Factor, layout: str, halves: bool, rows: str) -> Iterator[tuple[str, str]]:
        """Of A B. rows: what scales the rows of B."""
        first, name = turned(f"{self.name(left)}_tile", left), self.name(right)
        if name == self.state:
            yield first, f"{name}_tile"
            if halves:
                yield first, f"{name}_rest_tile"
        elif rows:
            yield first, f"{name}_staged"
        else:
            yield first, f"{name}_leaving" if variable(right) in self.corrected else f"{name}_tile"

    def _transposed(
        self, left: Factor, right: Factor, layout: str, halves: bool, rows: str
    ) -> Iterator[tuple[str, str]]:
        """Of (A B)^T = B^T A^T."""
        name, first, second = self.name(right), right.T, turned(f"{self.name(left)}_tile", left.T)
        side = "left_of_keys" if layout == "of_keys" else "left"
        if name == self.state:
            yield f"{name}_T_low", second
            if halves:
                yield f"{name}_T_rest", second
        elif variable(right) in self.corrected and rows:
            scaled = f"{name}_T_low.to(gl.float32) * {self.numbers(rows)}"
            yield f"gl.convert_layout(({scaled}).to(low), {side})", second
        elif variable(right) in self.corrected:
            yield f"gl.convert_layout({name}_T_low, {side})", second
        elif rows:
            scaled = f"{turned(f'{name}_tile', first)}.load(of_tokens).to(gl.float32) * {self.numbers(rows)}"
            yield f"gl.convert_layout(({scaled}).to(low), {side})", second
        else:
            yield turned(f"{name}_tile", first), second

    def _alone(self, term: Monomial, factor: Factor, layout: str) -> str:
        """A term of one matrix, and what scales it."""
        code = self.state if self.upright else f"{self.state}_T"
        if self.name(factor) != self.state:
            parts = [self.name(factor), *([f"{self.name(factor)}_rest"] if factor.name in self.in_two else [])]
            code = " + ".join(f"{self.values(part, layout)}.to(gl.float32)" for part in parts)
            code = f"({code})" if len(parts) > 1 else code
        for diagonal in (f for f in term.factors if f.name in DIAGONALS):
            if diagonal.name != "decay_out":
                code += f" * {self.numbers(variable(diagonal), layout)}"
            elif self.plan.decay_axis is not None:
                code += f" * decay_out_tile.load({layout})" if self.plan.decay_axis else " * decay_out"
        return code


def turned(tile: str, factor: Factor) -> str:
    return f"{tile}.permute([1, 0])" if factor.transposed else tile


def renamed(plan: KernelPlan, more: Mapping[str, str]) -> dict[str, str]:
    """Letter of the derivation -> field of scratch or input, for `Products`; and whatever else."""
    letters = ["q_in", *(f"w_out_{j}" for j in plan.terms), *(f"V_{p}" for p in plan.pure_writes)]
    return {**{letter: field_of(plan, letter) for letter in letters}, **more}
