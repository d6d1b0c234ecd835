"""The recurrence of a spec over a few tokens, as polynomials in the elements of its inputs.

Two readings of one spec, which the proof compares: the equations walked as they are written, and the operands of a
chunk from the normal form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kcpgen.derivation.elements import Elements, decay_factor, inverse_of, local_axis, local_part
from kcpgen.derivation.normal_form import NormalForm
from kcpgen.derivation.polynomial import MASKS, Element, Matrix, product, total
from kcpgen.language.syntax import Difference, Expr, Hadamard, Name, Negative, Product, Quotient, Sum, Transpose
from kcpgen.spec import Spec
from kcpgen.tokenwise import Local


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
        local = local_part(expr, self.spec)
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
                return _over(self.matrix(expr.left), self._written(inverse_of(expr.right, self.spec)))
            case _:
                raise TypeError(f"{type(expr).__name__} has no place in a recurrence that has a normal form")

    def _written(self, local: Local) -> Matrix:
        vector = self.elements.vector(local.value, local_axis(local), self.t)
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
    decays = _Decays(elements.stacked(decay_factor(form), "K"), elements.one)
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
