"""A spec printed back as source: `parse(format_spec(spec))` equals the spec, positions and layout aside."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar

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
from kcpgen.spec import Bounds, Option, Param, Rewrite, Spec, TokenInput

_NOWHERE = Span(path="", line=0, column=0, end_line=0, end_column=0)
_SUM, _SIGNED, _PRODUCT, _JUXTAPOSED, _FACTOR = range(5)

T = TypeVar("T")


def without_spans(node: T) -> T:
    """A copy of a spec, or of any piece of one, in which every span, the path and the text are blank."""
    changes = {f.name: _blank(getattr(node, f.name)) for f in fields(node)}  # type: ignore[arg-type]
    if isinstance(node, Spec):
        changes |= {"path": "", "text": ""}
    return replace(node, **changes)  # type: ignore[type-var]


def _blank(value: Any) -> Any:
    if isinstance(value, Span):
        return _NOWHERE
    if isinstance(value, tuple):
        return tuple(_blank(item) for item in value)
    return without_spans(value) if is_dataclass(value) else value


def format_spec(spec: Spec) -> str:
    """The spec in canonical ASCII layout, comments lost."""
    tokens = frozenset(declared.name for declared in spec.inputs) | {spec.state}
    title = f' "{spec.title}"' if spec.title != spec.name else ""
    blocks = [
        [f"op {spec.name}{title}"],
        [_input(declared) for declared in spec.inputs],
        [_param(declared) for declared in spec.params],
        [f"constant {constant.name}" for constant in spec.constants],
        [f"flag {flag}" for flag in spec.flags],
        [f"state {spec.state} : [HV, K, V]"],
        list(equations(spec)),
        *(_option(option, tokens) for option in spec.options),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def equations(spec: Spec) -> tuple[str, str]:
    """The update and the readout, each on one line, as a comment or docstring may carry them."""
    tokens = frozenset(declared.name for declared in spec.inputs) | {spec.state}
    return (
        f"{spec.state}[t] = {format_expr(spec.update, tokens)}",
        f"{spec.output}[t] = {format_expr(spec.readout, tokens)}",
    )


def format_expr(expr: Expr, tokens: frozenset[str] = frozenset(), *, tight: bool = False) -> str:
    """An expression as source; names in `tokens` get their `[t]`, all but a single factor parentheses if `tight`."""
    return _Printer(tokens).show(expr, _FACTOR if tight else _SUM)


def format_number(value: Fraction) -> str:
    """A decimal fraction exactly, e.g. 0.5, 2 or 1e-20."""
    if value.denominator == 1:
        digits = str(value.numerator)
        zeros = len(digits) - len(digits.rstrip("0"))
        return f"{digits[:-zeros]}e{zeros}" if zeros > 6 else digits
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    digits = str((value * 10**places).numerator)
    if places > 12:
        return f"{digits}e-{places}"
    padded = digits.rjust(places + 1, "0")
    return f"{padded[:-places]}.{padded[-places:]}"


class _Printer:
    def __init__(self, tokens: frozenset[str]) -> None:
        self.tokens = tokens

    def show(self, expr: Expr, level: int) -> str:
        text, own = self._shown(expr)
        return text if own >= level else f"({text})"

    def _shown(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case Number():
                return format_number(expr.value), _FACTOR
            case Identity():
                return "I", _FACTOR
            case Name():
                return self._name(expr), _FACTOR
            case Call():
                return f"{expr.function}({self.show(expr.argument, _SUM)})", _FACTOR
            case Transpose():
                return f"{self.show(expr.operand, _FACTOR)}^T", _FACTOR
            case Negative():
                return f"-{self.show(expr.operand, _PRODUCT)}", _SIGNED
            case Sum():
                return f"{self.show(expr.left, _SUM)} + {self.show(expr.right, _PRODUCT)}", _SUM
            case Difference():
                return f"{self.show(expr.left, _SUM)} - {self.show(expr.right, _PRODUCT)}", _SUM
            case Product():
                return self._product(expr)
            case Hadamard():
                left = _FACTOR if isinstance(expr.left, Product) else _PRODUCT
                return f"{self.show(expr.left, left)} .* {self.show(expr.right, _FACTOR)}", _PRODUCT
            case Quotient():
                return f"{self.show(expr.left, _PRODUCT)} / {self.show(expr.right, _FACTOR)}", _PRODUCT

    def _product(self, expr: Product) -> tuple[str, int]:
        if _starts_with_number(expr.right):
            return f"{self.show(expr.left, _PRODUCT)} * {self.show(expr.right, _JUXTAPOSED)}", _PRODUCT
        return f"{self.show(expr.left, _JUXTAPOSED)} {self.show(expr.right, _FACTOR)}", _JUXTAPOSED

    def _name(self, name: Name) -> str:
        if name.name not in self.tokens:
            return name.name
        return f"{name.name}[t{name.offset:+d}]" if name.offset else f"{name.name}[t]"


def _starts_with_number(expr: Expr) -> bool:
    while isinstance(expr, Transpose):
        expr = expr.operand
    return isinstance(expr, Number)


def _input(declared: TokenInput) -> str:
    role = " log decay" if declared.role == "log_decay" else ""
    shape = ", ".join(filter(None, (declared.heads, declared.axis)))
    return f"token {declared.name} : [{shape}]{role}{_bounds(declared.bounds)}"


def _param(declared: Param) -> str:
    return f"param {declared.name} : [{', '.join(filter(None, ('HV', declared.axis)))}]"


def _option(option: Option, tokens: frozenset[str]) -> list[str]:
    lines = [f"option {option.name}:"]
    for variant in option.variants:
        indent = "    " if variant.when else "  "
        lines += [f"  when {variant.when}:"] if variant.when else []
        lines += [indent + _rewrite(rewrite) for rewrite in variant.rewrites]
    return lines


def _rewrite(rewrite: Rewrite) -> str:
    return f"{rewrite.target} <- {format_expr(rewrite.value)}{_bounds(rewrite.bounds)}"


def _bounds(bounds: Bounds | None) -> str:
    if bounds is None:
        return ""
    low = bounds.low_constant or _signed_number(bounds.low)
    return f" in [{low}, {_signed_number(bounds.high)}]"


def _signed_number(value: float) -> str:
    fraction = Fraction(repr(value)) if value else Fraction(0)
    return f"-{format_number(-fraction)}" if fraction < 0 else format_number(fraction)
