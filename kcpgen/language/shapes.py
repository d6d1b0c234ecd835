"""Shapes of expressions: (rows, columns) over dimension names and "1"."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kcpgen.diagnostics import Diagnostic
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

_SAME = "the two sides must have one shape"


def shown(shape: Shape) -> str:
    """A shape for a person: "a scalar", "[K]", "[1, K]", "[K, V]"."""
    if shape == SCALAR:
        return "a scalar"
    rows, columns = shape
    return f"[{rows}]" if columns == "1" else f"[{rows}, {columns}]"


class ShapeChecker:
    """Computes shapes and reports what does not fit; None stands for the shape of something wrong or unknown."""

    def __init__(self, shapes: Mapping[str, Shape], report: Callable[[Diagnostic], None]) -> None:
        self.shapes = shapes
        self.report = report

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

    def _binary(self, expr: Sum | Difference | Product | Hadamard | Quotient) -> Shape | None:
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

    def _equal(self, expr: Sum | Difference | Hadamard | Quotient, left: Shape, right: Shape, verb: str) -> Shape | None:
        if left == right:
            return left
        hints: tuple[str, ...] = ()
        if (right[1], right[0]) == left:
            hints = (f"one of them is transposed: `({format_expr(expr.right)})^T` would fit",)
        elif isinstance(expr, Hadamard) and SCALAR in (left, right):
            hints = ("a scalar multiplies without `.*`",)
        elif SCALAR in (left, right) and left[0] == left[1] and right[0] == right[1]:
            hints = ("a scalar times the identity is written `x I`",)
        self._misfit(expr, f"cannot {verb} {shown(left)} and {shown(right)}", left, right, hints)
        return None

    def _product(self, expr: Product, left: Shape, right: Shape) -> Shape | None:
        if left == SCALAR:
            return right
        if right == SCALAR:
            return left
        if left[1] == right[0]:
            return (left[0], right[1])
        message = f"cannot multiply {shown(left)} by {shown(right)}"
        self._misfit(expr, message, left, right, _product_hints(expr, left, right))
        return None

    def _call(self, expr: Call) -> Shape | None:
        argument = self.shape(expr.argument)
        if argument is None:
            return None
        rows, columns = argument
        needs = "a vector" if expr.function in ("Diag", "l2norm", "sum") else "a scalar or a vector"
        if columns != "1" or (rows == "1" and needs == "a vector"):
            self._misfit_call(expr, argument, needs)
            return None
        return {"Diag": (rows, rows), "sum": SCALAR}.get(expr.function, argument)

    def _misfit_call(self, expr: Call, argument: Shape, needs: str) -> None:
        hints = ()
        if expr.function == "Diag" and argument == SCALAR:
            hints = ("a scalar multiplies the state directly, `exp(g) S[t-1]`",)
        elif argument[0] == "1" and argument != SCALAR:
            hints = (f"write `{expr.function}({_untransposed(expr.argument)})` and transpose the result",)
        label = f"this is {shown(argument)}"
        message = f"`{expr.function}` takes {needs}"
        self.report(Diagnostic(code="KCP120", message=message, span=expr.argument.span, label=label, hints=hints))

    def _misfit(self, expr: _Binary, message: str, left: Shape, right: Shape, hints: tuple[str, ...]) -> None:
        notes = (
            f"`{format_expr(expr.left)}` is {shown(left)}",
            f"`{format_expr(expr.right)}` is {shown(right)}",
        )
        self.report(Diagnostic(code="KCP120", message=message, span=expr.span, notes=notes, hints=hints))


_Binary = Sum | Difference | Product | Hadamard | Quotient


def _untransposed(expr: Expr) -> str:
    return format_expr(expr.operand if isinstance(expr, Transpose) else expr)


def _product_hints(expr: Product, left: Shape, right: Shape) -> tuple[str, ...]:
    one, two = format_expr(expr.left, tight=True), format_expr(expr.right, tight=True)
    if left == right and left[1] == "1":
        return (f"`{one} {two}^T` is their outer product, `{one}^T {two}` their inner product, `{one} .* {two}` elementwise",)
    if left[0] == right[0]:
        return (f"`{one}^T {two}` would fit",)
    if left[1] == right[1]:
        return (f"`{one} {two}^T` would fit",)
    return ()
