"""Parse tree of an expression -> syntax tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

from lark import Token, Tree

from kcpgen.diagnostics import Faults
from kcpgen.language.lexer import span_of
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
    Span,
    Sum,
    Transpose,
)

Children: TypeAlias = list[Tree[Token] | Token]
MAX_DIGITS = 40
_PRODUCTS: dict[str, type[Product] | type[Quotient] | type[Hadamard]] = {
    "STAR": Product,
    "SLASH": Quotient,
    "HADAMARD": Hadamard,
}


class ExpressionBuilder:
    """Builds expressions of one file; what is wrong but readable goes to `faults`."""

    def __init__(self, path: str, faults: Faults) -> None:
        self.path = path
        self.faults = faults

    def build(self, tree: Tree[Token]) -> Expr:
        rule: Callable[[Children], Expr] = getattr(self, f"_{tree.data}")
        return rule(tree.children)

    def number(self, token: Token) -> Fraction:
        """The exact value of a numeral that a float can hold, else 1 and a diagnostic."""
        digits, _, exponent = str(token).lower().partition("e")
        if len(digits) <= MAX_DIGITS and len(exponent) <= 5:
            value = Decimal(str(token))
            if math.isfinite(float(value)) and (value == 0 or float(value) != 0):
                return Fraction(value)
        note = f"a number fits a float64 and has at most {MAX_DIGITS} digits"
        self.faults.add("KCP012", "number out of range", self._span(token, token), note=note)
        return Fraction(1)

    def offset(self, tree: Tree[Token]) -> int:
        """The token that `[t]`, `[t-1]` or `[t+2]` reads, relative to t."""
        _, name, *shift, _ = tree.children
        if name != "t":
            hint = "inputs are read at `[t]`, the state at `[t-1]`"
            self.faults.add("KCP013", f"`{name}` is not the token index", self._span(name, name), hint=hint)
        if not shift:
            return 0
        sign, amount = shift
        if not str(amount).isdecimal() or len(str(amount)) > 4:
            span = self._span(amount, amount)
            self.faults.add("KCP012", "number out of range", span, note="an index is `t` plus or minus a small integer")
            return 0
        assert isinstance(sign, Token)
        return int(str(amount)) if sign.type == "PLUS" else -int(str(amount))

    def _expression(self, children: Children) -> Expr:
        expr, *rest = self._operands(children)
        for sign, right in zip(children[1::2], rest, strict=True):
            assert isinstance(sign, Token)
            made: type[Sum] | type[Difference] = Sum if sign.type == "PLUS" else Difference
            expr = made(left=expr, right=right, span=_join(expr.span, right.span))
        return expr

    def _signed(self, children: Children) -> Expr:
        *signs, operand = children
        assert isinstance(operand, Tree)
        expr = self.build(operand)
        for sign in reversed(signs):
            expr = Negative(operand=expr, span=_join(self._span(sign, sign), expr.span))
        return expr

    _operand = _signed

    def _product(self, children: Children) -> Expr:
        expr, *rest = self._operands(children)
        for index, (operator, right) in enumerate(zip(children[1::2], rest, strict=True)):
            assert isinstance(operator, Token)
            if operator.type == "SLASH":
                self._check_denominator(children[2 * index + 2], right)
            expr = _PRODUCTS[operator.type](left=expr, right=right, span=_join(expr.span, right.span))
        return expr

    def _check_denominator(self, operand: Tree[Token] | Token, right: Expr) -> None:
        assert isinstance(operand, Tree)
        juxtaposed = operand.children[-1]
        assert isinstance(juxtaposed, Tree)
        if len(juxtaposed.children) > 1:
            label = "is all of this the denominator, or its first factor?"
            hint = "write `a / (b c)` or `(a / b) c`"
            self.faults.add("KCP014", "ambiguous denominator", right.span, label=label, hint=hint)

    def _juxtaposition(self, children: Children) -> Expr:
        expr, *rest = self._operands(children)
        for right in rest:
            expr = Product(left=expr, right=right, span=_join(expr.span, right.span))
        return expr

    def _factor(self, children: Children) -> Expr:
        atom, *marks = children
        expr = self.build(atom) if isinstance(atom, Tree) else self._numeral(atom)
        for mark in marks:
            expr = Transpose(operand=expr, span=_join(expr.span, self._span(mark, mark)))
        return expr

    _number = _factor

    def _numeral(self, token: Token) -> Expr:
        return Number(value=self.number(token), span=self._span(token, token))

    def _read(self, children: Children) -> Expr:
        name, *index = children
        span = self._span(name, index[0] if index else name)
        if name == "I":
            if index:
                self.faults.add("KCP106", "the identity has no token index", span, hint="write `I`")
            return Identity(span=span)
        offset = self.offset(index[0]) if index and isinstance(index[0], Tree) else 0
        return Name(name=str(name), offset=offset, indexed=bool(index), span=span)

    def _call(self, children: Children) -> Expr:
        function, _, argument, closing = children
        assert isinstance(argument, Tree)
        return Call(function=str(function), argument=self.build(argument), span=self._span(function, closing))

    def _group(self, children: Children) -> Expr:
        opening, inner, closing = children
        assert isinstance(inner, Tree)
        return replace(self.build(inner), span=self._span(opening, closing))

    def _operands(self, children: Children) -> list[Expr]:
        return [self.build(child) for child in children if isinstance(child, Tree)]

    def _span(self, first: Tree[Token] | Token, last: Tree[Token] | Token) -> Span:
        return span_of(leaf(first, 0), leaf(last, -1), self.path)


def leaf(tree: Tree[Token] | Token, index: int) -> Token:
    """The first (0) or last (-1) token below `tree`."""
    while isinstance(tree, Tree):
        tree = tree.children[index]
    return tree


def _join(first: Span, last: Span) -> Span:
    return replace(first, end_line=last.end_line, end_column=last.end_column)
