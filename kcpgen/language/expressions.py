"""Parse tree of an expression -> syntax tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

from lark import Token, Tree

from kcpgen.diagnostics import Diagnostic
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

MAX_DIGITS = 40
MAX_OFFSET = 1000


class ExpressionBuilder:
    """Builds expressions of one file; `report` takes the faults found on the way."""

    def __init__(self, path: str, report: Callable[[Diagnostic], None]) -> None:
        self.path = path
        self.report = report

    def build(self, tree: Tree[Token]) -> Expr:
        rule: Callable[[list[Tree[Token] | Token]], Expr] = getattr(self, f"_{tree.data}")
        return rule(tree.children)

    def number(self, token: Token) -> Fraction:
        """The exact value of a numeral that a float can hold, else 1 and a diagnostic."""
        digits, _, exponent = str(token).lower().partition("e")
        if len(digits) <= MAX_DIGITS and len(exponent) <= 5:
            value = Decimal(str(token))
            if math.isfinite(float(value)) and (value == 0 or float(value) != 0):
                return Fraction(value)
        self._fault("KCP012", "number out of range", token, token, hints=("a number must fit a float64, in at most 40 digits",))
        return Fraction(1)

    def offset(self, tree: Tree[Token]) -> int:
        """The token that `[t]`, `[t-1]` or `[t+2]` reads, relative to t."""
        brackets, name, *shift, closing = tree.children
        assert isinstance(brackets, Token) and isinstance(name, Token) and isinstance(closing, Token)
        if name != "t":
            message = f"`{name}` is not the token index"
            self._fault("KCP013", message, name, name, hints=("inputs are read at `[t]`, the state at `[t-1]`",))
        if not shift:
            return 0
        sign, amount = str(shift[0]), str(shift[1])
        if not amount.isdecimal() or len(amount) > 4 or int(amount) > MAX_OFFSET:
            self._fault("KCP012", "number out of range", shift[1], shift[1], hints=("write `[t]` or `[t-1]`",))
            return 0
        return int(amount) if sign == "+" else -int(amount)

    def _expression(self, children: list[Tree[Token] | Token]) -> Expr:
        expr, *rest = self._operands(children)
        for sign, right in zip(children[1::2], rest, strict=True):
            kind = Sum if sign == "+" else Difference
            expr = kind(left=expr, right=right, span=_join(expr.span, right.span))
        return expr

    def _signed(self, children: list[Tree[Token] | Token]) -> Expr:
        *signs, operand = children
        assert isinstance(operand, Tree)
        expr = self.build(operand)
        for sign in reversed(signs):
            expr = Negative(operand=expr, span=_join(self._span(sign, sign), expr.span))
        return expr

    _operand = _signed

    def _product(self, children: list[Tree[Token] | Token]) -> Expr:
        expr, *rest = self._operands(children)
        for index, (operator, right) in enumerate(zip(children[1::2], rest, strict=True)):
            assert isinstance(operator, Token)
            if operator.type == "SLASH":
                self._check_denominator(children[2 * index + 2], right)
            kind = {"STAR": Product, "SLASH": Quotient, "HADAMARD": Hadamard}[operator.type]
            expr = kind(left=expr, right=right, span=_join(expr.span, right.span))
        return expr

    def _check_denominator(self, operand: Tree[Token] | Token, right: Expr) -> None:
        assert isinstance(operand, Tree) and isinstance(operand.children[-1], Tree)
        if len(operand.children[-1].children) > 1:
            self.report(
                Diagnostic(
                    code="KCP014",
                    message="ambiguous denominator",
                    span=right.span,
                    label="divide by all of this, or by its first factor?",
                    hints=("write `a / (b c)` or `(a / b) c`",),
                )
            )

    def _juxtaposition(self, children: list[Tree[Token] | Token]) -> Expr:
        expr, *rest = self._operands(children)
        for right in rest:
            expr = Product(left=expr, right=right, span=_join(expr.span, right.span))
        return expr

    def _factor(self, children: list[Tree[Token] | Token]) -> Expr:
        atom, *marks = children
        expr = self.build(atom) if isinstance(atom, Tree) else self._numeral(atom)
        for mark in marks:
            expr = Transpose(operand=expr, span=_join(expr.span, self._span(mark, mark)))
        return expr

    _number = _factor

    def _numeral(self, token: Token) -> Expr:
        return Number(value=self.number(token), span=self._span(token, token))

    def _read(self, children: list[Tree[Token] | Token]) -> Expr:
        name, *index = children
        span = self._span(name, index[0] if index else name)
        if name == "I" and not index:
            return Identity(span=span)
        offset = self.offset(index[0]) if index and isinstance(index[0], Tree) else 0
        return Name(name=str(name), offset=offset, indexed=bool(index), span=span)

    def _call(self, children: list[Tree[Token] | Token]) -> Expr:
        function, _, argument, closing = children
        assert isinstance(argument, Tree)
        return Call(function=str(function), argument=self.build(argument), span=self._span(function, closing))

    def _group(self, children: list[Tree[Token] | Token]) -> Expr:
        opening, inner, closing = children
        assert isinstance(inner, Tree)
        return replace(self.build(inner), span=self._span(opening, closing))

    def _operands(self, children: list[Tree[Token] | Token]) -> list[Expr]:
        return [self.build(child) for child in children if isinstance(child, Tree)]

    def _span(self, first: Tree[Token] | Token, last: Tree[Token] | Token) -> Span:
        return span_of(leaf(first, 0), leaf(last, -1), self.path)

    def _fault(self, code: str, message: str, first: Tree[Token] | Token, last: Tree[Token] | Token, hints: tuple[str, ...]) -> None:
        self.report(Diagnostic(code=code, message=message, span=self._span(first, last), hints=hints))


def leaf(tree: Tree[Token] | Token, index: int) -> Token:
    """The first (0) or last (-1) token below `tree`."""
    while isinstance(tree, Tree):
        tree = tree.children[index]
    return tree


def _join(first: Span, last: Span) -> Span:
    return replace(first, end_line=last.end_line, end_column=last.end_column)
