"""The recurrence of a spec over a few tokens, as polynomials in the elements of its inputs.

Two readings of one spec, which the proof compares: the update walked as it is written, and the operands of a chunk from
the normal form. A function of a polynomial (exp, sigmoid ...) counts as a symbol of its own, so that decays multiply as
monomials; roots and quotients are powers of r = x^(-1/2), of which r^2 x = 1 is kept as a relation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
from sympy.polys.rings import sring

from kcpgen.derivation.normal_form import NormalForm
from kcpgen.derivation.polynomial import MASKS, Element, Matrix, product, total
from kcpgen.derivation.words import children
from kcpgen.language.syntax import Difference, Expr, Hadamard, Name, Negative, Product, Quotient, Sum, Transpose
from kcpgen.spec import Spec
from kcpgen.tokenwise import Local, NotLocal, RowSum, evaluate, symbol


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many tokens, key channels and value channels."""

    tokens: int
    key: int
    value: int

    def of(self, axis: str) -> int:
        return {"K": self.key, "V": self.value}.get(axis, 1)


class Elements:
    """Token-local expressions of a normal form and its spec, element by element in one polynomial ring."""

    def __init__(self, form: NormalForm, sizes: Sizes) -> None:
        self.sizes = sizes
        self._per_token = {given.name for given in form.spec.inputs}
        self._roots: dict[sympy.Expr, sympy.Symbol] = {}  # x -> r
        self._axes = form.spec.axes
        wanted = dict.fromkeys([*_normal_vectors(form), *_written_vectors(form.spec)])
        lists = {(e, axis, t): self._list(e, axis, t) for e, axis in wanted for t in range(sizes.tokens)}
        state = [symbol(f"{form.spec.state}_{k}_{v}") for k in range(sizes.key) for v in range(sizes.value)]
        relations = [root**2 * base - 1 for base, root in self._roots.items()]
        ring, polynomials = sring([*relations, *state, *(element for each in lists.values() for element in each)])
        flat = iter(polynomials)
        self.relations = [next(flat) for _ in relations]
        self.one: Element = ring.one
        self.state = Matrix.of(sizes.key, sizes.value, lambda i, j: next(flat))
        self._known = {key: [next(flat) for _ in each] for key, each in lists.items()}

    def vector(self, expr: sympy.Expr, axis: str, t: int) -> list[Element]:
        return self._known[expr, axis, t]

    def stacked(self, expr: sympy.Expr, axis: str) -> Matrix:
        """[tokens, axis]"""
        rows = [self.vector(expr, axis, t) for t in range(self.sizes.tokens)]
        return Matrix(tuple(tuple(row) for row in rows))

    def _list(self, expr: sympy.Expr, axis: str, t: int) -> list[sympy.Expr]:
        return [self._element(expr, t, i) for i in range(self.sizes.of(axis))]

    def _element(self, expr: sympy.Expr, t: int, i: int) -> sympy.Expr:
        if isinstance(expr, RowSum):
            inner, axis = expr.args
            return sympy.Add(*(self._element(inner, t, n) for n in range(self.sizes.of(axis.name))))
        if isinstance(expr, sympy.Symbol):
            token = f"_{t}" if expr.name in self._per_token else ""
            return symbol(f"{expr.name}{token}_{i}" if self._axes[expr.name] else f"{expr.name}{token}")
        if isinstance(expr, sympy.Pow):
            return self._power(self._element(expr.base, t, i), expr.exp)
        return expr.func(*(self._element(argument, t, i) for argument in expr.args)) if expr.args else expr

    def _power(self, base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
        """x^e by powers of x and r: x^(-n/2) = r^n, sqrt(x) = x r."""
        halves = 2 * exponent
        if (exponent.is_Integer and exponent > 0) or not halves.is_Integer:
            return base**exponent
        base = sympy.expand(base)
        root = self._roots.setdefault(base, sympy.Symbol(f"#root{len(self._roots)}"))
        return root**-halves if halves < 0 else base ** ((halves + 1) / 2) * root


def _normal_vectors(form: NormalForm) -> Iterator[tuple[sympy.Expr, str]]:
    yield form.read, "K"
    yield _decay(form), "K"
    for term in form.terms:
        yield from ((term.write, "K"), (term.erase, "K"), (term.value, "V"))


def _decay(form: NormalForm) -> sympy.Expr:
    return sympy.S.One if form.decay is None else sympy.exp(form.decay.log)


def _written_vectors(spec: Spec) -> Iterator[tuple[sympy.Expr, str]]:
    for root in (spec.update, spec.readout):
        yield from ((local.value, _axis(local)) for local in _pieces(root, spec))


def _pieces(expr: Expr, spec: Spec) -> Iterator[Local]:
    """The largest token-local parts of an equation; a divisor as its inverse."""
    local = _local(expr, spec)
    if local is not None:
        yield local
    elif isinstance(expr, Quotient):
        yield from _pieces(expr.left, spec)
        yield _inverse(expr.right, spec)
    else:
        for child in children(expr):
            yield from _pieces(child, spec)


def _local(expr: Expr, spec: Spec) -> Local | None:
    try:
        return evaluate(expr, spec)
    except NotLocal:
        return None


def _inverse(expr: Expr, spec: Spec) -> Local:
    divisor = evaluate(expr, spec)
    return Local(value=1 / divisor.value, shape=divisor.shape)


def _axis(local: Local) -> str:
    rows, columns = local.shape
    return rows if rows != "1" else columns if columns != "1" else ""


def recurrence(spec: Spec, elements: Elements) -> tuple[Matrix, Matrix]:
    """Outputs [tokens, V] and the last state, the equations applied token after token."""
    state, outputs = elements.state, []
    for t in range(elements.sizes.tokens):
        state = _Walk(spec, elements, t, state).matrix(spec.update)
        outputs.append(tuple(_Walk(spec, elements, t, state).matrix(spec.readout).entries))
    return Matrix(tuple(outputs)), state


@dataclass(frozen=True)
class _Walk:
    """An equation at one token, on matrices."""

    spec: Spec
    elements: Elements
    t: int
    state: Matrix

    def matrix(self, expr: Expr) -> Matrix:
        local = _local(expr, self.spec)
        if local is not None:
            return self._written(local)
        match expr:
            case Name():
                return self.state
            case Negative():
                return -self.matrix(expr.operand)
            case Transpose():
                return self.matrix(expr.operand).T
            case Sum():
                return self.matrix(expr.left) + self.matrix(expr.right)
            case Difference():
                return self.matrix(expr.left) + -self.matrix(expr.right)
            case Product():
                return _times(self.matrix(expr.left), self.matrix(expr.right))
            case Hadamard():
                return _elementwise(self.matrix(expr.left), self.matrix(expr.right))
            case Quotient():
                return _over(self.matrix(expr.left), self._written(_inverse(expr.right, self.spec)))
            case _:
                raise TypeError(f"{type(expr).__name__} has no place in a recurrence that has a normal form")

    def _written(self, local: Local) -> Matrix:
        vector = self.elements.vector(local.value, _axis(local), self.t)
        if local.diagonal:
            return _diagonal(vector)
        column = Matrix(tuple((element,) for element in vector))
        return column if local.shape[1] == "1" else column.T


def _diagonal(vector: Sequence[Element]) -> Matrix:
    return Matrix.of(len(vector), len(vector), lambda i, j: vector[i] if i == j else vector[i] * 0)


def _times(left: Matrix, right: Matrix) -> Matrix:
    if left.shape == (1, 1):
        return right.scaled(left[0, 0])
    return left.scaled(right[0, 0]) if right.shape == (1, 1) else left @ right


def _over(left: Matrix, inverse: Matrix) -> Matrix:
    return left.scaled(inverse[0, 0]) if inverse.shape == (1, 1) else _elementwise(left, inverse)


def _elementwise(left: Matrix, right: Matrix) -> Matrix:
    return Matrix.of(*left.shape, lambda i, j: left[i, j] * right[i, j])


def operands(form: NormalForm, elements: Elements) -> dict[str, Matrix]:
    """What enters the chunk's equations, from the normal form: decayed reads, erases and writes, and the scores."""
    decays = _Decays(elements.stacked(_decay(form), "K"), elements.one)
    tokens, key = elements.sizes.tokens, elements.sizes.key
    read = elements.stacked(form.read, "K")
    blocks = {
        "S": elements.state,
        "q_in": decays.until(read, 1),
        "decay_out": _diagonal([decays.over(range(tokens), k) for k in range(key)]),
    }
    for j, term in enumerate(form.terms):
        write = elements.stacked(term.write, "K")
        blocks[f"w_out[{j}]"] = decays.after(write)
        blocks[f"A[{j}]"] = decays.scores(read, write, 1).where(MASKS["tril"])
        blocks[f"V[{j}]"] = elements.stacked(term.value, "V")
    for i in form.erasing:
        erase, last = elements.stacked(form.terms[i].erase, "K"), 1 if form.terms[i].erase_reads_decayed else 0
        blocks[f"a_in[{i}]"] = decays.until(erase, last)
        for j, term in enumerate(form.terms):
            scores = decays.scores(erase, elements.stacked(term.write, "K"), last)
            blocks[f"L[{i},{j}]"] = scores.where(MASKS["strict_tril"])
    return blocks


@dataclass(frozen=True)
class _Decays:
    """Products of decays over ranges of tokens: exp(G_t - G_s) without a division."""

    factors: Matrix
    one: Element

    def over(self, tokens: range, channel: int) -> Element:
        return product((self.factors[t, channel] for t in tokens), self.one)

    def until(self, vectors: Matrix, last: int) -> Matrix:
        """Decayed from the start of the chunk, token t's own decay included (last = 1) or not (last = 0)."""
        return Matrix.of(*vectors.shape, lambda t, k: vectors[t, k] * self.over(range(t + last), k))

    def after(self, vectors: Matrix) -> Matrix:
        """Decayed to the end of the chunk."""
        tokens = len(vectors.rows)
        return Matrix.of(*vectors.shape, lambda s, k: vectors[s, k] * self.over(range(s + 1, tokens), k))

    def scores(self, left: Matrix, right: Matrix, last: int) -> Matrix:
        """sum_k left[t,k] right[s,k] and the decays after s, up to t (last = 1) or before t (last = 0)."""
        tokens, channels = len(left.rows), range(len(left.rows[0]))
        return Matrix.of(
            tokens,
            tokens,
            lambda t, s: total(left[t, k] * right[s, k] * self.over(range(s + 1, t + last), k) for k in channels),
        )
