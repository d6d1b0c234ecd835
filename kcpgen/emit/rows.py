"""Prints derived expressions as torch code on rows: a vector is [.., T, n], a scalar [.., T, 1], one row a token.

Token-local expressions come from sympy, block equations from the chunk form; both print as they read on paper.
"""

from __future__ import annotations

from fractions import Fraction
from functools import reduce

import sympy

from kcpgen.derivation.chunk_form import Equation, Factor, Monomial
from kcpgen.emit.code import ATOM, UNARY, Code, add, attribute, binary, call, negative, number
from kcpgen.tokenwise import RowSum, sigmoid, softplus

FUNCTIONS = {sympy.exp: "exp", sigmoid: "sigmoid", softplus: "softplus"}
TOTAL = ".sum(-1, keepdim=True)"


def expression(expr: sympy.Expr) -> Code:
    """A token-local expression over the names of a spec."""
    if isinstance(expr, sympy.Symbol):
        return Code(expr.name)
    if isinstance(expr, sympy.Rational):
        return number(Fraction(int(expr.p), int(expr.q)))
    if not expr.free_symbols and not expr.has(RowSum):
        return number(Fraction(float(expr)))
    if isinstance(expr, RowSum):
        return attribute(expression(expr.args[0]), TOTAL)
    if isinstance(expr, sympy.Add):
        return reduce(add, map(expression, _positive_first(expr.as_ordered_terms())))
    if isinstance(expr, sympy.Mul):
        return _product(expr)
    if isinstance(expr, sympy.Pow):
        return _power(expr.base, expr.exp)
    if type(expr) in FUNCTIONS:
        return call(FUNCTIONS[type(expr)], expression(expr.args[0]))
    raise TypeError(f"no torch form of {type(expr).__name__}: {expr}")


def functions_in(expr: sympy.Expr) -> frozenset[str]:
    """The functions that printing an expression will call."""
    found = {FUNCTIONS[type(node)] for node in sympy.preorder_traversal(expr) if type(node) in FUNCTIONS}
    roots = {"sqrt" for node in expr.atoms(sympy.Pow) if not node.exp.is_Integer}
    return frozenset(found | roots)


def _positive_first(terms: list[sympy.Expr]) -> list[sympy.Expr]:
    return sorted(terms, key=lambda term: bool(term.could_extract_minus_sign()))


def _product(expr: sympy.Mul) -> Code:
    coefficient, rest = expr.as_coeff_Mul()
    if coefficient.is_negative:
        return negative(expression(-expr))
    factors = list(rest.as_ordered_factors()) if rest.is_Mul else [rest]
    divisors = [factor for factor in factors if _divides(factor)]
    multipliers = [expression(factor) for factor in factors if factor not in divisors]
    if coefficient != 1 or not multipliers:
        multipliers.insert(0, expression(coefficient))
    result = reduce(lambda left, right: binary(left, "*", right), multipliers)
    return reduce(lambda left, factor: binary(left, "/", expression(1 / factor)), divisors, result)


def _divides(factor: sympy.Expr) -> bool:
    return isinstance(factor, sympy.Pow) and bool(factor.exp.is_negative)


def _power(base: sympy.Expr, exponent: sympy.Expr) -> Code:
    if not exponent.is_Rational:
        raise TypeError(f"no torch form of the power {exponent}")
    if exponent.is_negative:
        return binary(Code("1"), "/", expression(base**-exponent))
    root = expression(base)
    while not exponent.is_Integer:  # the language has square roots only: denominators are powers of two
        root, exponent = call("sqrt", root), 2 * exponent
    return root if exponent == 1 else Code(f"{root.at(ATOM)}**{exponent}", UNARY)


def variable(factor: Factor) -> str:
    """The name of a block quantity, e.g. `A_0`."""
    return "_".join([factor.name, *map(str, factor.index)])


def equation(derived: Equation, *, decays: bool) -> str:
    """One statement, e.g. `S_next = decay_out * S + w_out_0.mT @ U_0`; `decay_out` is a column that scales rows."""
    terms = [_monomial(term, decays) for term in derived.terms]
    return f"{variable(derived.target)} = {reduce(add, terms).text}"


def _monomial(term: Monomial, decays: bool) -> Code:
    factors = [factor for factor in term.factors if decays or factor.name != "decay_out"]
    product = reduce(lambda left, right: _times(left, right), map(_factor, factors))
    return negative(product) if term.sign < 0 else product


def _factor(factor: Factor) -> Code:
    return Code(f"{variable(factor)}.mT" if factor.transposed and factor.name != "decay_out" else variable(factor))


def _times(left: Code, right: Code) -> Code:
    return binary(left, "*" if left.text == "decay_out" else "@", right)
