"""Gradients of heads that share an input, added up by a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kcpgen.runtime import groups
from kcpgen.runtime.groups import sums_over_groups

SHAPES = {  # of an input, and how many heads share one of its heads
    "two programs": ((2, 5, 2, 64), 2),
    "the last program in part": ((1, 7, 3, 72), 2),
    "rows over a border of programs": ((1, 9, 2, 60), 3),
    "rows of no whole 16 bytes": ((1, 5, 1, 7), 5),
    "one row": ((1, 1, 1, 8), 2),
    "more heads than are unrolled": ((1, 3, 1, 100), 11),
    "a number a token and head": ((2, 37, 2), 4),
    "no tokens": ((2, 0, 2, 8), 3),
}


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def of_heads(x: Tensor, group: int) -> Tensor:
    return torch.randn(*x.shape[:2], group * x.shape[2], *x.shape[3:])


def members(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.reshape(*x.shape[:3], gradient.shape[2] // x.shape[2], *x.shape[3:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", SHAPES)
def test_heads_of_a_group_add_up(sizes: str, dtype: torch.dtype) -> None:
    """To what float64 has, but for one rounding of the result; in the order of heads, so that twice is the same."""
    shape, group = SHAPES[sizes]
    x = torch.zeros(shape, dtype=dtype)
    gradient = of_heads(x, group)
    (found,) = sums_over_groups((gradient, x))
    assert (found.shape, found.dtype, found.is_contiguous()) == (x.shape, dtype, True)
    exact = members(gradient.double(), x).sum(3) if x.numel() else x.double()
    scale = members(gradient.double().abs(), x).sum(3) if x.numel() else exact
    rounding = torch.finfo(dtype).eps / 2
    error = (found.double() - exact).abs()
    assert (error <= exact.abs() * rounding + scale * group * torch.finfo(torch.float32).eps + 2.0**-24).all()
    in_order = torch.zeros(shape) if not x.numel() else members(gradient, x)[:, :, :, 0]
    for member in range(1, group if x.numel() else 0):
        in_order = in_order + members(gradient, x)[:, :, :, member]
    assert torch.equal(found, in_order.to(dtype))
    assert torch.equal(found, sums_over_groups((gradient, x))[0])


def test_an_input_of_any_strides_has_a_dense_gradient() -> None:
    packed = torch.zeros(2, 3, 5, 40, dtype=torch.bfloat16)
    for x in (packed.transpose(1, 2), packed[..., 8:24], packed[:, :, :1].expand(-1, -1, 4, -1)):
        gradient = of_heads(x, 2)
        (found,) = sums_over_groups((gradient, x))
        assert (found.shape, found.is_contiguous()) == (x.shape, True)
        assert torch.equal(found, members(gradient, x).sum(3).to(x.dtype))


def test_each_input_has_its_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of one shape in one launch, whatever their dtypes; of no group, none."""
    launches: list[int] = []
    launch = groups._launch

    def counted(gradients: tuple[Tensor, ...], sums: tuple[Tensor, ...]) -> None:
        launches.append(len(sums))
        launch(gradients, sums)

    monkeypatch.setattr(groups, "_launch", counted)
    inputs = [
        torch.zeros(2, 9, 2, 40, dtype=torch.bfloat16),
        torch.zeros(2, 9, 2),
        torch.zeros(2, 9, 6, 40, dtype=torch.bfloat16),
        torch.zeros(2, 9, 2, 40, dtype=torch.float32),
        torch.zeros(2, 9, 2, 40, dtype=torch.float16),
    ]
    pairs = [(of_heads(x, 6 // x.shape[2]), x) for x in inputs]
    found = sums_over_groups(*pairs)
    assert launches == [3, 1]
    assert len(found) == len(inputs)
    for sums, (gradient, x) in zip(found, pairs, strict=True):
        assert sums.dtype is x.dtype
        torch.testing.assert_close(sums, members(gradient, x).sum(3).to(x.dtype))


def test_what_no_heads_share_is_rounded() -> None:
    x = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16)
    gradient, same = torch.randn(x.shape), torch.randn(x.shape).bfloat16()
    rounded, kept = sums_over_groups((gradient, x), (same, x))
    assert torch.equal(rounded, gradient.bfloat16())
    assert kept is same
