"""Which calls take the kernels for Hopper, and how these are launched.

A portable kernel waits for each product before it begins the next, since Triton puts the waits. The ones for Hopper are
written in Gluon: serial ones in roles, a warp that loads and four or eight that multiply, with several products in
flight; those by chunks with the copies of all that a chunk needs begun at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from heapq import heapreplace
from typing import Any

import torch
import triton

from kcpgen.runtime.backends import interpreting
from kcpgen.runtime.launch import ScanTiles, Tiles, addressable, readable, unit_stride
from kcpgen.runtime.layout import ChunkLayout
from kcpgen.runtime.pieces import multiprocessors

TRITON = ("3.6.",)  # Gluon is experimental: releases that these kernels were run with
SHARED_MEMORY = 150_000  # bytes that tiles in flight may take: two stages do, and other kernels' programs need room
LIMIT = 230_000  # bytes of shared memory, tiles on their way out included
FEWEST_STAGES, MOST_STAGES = 2, 4
SHARED_OF_TWO, RESERVED = 228 * 1024, 1024  # bytes of a multiprocessor's shared memory, and what a program takes beside

NARROW, WIDE = 64, 128  # columns of a program's state: a warp multiplies for 16
# Per thread of the launch, by columns: half a multiprocessor's, or all of them. Triton counts four warps for loading,
# and gives the multiplying ones what these can spare: 232 a thread, or 240.
REGISTERS = {NARROW: 128, WIDE: 168}
LOADER_REGISTERS = 24

WIDER = 1.7  # a step of the wide program beside one of the narrow: tensor cores of one multiprocessor do all of it
GAIN = 1.05  # how much faster wide programs must be
MOST_WAVES = 4  # of sequences of different lengths that are followed one by one

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
    fitting = prepared.key_width in (64, 128) and tiles.value_block == NARROW
    if not fitting or not copied_whole(prepared.A_0.dtype, prepared.values):
        return 0
    if layout.chunk < 32:  # rows of fp32 numbers would not lie at multiples of 128 bytes
        return 0
    if layout.chunk_count == 0:  # nothing that a descriptor could describe
        return 0
    return _in_flight(tile_bytes, leaving_bytes)


def _in_flight(tile_bytes: int, leaving_bytes: int) -> int:
    count = min(MOST_STAGES, max(FEWEST_STAGES, SHARED_MEMORY // tile_bytes))
    return count if count * tile_bytes + leaving_bytes <= LIMIT else 0


def columns_and_stages(
    prepared: Any, layout: ChunkLayout, tiles: ScanTiles, shared: Callable[[int], tuple[int, int]]
) -> tuple[int, int]:
    """Columns of the state that a program of a kernel in roles takes, and its chunks in flight, 0 of these for the
    portable kernel.

    shared: bytes of the tiles of one chunk and of those that leave, by columns.
    """
    in_flight = {NARROW: stages(prepared, layout, tiles, *shared(NARROW)), WIDE: _in_flight(*shared(WIDE))}
    if not all(in_flight.values()) or prepared.value_width % WIDE or _two_fit(in_flight[NARROW], *shared(NARROW)):
        return NARROW, in_flight[NARROW]
    programs = prepared.heads * prepared.value_width // NARROW
    found = columns(layout.lengths, programs, multiprocessors(layout.sequences.device))
    return found, in_flight[found]


def _two_fit(count: int, tile_bytes: int, leaving_bytes: int) -> bool:
    """Whether a multiprocessor has room for two narrow programs, which take less time together than a wide one."""
    return 2 * (count * tile_bytes + leaving_bytes + RESERVED) <= SHARED_OF_TWO


@lru_cache(maxsize=256)
def columns(lengths: tuple[int, ...], programs: int, processors: int) -> int:
    """Columns of a program's state: those with which so many multiprocessors, of a program each, take less time.

    lengths: chunks of each sequence. programs: of one sequence, if narrow.
    Only sizes decide, never whether gradients are asked for: a checkpointed forward has to compute the same numbers. It
    should with either width: four warps multiply 64 columns in both, by the same instructions in the same order, and
    nothing of a column depends on another one.
    """
    narrow = steps(lengths, programs, processors)
    return WIDE if 0 < GAIN * WIDER * steps(lengths, programs // 2, processors) <= narrow else NARROW


def steps(lengths: tuple[int, ...], programs: int, processors: int) -> int:
    """Chunks until the last program is through, if each begins as soon as a multiprocessor is free, in their order.

    0 where that is not known: programs do not run side by side, or are so many of different lengths that their number
    says little.
    """
    longest, total = max(lengths, default=0), programs * len(lengths)
    if not processors:
        return 0
    if min(lengths, default=0) == longest:
        return longest * -(-total // processors)
    if total > MOST_WAVES * processors:
        return 0
    busy = [0] * processors  # until when
    for length in lengths:
        for _ in range(programs):
            heapreplace(busy, busy[0] + length)
    return max(busy)


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


def registers(shared: int, warps: int, programs: int) -> int:
    """Of a thread, where so many programs are to fit a multiprocessor, or as many as its shared memory has room for."""
    count = max(1, min(programs, LIMIT // shared))
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


def programs(prepared: Any, layout: ChunkLayout, block: int) -> tuple[int]:
    return (layout.sequence_count * prepared.heads * (prepared.value_width // block),)
