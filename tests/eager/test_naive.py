"""The per-token reference against the equation evaluated with dense matrices; it must not know the derivation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch_ops import MADE, OPS, Sizes, build_naive, draw_for, load_spec, option_sets, relative_rms

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
    Sum,
    Transpose,
)
from kcpgen.spec import Spec

FUNCTIONS = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "softplus": lambda x: torch.log1p(torch.exp(x)),
    "l2norm": lambda x: x / torch.sqrt(x.square().sum() + 1e-6),
}
CASES = [(name, keywords) for name in [*OPS, *MADE] for keywords in option_sets(load_spec(name))]


def dense(expr: Expr, values: dict[str, Tensor]) -> Tensor:
    """The value as a matrix; everything, a K-by-K transition too, is formed."""
    match expr:
        case Number():
            return torch.full((1, 1), float(expr.value), dtype=torch.float64)
        case Name():
            return values[expr.name]
        case Identity():
            return torch.eye(values["#K"].shape[0], dtype=torch.float64)
        case Negative():
            return -dense(expr.operand, values)
        case Transpose():
            return dense(expr.operand, values).T
        case Call(function="Diag"):
            return torch.diag(dense(expr.argument, values)[:, 0])
        case Call(function="sum"):
            return dense(expr.argument, values).sum().reshape(1, 1)
        case Call():
            return FUNCTIONS[expr.function](dense(expr.argument, values))
        case _:
            return dense_binary(expr, dense(expr.left, values), dense(expr.right, values))


def dense_binary(expr: Expr, left: Tensor, right: Tensor) -> Tensor:
    match expr:
        case Sum():
            return left + right
        case Difference():
            return left - right
        case Hadamard():
            return left * right
        case Quotient():
            return left / right
        case Product():
            return left * right if 1 in (left.numel(), right.numel()) else left @ right
    raise AssertionError(expr)


def rewritten(spec: Spec, keywords: dict[str, object], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """One token's inputs as the options given replace them."""
    changed = {}
    for option in spec.options:
        if keywords.get(option.name):
            variant = [v for v in option.variants if not v.when or v.when in keywords][-1]
            changed |= {rewrite.target: dense(rewrite.value, values) for rewrite in variant.rewrites}
    return {**values, **changed}


@pytest.mark.parametrize(("name", "keywords"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_equals_the_equation_evaluated_with_dense_matrices(name: str, keywords: dict[str, object]) -> None:
    spec = load_spec(name)
    sizes = Sizes(T=9, HV=1)
    tensors = draw_for(spec, sizes)
    o, final_state = build_naive(name)(**tensors, scale=0.7, output_final_state=True, **keywords)
    values = {"#K": torch.empty(sizes.K), "scale": torch.full((1, 1), 0.7, dtype=torch.float64)}
    values |= {param.name: tensors[param.name][0].reshape(-1, 1) for param in spec.params if param.name in tensors}
    values |= {
        name: torch.full((1, 1), x, dtype=torch.float64) for name, x in keywords.items() if not isinstance(x, bool)
    }
    S = tensors["initial_state"][0, 0]
    for t in range(sizes.T):
        token = {i.name: tensors[i.name][0, t, 0].reshape(-1, 1) for i in spec.inputs}
        token = rewritten(spec, keywords, {**values, **token})
        S = dense(spec.update, {**token, "S": S})
        expected = dense(spec.readout, {**token, "S": S})
        assert relative_rms(o[0, t, 0], expected[:, 0]) < 1e-13
    assert relative_rms(final_state[0, 0], S) < 1e-13


def test_is_emitted_without_the_derivation() -> None:
    script = (
        "import sys; from kcpgen.emit.naive import emit_naive; from kcpgen.language import load; "
        "emit_naive(load(sys.argv[1])); assert 'sympy' not in sys.modules, 'the witness went through sympy'"
    )
    path = load_spec(OPS[0]).path
    subprocess.run([sys.executable, "-c", script, path], check=True, timeout=60)
