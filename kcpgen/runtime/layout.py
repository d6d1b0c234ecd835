"""Where chunks lie: host-side tables that every kernel of one call shares.

Kernels never compute a chunk's place themselves, so equal-length batches, packed sequences and empty sequences are one
case.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch

from kcpgen.runtime.streams import capturing

T = TypeVar("T")

Row = tuple[int, int, int, int]  # of ChunkLayout.sequences

CHECKPOINT = 8  # chunks between the states that a forward keeps: 1/8 of all of them, in twice their precision


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkLayout:
    """The chunks of one call; equal to itself only, so that it can be a key.

    apart: whether only the last chunk of a row is shorter than others, so that no other tokens follow it in its tile,
    but zeros.
    chunks: int32 [NT, 3], per chunk (batch row, first token in that row, number of tokens).
    sequences: int32 [N, 4], per sequence (batch row, first token, number of tokens, first chunk).
    lengths: of each sequence, in chunks; on the host.
    runs: int32 [R, 3], the stretches of chunks that are replayed side by side: (first chunk, number of chunks, state
    that it begins with: a checkpoint's number, or -1 - the number of a sequence).
    made: what others derive of it, by what that depends on. It lives as long as the rest, which a CUDA graph may read.
    """

    chunk: int
    apart: bool
    chunk_count: int
    sequence_count: int
    chunks: torch.Tensor
    sequences: torch.Tensor
    lengths: tuple[int, ...]
    runs: torch.Tensor
    run_count: int
    made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made the first time that it is asked for. key: whose it is, and what it depends on."""
        found: T = self.made[key] if key in self.made else self.made.setdefault(key, make())
        return found

    def over(self, rows: Sequence[Row]) -> ChunkLayout:
        """The same chunks, and scratch, with other sequences: segments, or a stretch."""
        return replace(
            self,
            sequences=_table(rows, self.sequences.device),
            sequence_count=len(rows),
            lengths=_lengths(rows, self.chunk),
        )


# Layouts that CUDA graphs read, for as long as the process lives: a graph holds addresses alone.
_of_graphs: set[ChunkLayout] = set()


def chunk_layout(
    batch: int, tokens: int, cu_seqlens: tuple[int, ...] | None, chunk: int, device: torch.device
) -> ChunkLayout:
    """Layout of `batch` rows of `tokens` tokens, or of one row packed by the host integers `cu_seqlens` ([N + 1]).

    Cached by value; device tensors are written once per distinct layout and must not be modified.
    """
    starts = (0, tokens) if cu_seqlens is None else cu_seqlens
    found = _chunk_layout(1 if cu_seqlens is not None else batch, starts, chunk, str(device))
    if capturing():
        _of_graphs.add(found)
    return found


@lru_cache(maxsize=64)
def _chunk_layout(batch: int, starts: tuple[int, ...], chunk: int, device: str) -> ChunkLayout:
    chunks: list[tuple[int, int, int]] = []
    sequences: list[Row] = []
    for row in range(batch):
        for begin, end in pairwise(starts):
            sequences.append((row, begin, end - begin, len(chunks)))
            chunks += [(row, first, min(chunk, end - first)) for first in range(begin, end, chunk)]
    runs = [run for n, (_, _, length, before) in enumerate(sequences) for run in _runs(n, before, -(-length // chunk))]
    return ChunkLayout(
        chunk=chunk,
        apart=all((end - begin) % chunk == 0 or end == starts[-1] for begin, end in pairwise(starts)),
        chunk_count=len(chunks),
        sequence_count=len(sequences),
        chunks=torch.tensor(chunks, dtype=torch.int32).reshape(-1, 3).to(device),
        sequences=_table(sequences, device),
        lengths=_lengths(sequences, chunk),
        runs=torch.tensor(runs, dtype=torch.int32).reshape(-1, 3).to(device),
        run_count=len(runs),
    )


def _table(rows: Sequence[Row], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(device)


def _lengths(rows: Sequence[Row], chunk: int) -> tuple[int, ...]:
    return tuple(-(-tokens // chunk) for _, _, tokens, _ in rows)


def _runs(sequence: int, before: int, chunks: int) -> Iterator[tuple[int, int, int]]:
    """From a sequence's start to the first checkpoint, and from each on; `before`: chunks before the sequence."""
    ends = [*range(-(-(before + 1) // CHECKPOINT) * CHECKPOINT, before + chunks, CHECKPOINT), before + chunks]
    for begin, end in pairwise([before, *ends]):
        if end > begin:
            yield begin, end - begin, -1 - sequence if begin == before else begin // CHECKPOINT
