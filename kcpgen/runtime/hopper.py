"""Which calls take the kernels for Hopper, and how these are launched.

A portable kernel waits for each product before it begins the next, since Triton puts the waits. The ones for Hopper are
written in Gluon: serial ones in roles, a warp that loads and four that multiply, with several products in flight; those
by chunks with the copies of all that a chunk needs begun at once.
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
from kcpgen.runtime.launch import ScanTiles, Tiles, addressable, readable, unit_stride
from kcpgen.runtime.layout import ChunkLayout

TRITON = ("3.6.",)  # Gluon is experimental: releases that these kernels were run with
SHARED_MEMORY = 150_000  # bytes that tiles in flight may take: two stages do, and other kernels' programs need room
LIMIT = 230_000  # bytes of shared memory, tiles on their way out included
FEWEST_STAGES, MOST_STAGES = 2, 4
REGISTERS = 128  # per thread of the launch; the computing warps take over those that the loading one can spare
LOADER_REGISTERS = 24
MOST_PROGRAMS = 4  # of a chunk-parallel kernel on a multiprocessor: more would have too few registers

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
    if found:
        return tiles
    serial = {name: replace(getattr(tiles, name), roles=False) for name in ("scan", "reverse")}
    by_chunks = {name: replace(getattr(tiles, name), in_flight=False) for name in ("prepare", "gradients")}
    return replace(tiles, **serial, **by_chunks)


def stages(prepared: Any, layout: ChunkLayout, tiles: ScanTiles, tile_bytes: int, leaving_bytes: int) -> int:
    """Chunks in flight of a kernel in roles, 0 for the portable kernel.

    tile_bytes: of the tiles of one chunk. leaving_bytes: of those that leave.
    """
    fitting = prepared.key_width in (64, 128) and tiles.value_block == 64
    if not fitting or not copied_whole(prepared.A_0.dtype, prepared.values):
        return 0
    if layout.chunk < 32:  # rows of fp32 numbers would not lie at multiples of 128 bytes
        return 0
    if layout.chunk_count == 0:  # nothing that a descriptor could describe
        return 0
    count = min(MOST_STAGES, max(FEWEST_STAGES, SHARED_MEMORY // tile_bytes))
    return count if count * tile_bytes + leaving_bytes <= LIMIT else 0


def copied_by_chunks(prepared: Any, layout: ChunkLayout, chunk: int, shared: int, *inputs: torch.Tensor) -> bool:
    """Whether a chunk-parallel kernel can copy all that a chunk needs, inputs [B, T, heads, K] in place, by tiles.

    chunk: tokens of the chunks that it is written for. shared: bytes of shared memory that these take.
    """
    if layout.chunk != chunk or layout.chunk_count == 0 or prepared.key_width not in (64, 128):
        return False
    if prepared.A_0.dtype is not torch.bfloat16 or shared > LIMIT:
        return False
    if layout.chunk_count * prepared.heads * max(prepared.value_width, layout.chunk) >= 2**31:  # rows of a descriptor
        return False
    return all(x.dtype in (torch.bfloat16, torch.float32) and addressable(x) for x in inputs)


def registers(shared: int, warps: int) -> int:
    """Of a thread, where as many programs are to fit a multiprocessor as its shared memory has room for, up to four."""
    count = max(1, min(MOST_PROGRAMS, LIMIT // shared))
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


def programs(prepared: Any, layout: ChunkLayout, tiles: ScanTiles) -> tuple[int]:
    return (layout.sequence_count * prepared.heads * (prepared.value_width // tiles.value_block),)
