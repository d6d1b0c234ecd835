"""Whatever the text, a spec is accepted or rejected with a SpecError that can be shown; an accepted one prints back."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kcpgen.diagnostics import CODES, SpecError
from kcpgen.language import format_spec, load, parse
from kcpgen.language.format import format_expr, without_spans
from kcpgen.language.parser import parse_statements
from kcpgen.language.statements import Equation
from kcpgen.language.syntax import Expr
from kcpgen.spec import Spec

ROOT = Path(__file__).resolve().parents[2]
GOOD = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "specs").glob("*.kcp"))]
BAD = [path.read_text(encoding="utf-8", errors="replace") for path in sorted((ROOT / "tests/bad_specs").glob("*.kcp"))]
FRAGMENTS = (
    *(
        "op",
        "token",
        "param",
        "constant",
        "flag",
        "state",
        "option",
        "when",
        "in",
        "log decay",
        "x",
        "q",
        "k",
        "v",
        "g",
    ),
    *(
        "S",
        "S[t-1]",
        "S[t]",
        "[t]",
        "[t+1]",
        "β",
        "λ",
        "I",
        "E",
        "N",
        "t",
        "scale",
        "exp",
        "Diag",
        "l2norm",
        "sum",
        "(",
        ")",
    ),
    *("[", "]", "[H, K]", "[HV, V]", "[HV, K, V]", "^T", "ᵀ", "⊙", ".*", "*", "/", "+", "-", "−", "<-", "=", ":", ","),
    *(
        "1",
        "0.5",
        "1e999",
        "1e-5",
        '"',
        '"title"',
        "#",
        "\n",
        "\n",
        "\n",
        " ",
        "\t",
        "\r",
        "é",
        "k̂",
        "\u200b",
        "\0",
        "\ud800",
    ),
)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def verdict(text: str) -> Spec | SpecError:
    """Anything else than a SpecError fails the test."""
    try:
        return parse(text, "fuzz.kcp")
    except SpecError as error:
        return error


def check(text: str) -> None:
    spec = verdict(text)
    if isinstance(spec, SpecError):
        assert {diagnostic.code for diagnostic in spec.diagnostics} <= CODES.keys()
        assert str(spec).startswith("error[KCP")
        return
    again = parse(format_spec(spec), "again.kcp")
    assert without_spans(again) == without_spans(spec)
    assert format_spec(again) == format_spec(spec)


@quick
@given(st.text(alphabet=st.characters(), max_size=300))
@example("(" * 5000)
@example("S[t] = " + "(" * 5000)
@example("S[t] = " + "-" * 5000 + "k")
@example("S[t] = k" + "^T" * 5000)
@example("S[t] = " + "k " * 5000)
@example("k[" * 3000)
@example("S[t] = " + "9" * 6000)
@example("S[t] = 1e" + "9" * 6000)
@example("S[t] = 1e-99999999 k")
@example("op " + "x" * 9000)
@example("option " * 2000)
@example("\n" * 10000 + "x")
@example("\ufeffop x")
def test_any_text(text: str) -> None:
    check(text)


@quick
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=80), st.sampled_from(["", " "]))
def test_fragments(fragments: list[str], between: str) -> None:
    check(between.join(fragments))


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A spec with a few pieces deleted, replaced, inserted or copied from another one."""
    text = draw(st.sampled_from(GOOD + BAD))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        other = draw(st.sampled_from(GOOD))
        origin = draw(st.integers(0, len(other)))
        piece = draw(st.sampled_from(FRAGMENTS) | st.just(other[origin : origin + 20]) | st.just(""))
        text = text[:start] + piece + text[end:]
    return text


@quick
@given(mutated())
def test_mutated_specs(text: str) -> None:
    check(text)


@quick
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.kcp"
        path.write_bytes(data)
        with pytest.raises(SpecError):
            load(path)


def expressions() -> st.SearchStrategy[str]:
    """Source of expressions in every spelling, without regard to shapes."""
    atoms = st.sampled_from(["k", "k[t]", "S[t-1]", "β", "I", "2", "0.5", "1e-20", "3e30", "1234567000000", "scale"])

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        operators = st.sampled_from([" ", " * ", " .* ", " ⊙ ", " / ", " + ", " - ", " + -", " * -"])
        pairs = st.tuples(inner, operators, inner).map("".join)
        wrapped = st.sampled_from(["({})", "({})^T", "exp({})", "-{}", "{}ᵀ"])
        return pairs | pairs.map("({})".format) | st.tuples(wrapped, inner).map(lambda pair: pair[0].format(pair[1]))

    return st.recursive(atoms, grow, max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(expressions())
def test_expressions_print_back(source: str) -> None:
    try:
        expr = expression(source)
    except SpecError:
        return  # two numbers side by side, an ambiguous denominator
    assert without_spans(expression(format_expr(expr, frozenset("kS")))) == without_spans(expr)


def expression(source: str) -> Expr:
    (statement,) = parse_statements(f"x[t] = {source}", "fuzz.kcp")
    assert isinstance(statement, Equation)
    return statement.value
