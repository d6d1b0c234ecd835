"""Gradients of inputs that a group of heads shares: each head has left its own in fp32, and they add up here."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kcpgen.runtime.backends import interpreting

if interpreting():
    from kcpgen.runtime.interpreter import mend

    mend()

BLOCK = 1024  # numbers of a sum that a program makes: 8 a thread, of which 16 bits are one whole store


@triton.jit
def sums_over_groups_kernel(
    gradients, sums, rows, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of each tensor [rows, GROUP, WIDTH] the sum [rows, WIDTH], heads in their order; program_id(1) says of which.

    Both are walked as they lie, so that no width leaves threads without work. The mask asks for the row, not for the
    number: that it is the same for 16 bytes is then plain from WIDTH, whatever the number of rows.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // WIDTH
    inside = row < rows
    first = at + row * ((GROUP - 1) * WIDTH)
    for tensor in tl.static_range(len(sums)):
        if tl.program_id(1) == tensor:
            total = tl.load(gradients[tensor] + first, mask=inside, other=0.0)
            if GROUP <= 8:
                for member in tl.static_range(1, GROUP):
                    total += tl.load(gradients[tensor] + first + member * WIDTH, mask=inside, other=0.0)
            else:
                for member in tl.range(1, GROUP):
                    total += tl.load(gradients[tensor] + first + member * WIDTH, mask=inside, other=0.0)
            tl.store(sums[tensor] + at, total.to(sums[tensor].dtype.element_ty), mask=inside)


def sums_over_groups(*pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Of each pair, a dense gradient [B, T, HV, ...] and its input [B, T, H, ...]: the gradient as the input is.

    Heads that share an input add up, inputs of the same shape in one launch; what no heads share is rounded by torch.
    """
    found = [gradient.to(x.dtype) if gradient.shape == x.shape else x.new_empty(x.shape) for gradient, x in pairs]
    shared = [
        (gradient, total) for (gradient, _), total in zip(pairs, found, strict=True) if gradient.shape != total.shape
    ]
    for shape in dict.fromkeys(total.shape for _, total in shared):
        _launch(*zip(*(pair for pair in shared if pair[1].shape == shape), strict=True))
    return tuple(found)


def _launch(gradients: tuple[Tensor, ...], sums: tuple[Tensor, ...]) -> None:
    """Fill sums of one shape."""
    rows, width = sums[0].shape[:3].numel(), sums[0].shape[3:].numel()
    if not sums[0].numel():
        return
    grid = (triton.cdiv(rows * width, BLOCK), len(sums))
    group = gradients[0].shape[2] // sums[0].shape[2]
    sums_over_groups_kernel[grid](gradients, sums, rows, GROUP=group, WIDTH=width, BLOCK=BLOCK, num_warps=4)
