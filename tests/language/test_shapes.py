"""shape_of: what fits, and what is said of what does not."""

from __future__ import annotations

import pytest

from kcpgen.diagnostics import SpecError
from kcpgen.language.check import shape_of
from kcpgen.language.parser import parse_statements
from kcpgen.language.statements import Equation
from kcpgen.language.syntax import Expr, Shape

SHAPES: dict[str, Shape] = {"k": ("K", "1"), "v": ("V", "1"), "b": ("1", "1"), "S": ("K", "V")}


def expression(source: str) -> Expr:
    (statement,) = parse_statements(f"x[t] = {source}", "x.kcp")
    assert isinstance(statement, Equation)
    return statement.value


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ("k v^T", ("K", "V")),
        ("k^T k", ("1", "1")),
        ("S^T k", ("V", "1")),
        ("I - b k k^T", ("K", "K")),
        ("b S", ("K", "V")),
        ("S b", ("K", "V")),
        ("S^T", ("V", "K")),
        ("Diag(exp(k)) S", ("K", "V")),
        ("k .* k", ("K", "1")),
        ("S .* S", ("K", "V")),
        ("k / b", ("K", "1")),
        ("k / k", ("K", "1")),
        ("l2norm(k)", ("K", "1")),
        ("sum(k .* k)", ("1", "1")),
        ("softplus(b)", ("1", "1")),
        ("2 k", ("K", "1")),
        ("-(k k^T) k", ("K", "1")),
    ],
)
def test_fits(source: str, shape: Shape) -> None:
    assert shape_of(expression(source), SHAPES) == shape


@pytest.mark.parametrize(
    "source",
    [
        *("k v", "k k", "S k", "S v^T", "I - b", "k + v", "k + k^T", "b .* k", "b / k", "k / v", "Diag(b)", "Diag(S)"),
        *("exp(S)", "exp(k^T)", "l2norm(b)", "sum(b)", "sum(S)", "S Diag(k)", "k z"),
    ],
)
def test_does_not_fit(source: str) -> None:
    with pytest.raises(SpecError) as rejected:
        shape_of(expression(source), SHAPES)
    assert {diagnostic.code for diagnostic in rejected.value.diagnostics} <= {"KCP120", "KCP101"}


def test_all_misfits_are_reported_once() -> None:
    with pytest.raises(SpecError) as rejected:
        shape_of(expression("(k k) v^T + S (v v) + exp(k v)"), SHAPES)
    assert [d.span.column for d in rejected.value.diagnostics] == [8, 22, 34]
