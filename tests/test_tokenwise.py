"""Token-local expressions: from syntax, split, and differentiated, against torch autograd in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import sympy
import torch

sys.path.insert(0, str(Path(__file__).parent / "derivation"))
import witness
from made_specs import SHIPPED, shipped

from kcpgen import tokenwise as tw
from kcpgen.diagnostics import SpecError
from kcpgen.language import parse
from kcpgen.spec import Spec

AXES = {"k": "K", "p": "K", "v": "V", "beta": "", "g": "", "dy": ""}
beta, g, k, p, v = map(tw.symbol, ("beta", "g", "k", "p", "v"))
norm = sympy.sqrt(tw.row_sum(k**2, "K") + sympy.Rational(1, 10**6))


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (-beta * k, (-beta, k)),
        (beta * sympy.exp(g), (beta * sympy.exp(g), 1)),
        (-beta * k - beta * p, (-beta, k + p)),
        (2 * k - 3 * p, None),
        (k + beta * p, (1, k + beta * p)),
        (k / norm, (1 / norm, k)),
        (sympy.exp(g + k), (sympy.exp(g), sympy.exp(k))),
        ((1 + beta) * k, (1 + beta, k)),
        (tw.row_sum(k * p, "K") * v, (tw.row_sum(k * p, "K"), v)),
        (sympy.Integer(3), (3, 1)),
    ],
)
def test_split_scalar(expr: sympy.Expr, expected: tuple[sympy.Expr, sympy.Expr] | None) -> None:
    coefficient, base = tw.split_scalar(expr, AXES)
    assert tw.axis_of(coefficient, AXES) == ""
    assert sympy.expand(coefficient * base - expr) == 0
    if expected is not None:
        assert (coefficient, base) == expected


def test_vectors_up_to_a_scalar_share_their_base() -> None:
    bases = {tw.split_scalar(c * (k - 2 * p), AXES)[1] for c in (sympy.Integer(1), -beta, sympy.Integer(2), g)}
    assert len(bases) == 1


def test_axis_of() -> None:
    assert [tw.axis_of(e, AXES) for e in (beta, beta * k, norm, v / norm)] == ["", "K", "", "V"]
    with pytest.raises(ValueError, match="K and V"):
        tw.axis_of(k * v, AXES)


CASES = {
    "scalar product": -beta * k,
    "gate": beta * sympy.exp(g) * k,
    "functions": tw.sigmoid(beta) * tw.softplus(k + p) * sympy.exp(-k),
    "normalised": beta * k / norm,
    "nested": tw.row_sum(p * k / norm, "K") * sympy.exp(-(tw.row_sum(k * p, "K") ** 2)) * v,
    "scalar value": tw.row_sum(beta * k * p, "K") / (1 + tw.row_sum(k**2, "K")),
    "shared": (tw.row_sum(k * p, "K") + beta) * k + tw.row_sum(k * p, "K") ** 2 * p,
    "other axis": tw.row_sum(v * tw.row_sum(k * p, "K") * beta, "V") * k,
}


def gradient_error(value: sympy.Expr, wrt: sympy.Symbol, gradient: sympy.Expr) -> float:
    """Largest difference of a gradient from autograd's, evaluated as one expression and step by step."""
    values = {n: torch.randn(5, witness.SIZES[a], dtype=torch.float64).requires_grad_() for n, a in AXES.items()}
    y = witness.elementwise(value, values)
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, values[wrt.name], dy)
    given = {**values, "dy": dy}
    found = witness.elementwise(gradient, given), stepwise(gradient, given)
    return max(float((each - expected).detach().abs().max()) for each in found)


def stepwise(expr: sympy.Expr, values: dict[str, torch.Tensor]) -> torch.Tensor:
    steps, (flat,) = tw.flatten([expr])
    known = dict(values)
    for step in steps:
        summed = witness.elementwise(step.value, known)
        assert summed.shape[-1] == witness.SIZES[step.axis]
        known[step.target.name] = summed.sum(-1, keepdim=True)
    assert not flat.has(tw.RowSum)
    return witness.elementwise(flat, known)


@pytest.mark.parametrize("name", CASES)
def test_adjoint_agrees_with_autograd(name: str) -> None:
    value = CASES[name]
    for wrt in sorted(value.free_symbols, key=str):
        adjoint = tw.adjoint(value, wrt, AXES)
        assert adjoint.axis == AXES[wrt.name]
        assert gradient_error(value, wrt, adjoint.gradient) < 1e-11


def test_a_lost_reduction_is_caught() -> None:
    """The comparison above can fail: through the norm and through the scalar's broadcast."""
    through_norm = tw.adjoint(CASES["normalised"], k, AXES).gradient
    assert gradient_error(CASES["normalised"], k, sympy.Add.make_args(sympy.expand(through_norm))[0]) > 1e-3
    assert gradient_error(CASES["scalar product"], beta, -k * tw.symbol("dy")) > 1e-3


def test_flatten_shares_equal_reductions() -> None:
    steps, exprs = tw.flatten([k / norm, p / norm, tw.row_sum(k * p / norm, "K") * k], prefix="r")
    assert [str(step.target) for step in steps] == ["r0", "r1"]
    assert [step.axis for step in steps] == ["K", "K"]
    assert str(exprs[0]) == "k/sqrt(r0 + 1/1000000)"


def test_saturated_activations_keep_finite_gradients() -> None:
    for x in (-800.0, 800.0):
        for function in (tw.sigmoid, tw.softplus):
            gradient = tw.adjoint(function(beta), beta, AXES).gradient
            values = {"beta": torch.tensor([x], dtype=torch.float64), "dy": torch.ones(1, dtype=torch.float64)}
            assert torch.isfinite(witness.elementwise(gradient, values)).all()


def rewrites(spec: Spec) -> list[tuple[str, sympy.Expr]]:
    return [
        (rewrite.target, tw.from_syntax(rewrite.value, spec))
        for option in spec.options
        for variant in option.variants
        for rewrite in variant.rewrites
    ]


def test_options_of_a_shipped_spec() -> None:
    A_log, dt_bias, gate, bound = map(tw.symbol, ("A_log", "dt_bias", "g", "lower_bound"))
    found = rewrites(shipped("kda"))
    assert ("k", k / norm) in found
    assert ("g", -sympy.exp(A_log) * tw.softplus(gate + dt_bias)) in found
    assert ("g", bound * tw.sigmoid(sympy.exp(A_log) * (gate + dt_bias))) in found
    assert ("beta", 2 * tw.sigmoid(beta)) in found


@pytest.mark.parametrize("name", SHIPPED)
def test_rewrites_keep_their_axis(name: str) -> None:
    spec = shipped(name)
    assert all(tw.axis_of(value, spec.axes) == spec.axes[target] for target, value in rewrites(spec))


def test_a_rewrite_must_be_elementwise() -> None:
    text = """op test
token q, k : [H, K]
token v : [HV, V]
state S : [HV, K, V]
S[t] = S[t-1] + k[t] v[t]^T
o[t] = scale S[t]^T q[t]
option scaled:
  k <- (k k^T) k
"""
    spec = parse(text, "test.kcp")
    with pytest.raises(SpecError) as caught:
        rewrites(spec)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.span.column, diagnostic.span.end_column) == ("KCP208", 8, 15)
