"""A proof by polynomial identity that the chunk form is the recurrence, and that its adjoints are its derivatives.

Exact at the sizes it is given. The equations do not depend on C, K and V, and a chunk of three tokens uses every
product in them more than once. What it cannot see is rounding; that is for the numeric comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sympy import ZZ
from sympy.polys.rings import ring

from kcpgen.derivation.blocks import Factor
from kcpgen.derivation.chunk_form import ChunkForm
from kcpgen.derivation.elements import Elements, Sizes
from kcpgen.derivation.polynomial import MASKS, Element, Matrix, evaluated, nilpotent_inverse, total, value_of
from kcpgen.derivation.unroll import operands, recurrence


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One claim: two matrices of polynomials are equal. `monomials` counts the terms compared."""

    claim: str
    monomials: int
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Proof:
    tokens: int
    key: int
    value: int
    identities: tuple[Identity, ...]

    @property
    def holds(self) -> bool:
        return all(identity.holds for identity in self.identities)

    @property
    def monomials(self) -> int:
        return sum(identity.monomials for identity in self.identities)


def prove(form: ChunkForm, tokens: int = 3, key: int = 2, value: int = 1) -> Proof:
    """Compare a chunk of `tokens` with the unrolled recurrence, and every adjoint with the derivative it claims to be.

    Takes seconds at the default sizes and grows fast with each of them.
    """
    sizes = Sizes(tokens=tokens, key=key, value=value)
    identities = (*_forward(form, sizes), *_backward(form, sizes))
    return Proof(tokens=tokens, key=key, value=value, identities=identities)


def _forward(form: ChunkForm, sizes: Sizes) -> Iterator[Identity]:
    """The recurrence as the spec writes it, against what the chunk computes from the normal form."""
    elements = Elements(form.normal_form, sizes)
    outputs, last = recurrence(form.normal_form.spec, elements)
    chunk = _solved(form, operands(form.normal_form, elements), elements.one)
    given = elements.relations
    yield _identity("O", chunk["O"], outputs, given)
    yield _identity("S_next", chunk["S_next"], last, given)
    yield _identity("M S + S_ext", chunk["M"] @ chunk["S"] + chunk["S_ext"], last, given)
    for equation in form.implicit:
        yield _identity(f"implicit {equation.target}", value_of(equation, chunk), chunk[str(equation.target)])


def _solved(form: ChunkForm, given: Mapping[str, Matrix], one: Element) -> dict[str, Matrix]:
    erasing = form.normal_form.erasing
    L = {(i, e): given[str(Factor(name="L", index=(i, e)))] for i in erasing for e in erasing}
    return evaluated((*form.solved, *form.summary), {**given, **nilpotent_inverse(L, erasing, one)})


def _backward(form: ChunkForm, sizes: Sizes) -> Iterator[Identity]:
    """Every gradient against the derivative of <dO, O> + <dS_next, S_next>, the chunk's operands as free symbols."""
    free = _Free(form, sizes)
    chunk = _solved(form, free.blocks, free.one)
    loss = total(_inner(chunk[name], chunk[f"d{name}"]) for name in ("O", "S_next"))
    for part in ((*form.reverse_scan, *form.gradients), form.summary_adjoint):
        known = evaluated(part, chunk)
        for target in (str(equation.target) for equation in part):
            if (name := target.removeprefix("d")) in free.variable:
                yield _identity(target, known[target], free.derivative(loss, name))


class _Free:
    """Operands, entering state and incoming gradients of a chunk, every entry a symbol where its mask has one."""

    def __init__(self, form: ChunkForm, sizes: Sizes) -> None:
        shapes = dict(_shapes(form, sizes))
        places = [(n, i, j) for n, (h, w) in shapes.items() for i in range(h) for j in range(w) if _mask(n)(i, j)]
        polynomials, *symbols = ring([f"{n}_{i}_{j}" for n, i, j in places], ZZ)
        self.one = polynomials.one
        self.variable = {name: dict[tuple[int, int], Element]() for name in shapes}
        for (name, i, j), symbol in zip(places, symbols, strict=True):
            self.variable[name][i, j] = symbol
        self._zero = polynomials.zero
        self.blocks = {name: self._block(name, shape) for name, shape in shapes.items()}

    def _block(self, name: str, shape: tuple[int, int]) -> Matrix:
        return Matrix.of(*shape, lambda i, j: self.variable[name].get((i, j), self._zero))

    def derivative(self, loss: Element, name: str) -> Matrix:
        at = self.variable[name]
        return Matrix.of(*self.blocks[name].shape, lambda i, j: loss.diff(at[i, j]) if (i, j) in at else loss * 0)


def _shapes(form: ChunkForm, sizes: Sizes) -> Iterator[tuple[str, tuple[int, int]]]:
    tokens, key, value = sizes.tokens, sizes.key, sizes.value
    yield from (("S", (key, value)), ("q_in", (tokens, key)), ("decay_out", (key, key)))
    yield from (("dO", (tokens, value)), ("dS_next", (key, value)))
    for j, term in enumerate(form.normal_form.terms):
        yield from ((f"w_out[{j}]", (tokens, key)), (f"A[{j}]", (tokens, tokens)))
        if term.value != 0:
            yield f"V[{j}]", (tokens, value)
    for i in form.normal_form.erasing:
        yield f"a_in[{i}]", (tokens, key)
        yield from ((f"L[{i},{j}]", (tokens, tokens)) for j in range(len(form.normal_form.terms)))


def _mask(name: str) -> Callable[[int, int], bool]:
    kinds = {"A": "tril", "L": "strict_tril", "decay_out": "diagonal"}
    return MASKS[kinds.get(name.split("[")[0], "")]


def _inner(left: Matrix, right: Matrix) -> Element:
    return total(a * b for a, b in zip(left.entries, right.entries, strict=True))


def _identity(claim: str, found: Matrix, expected: Matrix, relations: Sequence[Element] = ()) -> Identity:
    monomials = sum(len(entry) for entry in expected.entries)
    holds = found.shape == expected.shape and all(map(partial(_equal, relations), found.entries, expected.entries))
    return Identity(claim=claim, monomials=monomials, holds=holds)


def _equal(relations: Sequence[Element], a: Element, b: Element) -> bool:
    """Equal as polynomials, or modulo what the relations say of roots and quotients."""
    difference = a - b
    return bool(difference == 0 or (relations and difference.rem(list(relations)) == 0))
