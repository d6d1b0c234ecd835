"""Descriptors of tiles for kernels in Gluon, which wants to be told how they lie in shared memory."""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kcpgen.runtime.launch import by_head, tall

NUMBERS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def tile_descriptor(scratch: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """As in `kcpgen.runtime.launch`: dense scratch as one tall matrix, in [rows, columns] tiles."""
    return TensorDescriptor(scratch, *tall(scratch), [rows, columns], _layout(columns, 2))


def vector_descriptor(vectors: torch.Tensor, in_place: bool, rows: int, columns: int) -> TensorDescriptor:
    """Likewise: vectors of chunks, an input [B, T, heads, K] or dense scratch [NT, HV, rows, columns]."""
    heads_first = by_head(vectors, in_place)
    shape, strides = list(heads_first.shape), list(heads_first.stride())
    return TensorDescriptor(
        heads_first, shape, strides, [1, 1, rows, columns], _layout(columns, 4, vectors.element_size())
    )


def row_descriptor(numbers: torch.Tensor, count: int) -> TensorDescriptor:
    """fp32 scratch [.., count]: a row for each chunk and head."""
    return TensorDescriptor(numbers, [numbers.numel() // count, count], [count, 1], [1, count], NUMBERS)


@cache
def _layout(columns: int, rank: int, size: int = 2) -> gl.NVMMASharedLayout:
    """Of tiles whose elements have `size` bytes: what the tensor cores read without bank conflicts."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, size * columns), element_bitwidth=8 * size, rank=rank)
