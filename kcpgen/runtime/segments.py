"""One sequence cut into parts that a kernel can work on side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from kcpgen.runtime.layout import Row


def chunks_before(offsets: Sequence[int], chunk: int) -> list[int]:
    """Number of chunks before each sequence, and of all."""
    return [0, *accumulate(-(-(end - begin) // chunk) for begin, end in pairwise(offsets))]


def segment_count(chunks: int, programs: int, multiprocessors: int = 132, shortest: int = 8) -> int:
    """Into how many segments to cut: enough to fill the device, none shorter than `shortest` chunks."""
    return max(1, min(chunks // shortest, multiprocessors // programs))


def segments(offsets: tuple[int, ...], sequence: int, chunk: int, count: int) -> list[Row]:
    """Rows of `ChunkLayout.sequences` for the parts of one sequence, each a whole number of chunks but the last."""
    begin, end = offsets[sequence], offsets[sequence + 1]
    first_chunk = chunks_before(offsets, chunk)[sequence]
    length = -(-(end - begin) // (count * chunk)) * chunk
    return [
        (0, start, min(length, end - start), first_chunk + (start - begin) // chunk)
        for start in range(begin, end, max(length, chunk))
    ]
