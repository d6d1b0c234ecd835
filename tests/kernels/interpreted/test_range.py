"""Inputs far from one, where a channel decays by nearly what pairs of tokens taken together allow, and by more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kcpgen.runtime.ops import REACH
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import Inputs, in_float64, make_inputs
from kcpgen.verify.op import Op, load_op
from tests.conftest import ROOT

CASE = Case(label="range", backend="triton", tokens=32, heads=1, value_heads=1, key_width=32, value_width=64)
BOUND = 5e-3


def scaled(op: Op, exponent: float, *, data: float, gradient: float) -> Inputs:
    """One token decays by 2**-exponent and no other by anything; what is written and the output's gradient scaled."""
    inputs = make_inputs(op, CASE, "cpu")

    def changed(name: str, x: Tensor) -> Tensor:
        if name in op.description.log_decays:
            x = torch.zeros_like(x)
            x[:, 17] = -exponent * math.log(2)
            return x.requires_grad_()
        return (data * x.detach()).requires_grad_() if name in ("k", "v") else x

    tokens = {name: changed(name, x) for name, x in inputs.tokens.items()}
    return replace(inputs, tokens=tokens, initial_state=None, d_output=gradient * inputs.d_output)


@pytest.mark.parametrize("exponent", [REACH.value - 1, REACH.value + 1])
@pytest.mark.parametrize(("data", "gradient"), [(1, 1), (1, 1e-8), (300, 1e4), (1, 1e9)])
def test_what_is_scaled_keeps_its_range(exponent: float, data: float, gradient: float) -> None:
    op = load_op(ROOT / "generated" / "gla")
    inputs = scaled(op, exponent, data=data, gradient=gradient)
    found = evaluate(op.chunk, inputs, CASE, backend="triton")
    expected = evaluate(op.chunk, in_float64(inputs), CASE, backend="eager")
    for name, exact in expected.items():
        if name.startswith("d") or name == "o":
            assert float((found[name].double() - exact).norm() / exact.norm()) < BOUND, name
