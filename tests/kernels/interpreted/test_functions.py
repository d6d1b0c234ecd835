"""Functions that specs are written with, against float64: near zero, far from it, and where there is no number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kcpgen.runtime.ops import exp, sigmoid, sigmoid_slope, softplus

INFINITE = float("inf")
FAR = (-INFINITE, -1e30, -200.0, -88.0, 88.0, 200.0, 1e30, INFINITE)
# An exponent of 2 is rounded to 24 bits, so that what is left of 80 nats is off by 2**7 of the last one of them.
BOUND = 8e-6


@triton.jit
def apply_kernel(x_ptr, y_ptr, function: tl.constexpr):
    at = tl.arange(0, 1024)
    tl.store(y_ptr + at, function(tl.load(x_ptr + at)))


def applied(function: object, x: Tensor) -> Tensor:
    y = torch.full_like(x, float("nan"))
    apply_kernel[(1,)](x, y, function=function)
    return y


EXACT: dict[str, tuple[object, Callable[[Tensor], Tensor]]] = {
    "exp": (exp, lambda x: x.clamp(max=60).exp()),
    "sigmoid": (sigmoid, lambda x: x.sigmoid()),
    "sigmoid_slope": (sigmoid_slope, lambda x: x.sigmoid() * (-x).sigmoid()),
    "softplus": (softplus, lambda x: x.clamp(min=0) + (-x.abs()).exp().log1p()),
}


@pytest.mark.parametrize("name", EXACT)
def test_functions(name: str) -> None:
    function, exact = EXACT[name]
    x = torch.cat([torch.linspace(-80, 80, 512), torch.linspace(-1, 1, 512)])
    expected = exact(x.double())
    assert ((applied(function, x) - expected) / expected).abs().max() < BOUND


@pytest.mark.parametrize("name", EXACT)
def test_functions_far_from_zero(name: str) -> None:
    function, exact = EXACT[name]
    x = torch.tensor(FAR).repeat(128)
    expected = exact(x.double())
    torch.testing.assert_close(applied(function, x).double(), expected, rtol=BOUND, atol=1e-37)
