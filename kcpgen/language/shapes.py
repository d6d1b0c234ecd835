"""Shapes of expressions: (rows, columns) over dimension names and "1"."""

from __future__ import annotations

from collections.abc import Mapping

from kcpgen.diagnostics import Faults
from kcpgen.language.format import format_expr
from kcpgen.language.syntax import (
    SCALAR,
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
    Shape,
    Sum,
    Transpose,
)

_Binary = Sum | Difference | Product | Hadamard | Quotient


def shown(shape: Shape) -> str:
    """A shape for a person: "a scalar", "[K]", "[1, K]", "[K, V]"."""
    if shape == SCALAR:
        return "a scalar"
    rows, columns = shape
    return f"[{rows}]" if columns == "1" else f"[{rows}, {columns}]"


class ShapeChecker:
    """Computes shapes and reports what does not fit; None stands for the shape of something wrong or unknown."""

    def __init__(self, shapes: Mapping[str, Shape], faults: Faults) -> None:
        self.shapes = shapes
        self.faults = faults

    def shape(self, expr: Expr) -> Shape | None:
        match expr:
            case Number():
                return SCALAR
            case Identity():
                return ("K", "K")
            case Name():
                return self.shapes.get(expr.name)
            case Negative():
                return self.shape(expr.operand)
            case Transpose():
                inner = self.shape(expr.operand)
                return inner and (inner[1], inner[0])
            case Call():
                return self._call(expr)
            case _:
                return self._binary(expr)

    def _binary(self, expr: _Binary) -> Shape | None:
        left, right = self.shape(expr.left), self.shape(expr.right)
        if left is None or right is None:
            return None
        match expr:
            case Product():
                return self._product(expr, left, right)
            case Quotient():
                return left if right == SCALAR else self._equal(expr, left, right, "divide")
            case Hadamard():
                return self._equal(expr, left, right, "multiply elementwise")
            case Sum():
                return self._equal(expr, left, right, "add")
            case Difference():
                return self._equal(expr, left, right, "subtract")

    def _equal(self, expr: _Binary, left: Shape, right: Shape, verb: str) -> Shape | None:
        if left == right:
            return left
        hint = ""
        if left == right[::-1]:
            hint = f"transpose one of them: `{format_expr(expr.right, tight=True)}^T` would fit"
        elif isinstance(expr, Hadamard) and SCALAR in (left, right):
            hint = "a scalar multiplies without `.*`"
        elif SCALAR in (left, right) and left[0] == left[1] and right[0] == right[1]:
            hint = "a scalar times the identity is written `x I`"
        self._misfit(expr, f"cannot {verb} {shown(left)} and {shown(right)}", left, right, hint)
        return None

    def _product(self, expr: Product, left: Shape, right: Shape) -> Shape | None:
        if SCALAR in (left, right):
            return right if left == SCALAR else left
        if left[1] == right[0]:
            return (left[0], right[1])
        message = f"cannot multiply {shown(left)} by {shown(right)}"
        self._misfit(expr, message, left, right, _product_hint(expr, left, right))
        return None

    def _call(self, expr: Call) -> Shape | None:
        argument = self.shape(expr.argument)
        if argument is None:
            return None
        reduces = expr.function in ("Diag", "l2norm", "sum")
        if argument[1] == "1" and not (reduces and argument == SCALAR):
            return {"Diag": (argument[0], argument[0]), "sum": SCALAR}.get(expr.function, argument)
        message = f"`{expr.function}` takes {'a vector' if reduces else 'a scalar or a vector'}"
        label = f"this is {shown(argument)}"
        self.faults.add("KCP120", message, expr.argument.span, label=label, hint=_call_hint(expr, argument))
        return None

    def _misfit(self, expr: _Binary, message: str, left: Shape, right: Shape, hint: str) -> None:
        note = f"`{format_expr(expr.left)}` is {shown(left)}, `{format_expr(expr.right)}` is {shown(right)}"
        self.faults.add("KCP120", message, expr.span, note=note, hint=hint)


def _call_hint(expr: Call, argument: Shape) -> str:
    if expr.function == "Diag" and argument == SCALAR:
        return "a scalar multiplies the state directly, `exp(g) S[t-1]`"
    if argument[0] == "1" and isinstance(expr.argument, Transpose):
        return f"write `{expr.function}({format_expr(expr.argument.operand)})^T`"
    return ""


def _product_hint(expr: Product, left: Shape, right: Shape) -> str:
    one, two = format_expr(expr.left, tight=True), format_expr(expr.right, tight=True)
    row = format_expr(Product(span=expr.span, left=expr.left, right=Transpose(span=expr.span, operand=expr.right)))
    if left == right and left[1] == "1":
        return f"`{row}` is their outer product, `{one}^T {two}` their inner one, `{one} .* {two}` elementwise"
    if left[0] == right[0]:
        return f"`{one}^T {two}` would fit"
    if left[1] == right[1]:
        return f"`{row}` would fit"
    return ""
