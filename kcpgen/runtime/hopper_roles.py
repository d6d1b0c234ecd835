"""How kernels whose warps have roles are launched: chunks in flight, and columns of the state that a program takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from heapq import heapreplace
from typing import Any

import torch

from kcpgen.runtime.hopper import LIMIT, RESERVED, SHARED_OF_TWO, copied_whole
from kcpgen.runtime.launch import ScanTiles
from kcpgen.runtime.layout import ChunkLayout
from kcpgen.runtime.pieces import multiprocessors

SHARED_MEMORY = 150_000  # bytes that tiles in flight may take: two stages do, and other kernels' programs need room
FEWEST_STAGES, MOST_STAGES = 2, 4

NARROW, WIDE = 64, 128  # columns of a program's state: a warp multiplies for 16
UPRIGHT = 32  # columns where four warps share keys and tokens, of ops that have such kernels
WARPS = {UPRIGHT: 4, NARROW: 4, WIDE: 8}  # that multiply
UPRIGHT_CHUNK = 64  # tokens of the chunks that these are for: as many rows as tensor cores multiply
# Per thread of the launch, by columns: half a multiprocessor's, or all of them. Triton counts four warps for loading,
# and gives the multiplying ones what these can spare: 232 a thread, or 240.
REGISTERS = {UPRIGHT: 128, NARROW: 128, WIDE: 168}
LOADER_REGISTERS = 24
# Likewise where four more warps make scores, of SCORE_REGISTERS a thread: of 128 columns that leaves the multiplying
# ones 208. All multiples of eight.
SCORING = {UPRIGHT: 112, NARROW: 112, WIDE: 128}
SCORE_REGISTERS = {UPRIGHT: 80, NARROW: 80, WIDE: 72}

# A step of the wide program beside one of the narrow: tensor cores of one multiprocessor do all of it. Measured where
# 128 columns save one wave of two, of the scan and the reverse scan together: 1.64 to 1.77, but 1.96 of an op that is
# bound by memory there. A scan alone is at 1.52 at least, a reverse scan at 1.85 at most.
WIDER = 1.7
GAIN = 1.05  # how much faster wide programs must be
MOST_WAVES = 2  # of narrow programs: more of either width are bound by memory, and take as long


def stages(prepared: Any, layout: ChunkLayout, tiles: ScanTiles, tile_bytes: int, leaving_bytes: int) -> int:
    """Chunks in flight of a kernel in roles, 0 for the portable kernel.

    tile_bytes: of the tiles of one chunk. leaving_bytes: of those that leave.
    """
    if not takes(prepared.key_width, prepared.values, prepared.dtype, layout, tiles):
        return 0
    return _in_flight(tile_bytes, leaving_bytes)


def takes(key_width: int, values: int, dtype: torch.dtype, layout: ChunkLayout, tiles: ScanTiles) -> bool:
    """Whether kernels in roles are for calls of such sizes, but for what shared memory has room for.

    dtype: of scratch.
    """
    if key_width not in (64, 128) or tiles.value_block != NARROW or not copied_whole(dtype, values):
        return False
    if layout.chunk < 32:  # rows of fp32 numbers would not lie at multiples of 128 bytes
        return False
    return layout.chunk_count > 0  # else there is nothing that a descriptor could describe


def _in_flight(tile_bytes: int, leaving_bytes: int) -> int:
    count = min(MOST_STAGES, max(FEWEST_STAGES, SHARED_MEMORY // tile_bytes))
    return count if count * tile_bytes + leaving_bytes <= LIMIT else 0


def columns_and_stages(
    prepared: Any,
    layout: ChunkLayout,
    tiles: ScanTiles,
    shared: Callable[[int], tuple[int, int]],
    *,
    upright: bool = False,
) -> tuple[int, int]:
    """Columns of the state that a program of a kernel in roles takes, and its chunks in flight, 0 of these for the
    portable kernel.

    shared: bytes, by columns, of the tiles of one chunk, and of those that leave or lie there to be multiplied with.
    upright: whether there is a kernel of UPRIGHT columns.
    """
    count = stages(prepared, layout, tiles, *shared(NARROW))
    if not count:
        return NARROW, count
    programs = prepared.heads * prepared.value_width // NARROW
    processors = multiprocessors(layout.sequences.device)
    if upright and layout.chunk == UPRIGHT_CHUNK and fit_upright(layout.sequence_count * programs, processors):
        tile_bytes, leaving_bytes = shared(UPRIGHT)
        found = min(MOST_STAGES, (LIMIT - leaving_bytes) // tile_bytes)  # nothing has room beside them anyway
        return (UPRIGHT, found) if found >= FEWEST_STAGES else (NARROW, count)
    if prepared.value_width % WIDE:
        return NARROW, count
    wide = fitting_columns(layout.lengths, programs, processors, shared)
    return wide, count if wide == NARROW else _in_flight(*shared(wide))


def fit_upright(programs: int, processors: int) -> bool:
    """Whether so many programs of 64 columns leave half of the multiprocessors idle, which twice as many would take."""
    return programs > 0 and programs * (NARROW // UPRIGHT) <= processors


def fitting_columns(
    lengths: tuple[int, ...], programs: int, processors: int, shared: Callable[[int], tuple[int, int]]
) -> int:
    """Of `columns` those that there is room for, if two programs of 64 do not share a multiprocessor anyway."""
    found = columns(lengths, programs, processors)
    if found == NARROW or not _in_flight(*shared(WIDE)):  # the former is known, and so most calls need no more
        return NARROW
    return NARROW if _two_fit(_in_flight(*shared(NARROW)), *shared(NARROW)) else found


def _two_fit(count: int, tile_bytes: int, leaving_bytes: int) -> bool:
    """Whether a multiprocessor has room for two narrow programs, which take less time together than a wide one."""
    return 2 * (count * tile_bytes + leaving_bytes + RESERVED) <= SHARED_OF_TWO


@lru_cache(maxsize=256)
def columns(lengths: tuple[int, ...], programs: int, processors: int) -> int:
    """Columns of a program's state: those with which so many multiprocessors, of a program each, take less time.

    lengths: chunks of each sequence. programs: of one sequence, if narrow.
    Only sizes decide, never whether gradients are asked for: a checkpointed forward has to compute the same numbers. It
    does with either width: four warps multiply 64 columns in both, by the same instructions in the same order, and
    nothing of a column depends on another one. The scan and the reverse scan choose alike, by what both take together:
    a forward does not know what will follow, and what differs between them decides only for sequences of different
    lengths, where one wave is saved of less than two.
    """
    if not processors < programs * len(lengths) <= MOST_WAVES * processors:
        return NARROW
    narrow, wide = (steps(lengths, count, processors) for count in (programs, programs // 2))
    return WIDE if 0 < GAIN * WIDER * wide <= narrow else NARROW


def steps(lengths: tuple[int, ...], programs: int, processors: int) -> int:
    """Chunks until the last program is through, if each begins as soon as a multiprocessor is free, in their order."""
    busy = [0] * processors  # until when
    for length in lengths:
        for _ in range(programs):
            heapreplace(busy, busy[0] + length)
    return max(busy)


def programs(prepared: Any, layout: ChunkLayout, block: int) -> tuple[int]:
    return (layout.sequence_count * prepared.heads * (prepared.value_width // block),)
