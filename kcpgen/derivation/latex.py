"""A derivation as LaTeX: the update as written, its normal form, and the block equations."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from sympy.printing.latex import LatexPrinter

from kcpgen.derivation import structure
from kcpgen.derivation.blocks import Equation, Factor, Monomial
from kcpgen.derivation.normal_form import NormalForm, Term
from kcpgen.language.syntax import (
    Call,
    Difference,
    Expr,
    Hadamard,
    Identity,
    Name,
    Negative,
    Number,
    Product,
    Quotient,
    Sum,
    Transpose,
)
from kcpgen.tokenwise import symbol

BLOCKS = {
    "q_in": r"\hat{q}",
    "a_in": r"\hat{a}",
    "w_out": r"\hat{w}",
    "decay_out": r"\Gamma",
    "S_next": "S'",
    "S_ext": r"S^{\mathrm{ext}}",
    "U0": r"U^{0}",
    "Q_eff": r"Q^{\mathrm{eff}}",
}
FUNCTIONS = {
    "exp": r"\exp",
    **{name: rf"\operatorname{{{name}}}" for name in ("Diag", "sigmoid", "softplus", "sqrt", "sum", "l2norm")},
}
MASKS = {"tril": r"\operatorname{tril}", "strict_tril": r"\operatorname{tril}_{<}", "diagonal": r"\operatorname{diag}"}


class _Printer(LatexPrinter):
    """Names of several letters upright, as they are declared; Greek ones as Greek."""

    def _print_Symbol(self, expr: sympy.Symbol, style: str = "plain") -> str:
        greek = str(super()._print_Symbol(expr, style))
        upright = expr.name.replace("_", r"\_")
        return greek if len(expr.name) == 1 or greek.startswith("\\") else rf"\mathrm{{{upright}}}"


def expression(expr: sympy.Expr) -> str:
    return str(_Printer().doprint(expr))


def to_latex_document(form: NormalForm, parts: Sequence[tuple[str, Sequence[Equation]]], proof: Sequence[str]) -> str:
    """Comments name the parts; every part is an `align*` block (amsmath)."""
    spec = form.spec
    written = [
        (f"{spec.state}_t", syntax(spec.update, spec.state)),
        (f"{spec.output}_t", syntax(spec.readout, spec.state)),
    ]
    blocks = [
        _align("As written", written),
        _align("Normal form; products of vectors are elementwise", _normal_form(form)),
        _align("Operands of a chunk; G is the inclusive and X the exclusive sum of the log decays", _operands(form)),
        *(_align(heading, [(factor(e.target), _right(e)) for e in equations]) for heading, equations in parts),
        "\n".join(f"% {line}" for line in proof),
    ]
    return "\n\n".join(blocks) + "\n"


def _align(heading: str, rows: Sequence[tuple[str, str]]) -> str:
    body = " \\\\\n".join(f"  {left} &= {right}" for left, right in rows)
    return f"% {heading}\n\\begin{{align*}}\n{body}\n\\end{{align*}}"


def _normal_form(form: NormalForm) -> list[tuple[str, str]]:
    decay = form.decay
    exponent = "" if decay is None else f"e^{{{expression(decay.log)}}}"
    diagonal = rf"\operatorname{{Diag}}({exponent})\," if decay is not None and decay.axis else exponent
    written = "".join(rf" + w_{{{j}}} u_{{{j}}}^\top" for j in range(len(form.terms)))
    S = form.spec.state
    rows = [(f"{S}_t", rf"{diagonal} {S}_{{t-1}}{written}".strip())]
    for j, term in enumerate(form.terms):
        rows += _term(j, term, exponent)
    return [*rows, (f"{form.spec.output}_t", rf"{S}_t^\top \left({expression(form.read)}\right)")]


def _term(j: int, term: Term, decayed: str) -> list[tuple[str, str]]:
    value = [f"v_{{{j}}}"] if term.value != 0 else []
    erase = [rf"S_{{t-1}}^\top a_{{{j}}}"] if term.erase != 0 else []
    rows = [(f"u_{{{j}}}", " + ".join([*value, *erase])), (f"w_{{{j}}}", expression(term.write))]
    if value:
        rows.append((f"v_{{{j}}}", expression(term.value)))
    if erase:
        factor = rf"{decayed} \odot \left({expression(term.erase)}\right)"
        rows.append((f"a_{{{j}}}", factor if term.erase_reads_decayed else expression(term.erase)))
    return rows


def _operands(form: NormalForm) -> list[tuple[str, str]]:
    rows = [(_block(operand.name), _decayed(operand)) for operand in structure.operands(form)]
    rows.append((BLOCKS["decay_out"], "I" if form.decay is None else r"\operatorname{Diag}(e^{G_C})"))
    return [*rows, *(_scores(scores) for scores in structure.scores(form))]


def _decayed(operand: structure.Operand) -> str:
    vector = rf"\left({expression(operand.vector)}\right)"
    return rf"e^{{{operand.decay}}} \odot {vector}" if operand.decay else vector


def _scores(scores: structure.Scores) -> tuple[str, str]:
    left, right = (rf"\left({expression(vector)}\right)" for vector in (scores.left, scores.right))
    decay = rf" \, e^{{{scores.until}_t - G_s}}" if scores.until else ""
    order = "s < t" if scores.strict else r"s \le t"
    return rf"\left[{_block(scores.name)}\right]_{{ts}}", rf"\sum_K {left}_t {right}_s{decay}, \quad {order}"


def _block(name: str) -> str:
    """A block by its printed name, e.g. `L[0,1]`."""
    stem, _, index = name.removesuffix("]").partition("[")
    return factor(Factor(name=stem, index=tuple(map(int, index.split(","))) if index else ()))


def factor(block: Factor) -> str:
    """A block, e.g. `\\mathrm{d}U_{0}^{\\top}`."""
    name = block.name if block.name in BLOCKS else block.name.removeprefix("d")
    gradient = r"\mathrm{d}" if name != block.name else ""
    index = f"_{{{','.join(map(str, block.index))}}}" if block.index else ""
    body = f"{gradient}{BLOCKS.get(name, name)}{index}"
    return rf"{{{body}}}^\top" if block.transposed else body


def _right(equation: Equation) -> str:
    total = "".join(_signed(place, term) for place, term in enumerate(equation.terms))
    return rf"{MASKS[equation.mask]}\left({total}\right)" if equation.mask else total


def _signed(place: int, term: Monomial) -> str:
    product = r" \, ".join(map(factor, term.factors))
    sign = "-" if term.sign < 0 else "+" if place else ""
    return f" {sign} {product}" if place else f"{sign}{product}"


def syntax(expr: Expr, state: str) -> str:
    """Parsed syntax as it is written in a paper: token indices only where the state is read."""
    match expr:
        case Number():
            return expression(sympy.Rational(expr.value.numerator, expr.value.denominator))
        case Name() if expr.name == state:
            return f"{state}_{{t}}" if expr.offset == 0 else f"{state}_{{t{expr.offset:+d}}}"
        case Name():
            return expression(symbol(expr.name))
        case Identity():
            return "I"
        case Negative():
            return f"-{_factor(expr.operand, state)}"
        case Transpose():
            return rf"{{{_factor(expr.operand, state)}}}^\top"
        case Call():
            return rf"{FUNCTIONS[expr.function]}({syntax(expr.argument, state)})"
        case Sum():
            return f"{syntax(expr.left, state)} + {syntax(expr.right, state)}"
        case Difference():
            return f"{syntax(expr.left, state)} - {_factor(expr.right, state)}"
        case Product():
            return rf"{_factor(expr.left, state)} \, {_factor(expr.right, state)}"
        case Hadamard():
            return rf"{_factor(expr.left, state)} \odot {_factor(expr.right, state)}"
        case Quotient():
            return rf"\frac{{{syntax(expr.left, state)}}}{{{syntax(expr.right, state)}}}"


def _factor(expr: Expr, state: str) -> str:
    text = syntax(expr, state)
    return rf"\left({text}\right)" if isinstance(expr, Sum | Difference | Negative | Hadamard) else text
