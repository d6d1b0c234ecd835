"""Python source of an expression, with the precedence that says where it needs parentheses."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

SUM, PRODUCT, UNARY, ATOM = range(4)


@dataclass(frozen=True)
class Code:
    text: str
    level: int = ATOM

    def at(self, level: int) -> str:
        """The text as an operand that must bind at least as tightly as `level`."""
        return self.text if self.level >= level else f"({self.text})"

    @property
    def negated(self) -> Code | None:
        """What a leading minus stands before, if there is one: a - b reads better than a + -b."""
        return Code(self.text[1:], PRODUCT) if self.text.startswith("-") and self.level in (PRODUCT, UNARY) else None


def number(value: Fraction) -> Code:
    if value < 0:
        return negative(number(-value))
    if value.denominator == 1:
        return Code(str(value.numerator))
    if Fraction(repr(float(value))) == value:
        return Code(repr(float(value)))
    return Code(f"{value.numerator} / {value.denominator}", PRODUCT)


def negative(x: Code) -> Code:
    if x.negated is not None:
        return x.negated
    return Code(f"-{x.at(PRODUCT)}", PRODUCT if x.level == PRODUCT else UNARY)


def add(left: Code, right: Code) -> Code:
    if right.negated is not None:
        return Code(f"{left.text} - {right.negated.text}", SUM)
    return Code(f"{left.text} + {right.text}", SUM)


def subtract(left: Code, right: Code) -> Code:
    if right.negated is not None:
        return Code(f"{left.text} + {right.negated.text}", SUM)
    return Code(f"{left.text} - {right.at(PRODUCT)}", SUM)


def binary(left: Code, operator: str, right: Code) -> Code:
    """A product or quotient. They group to the left, so a product on the right keeps its parentheses."""
    return Code(f"{left.at(PRODUCT)} {operator} {right.at(UNARY)}", PRODUCT)


def call(function: str, *arguments: Code | str) -> Code:
    return Code(f"{function}({', '.join(x.text if isinstance(x, Code) else x for x in arguments)})")


def attribute(x: Code, text: str) -> Code:
    return Code(f"{x.at(ATOM)}{text}")
