"""Gradients of decays, added up over tokens as those of a gate's parameters are, where states forget fast.

A pair of tokens adds to the gradient of the running decay at the later one and takes it back at the earlier one. What
rounding leaves of the difference reaches every token before them, and a sum over tokens collects it from each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import Inputs, in_float64, make_inputs
from kcpgen.verify.op import Op, load_op
from tests.conftest import ROOT, SPECS

OPS = [load_op(ROOT / "generated" / path.stem) for path in SPECS]
DECAYING = [op for op in OPS if op.description.log_decays]
BOUND = (
    4e-3  # 5e-3 and more with a decay per channel while pairs did not cancel, 2e-2 in a gate's parameters at T = 8192
)
CASE = Case(label="gate", backend="triton", tokens=256, heads=2, value_heads=2, key_width=64, value_width=64)


def forgetting(op: Op) -> Inputs:
    """What a gate bounded by -5 gives whose tokens are nearly open or nearly shut."""
    inputs = make_inputs(op, CASE, "cpu")
    generator = torch.Generator().manual_seed(0)

    def changed(name: str, x: Tensor) -> Tensor:
        if name not in op.description.log_decays:
            return x
        return (-5 * torch.sigmoid(4 * torch.randn(x.shape, generator=generator))).to(x.dtype).requires_grad_()

    return replace(inputs, tokens={name: changed(name, x) for name, x in inputs.tokens.items()})


@pytest.mark.parametrize("op", DECAYING, ids=lambda op: op.name)
def test_what_a_pair_of_tokens_adds_it_takes_back(op: Op) -> None:
    inputs = forgetting(op)
    found = evaluate(op.chunk, inputs, CASE, backend="triton")
    expected = evaluate(op.chunk, in_float64(inputs), CASE, backend="eager")
    for name in op.description.log_decays:
        log_decay = inputs.tokens[name].detach().double()
        slope = -log_decay * (5 + log_decay) / 5  # of -5 sigmoid, by what it gives: small where dg is large
        exact = slope * expected[f"d{name}"]
        error = (slope * found[f"d{name}"].double() - exact).sum(1).square().mean().sqrt()
        independent = exact.square().mean().sqrt() * exact.shape[1] ** 0.5  # what so many tokens add up to, were they
        assert error < BOUND * independent
