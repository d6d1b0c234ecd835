"""Which calls take the kernels for Hopper, and what a multiprocessor has for them.

A portable kernel waits for each product before it begins the next, since Triton puts the waits. The ones for Hopper are
written in Gluon: serial ones in roles, a warp that loads and four or eight that multiply, with several products in
flight; those by chunks with the copies of all that a chunk needs begun at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton

from kcpgen.runtime.backends import interpreting
from kcpgen.runtime.launch import Tiles, addressable, readable, unit_stride
from kcpgen.runtime.layout import ChunkLayout

TRITON = ("3.6.",)  # Gluon is experimental: releases that these kernels were run with
LIMIT = 230_000  # bytes of shared memory, tiles on their way out included
SHARED_OF_TWO, RESERVED = 228 * 1024, 1024  # bytes of a multiprocessor's shared memory, and what a program takes beside
COPIED = frozenset({torch.bfloat16, torch.float32})  # inputs by chunks

_forced: ContextVar[bool | None] = ContextVar("hopper", default=None)


@contextmanager
def forced(choice: bool | None) -> Iterator[None]:
    """Calls made inside take the kernels for Hopper, whatever the device, or the portable ones; None: as usual."""
    token = _forced.set(choice)
    try:
        yield
    finally:
        _forced.reset(token)


def settled(tiles: Tiles, device: torch.device) -> Tiles:
    """Tiles of a call on that device: a backward may run where nobody forces anything."""
    found = _forced.get()
    if found is None:
        found = not interpreting() and _on_hopper(device)
    return tiles if found else _portable(tiles)


@lru_cache(maxsize=256)
def _portable(tiles: Tiles) -> Tiles:
    serial = {name: replace(getattr(tiles, name), roles=False) for name in ("scan", "reverse")}
    by_chunks = {name: replace(getattr(tiles, name), in_flight=False) for name in ("prepare", "gradients")}
    return replace(tiles, **serial, **by_chunks)


def copied_by_chunks(prepared: Any, layout: ChunkLayout, chunk: int, shared: int, *inputs: torch.Tensor) -> bool:
    """Whether a chunk-parallel kernel can copy all that a chunk needs, inputs [B, T, heads, K] in place, by tiles.

    chunk: tokens of the chunks that it is written for. shared: bytes of shared memory that these take.
    """
    if layout.chunk != chunk or layout.chunk_count == 0 or prepared.key_width not in (64, 128):
        return False
    if prepared.dtype is not torch.bfloat16 or shared > LIMIT:
        return False
    if layout.chunk_count * prepared.heads * max(prepared.value_width, layout.chunk) >= 2**31:  # rows of a descriptor
        return False
    return COPIED.issuperset(x.dtype for x in inputs) and all(map(addressable, inputs))


def registers(shared: int, warps: int, programs: int) -> int:
    """Of a thread, where so many programs are to fit a multiprocessor, or as many as its shared memory has room for."""
    count = max(1, min(programs, LIMIT // max(1, shared)))
    return min(255, 65536 // (32 * warps * count) // 8 * 8)


def copied_whole(dtype: torch.dtype, values: int) -> bool:
    """Whether rows of [.., V] tensors can be copied by tiles: they lie multiples of 16 bytes apart."""
    return dtype is torch.bfloat16 and values % 8 == 0


def copyable(do: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """The gradient of the output as a kernel in roles can copy it by tiles, once for all its launches."""
    wanted = tiles.reverse.roles and copied_whole(do.dtype, do.shape[3])
    return readable(do) if wanted else unit_stride(do)


def known_release() -> bool:
    """Whether this Triton is one that kernels in roles were written for."""
    return bool(triton.__version__.startswith(TRITON))


@lru_cache(maxsize=8)
def _on_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or not known_release():
        return False
    return torch.cuda.get_device_capability(device)[0] == 9
