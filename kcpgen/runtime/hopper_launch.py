"""Descriptors of tiles for kernels in Gluon, which wants to be told how they lie in shared memory."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kcpgen.runtime.launch import heads_first, nowhere, tall, with_base


class _Layout(gl.NVMMASharedLayout):
    """Triton asks every descriptor of every launch for its layout's name, and putting that together takes Python nearly
    as long as all else about a descriptor."""

    def __repr__(self) -> str:
        return self.__dict__["name"]  # type: ignore[no-any-return]


def _named(**of: int) -> gl.NVMMASharedLayout:
    layout = _Layout(**of)
    layout.__dict__["name"] = repr(gl.NVMMASharedLayout(**of))
    return layout


NUMBERS = _named(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def tile_descriptor(scratch: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """As in `kcpgen.runtime.launch`: dense scratch as one tall matrix, in [rows, columns] tiles."""
    return with_base(_tall(scratch.dtype, scratch.shape, rows, columns), scratch)


@lru_cache(maxsize=512)
def _tall(dtype: torch.dtype, shape: tuple[int, ...], rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(nowhere(dtype), *tall(shape), [rows, columns], _layout(columns, 2, dtype.itemsize))


def vector_descriptor(vectors: torch.Tensor, in_place: bool, rows: int, columns: int) -> TensorDescriptor:
    """Likewise: vectors of chunks, an input [B, T, heads, K] or dense scratch [NT, HV, rows, columns]."""
    return with_base(_by_head(vectors.dtype, vectors.shape, vectors.stride(), in_place, rows, columns), vectors)


@lru_cache(maxsize=512)
def _by_head(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], in_place: bool, rows: int, columns: int
) -> TensorDescriptor:
    block, layout = [1, 1, rows, columns], _layout(columns, 4, dtype.itemsize)
    return TensorDescriptor(nowhere(dtype), *heads_first(shape, strides, in_place), block, layout)


def row_descriptor(numbers: torch.Tensor, count: int) -> TensorDescriptor:
    """fp32 scratch [.., count]: a row for each chunk and head."""
    return with_base(_rows(numbers.dtype, numbers.shape, count), numbers)


@lru_cache(maxsize=512)
def _rows(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> TensorDescriptor:
    return TensorDescriptor(nowhere(dtype), [math.prod(shape) // count, count], [count, 1], [1, count], NUMBERS)


@cache
def _layout(columns: int, rank: int, size: int = 2) -> gl.NVMMASharedLayout:
    """Of tiles whose elements have `size` bytes: what the tensor cores read without bank conflicts."""
    return _named(swizzle_byte_width=min(128, size * columns), element_bitwidth=8 * size, rank=rank)
