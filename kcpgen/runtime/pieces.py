"""The segments of sequences that are cut within one device: where they lie, and which follows which.

A segment is nothing but a row of the layout's `sequences` table: chunks and scratch stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kcpgen.runtime.layout import ChunkLayout, Row


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """One layout for each group of rows that kernels are launched over, all over the same chunks.

    whole: sequences that are not cut. pieces: the segments of the others, chain after chain; leading: all of them but
    the last of each chain; following: but the first; inner: but both; beginnings, ends: these alone.
    inner_counts: by number of the layout's sequences, of each chain how many segments `inner` has of it.
    whole_sequences, sequences: rows of the caller's states for those of `whole`, and of each chain. int64, like below.
    first, last: each chain's first and last row of `pieces`; first_leading, last_following: of these tables.
    chains: int32 [chains, 3], first row of `pieces`, number of segments, number of the sequence.
    inner_of_chunks: int32 [NT, 2], the row of `inner` that a chunk is of, -1 for none, and how many chunks are.
    """

    whole: ChunkLayout
    pieces: ChunkLayout
    leading: ChunkLayout
    following: ChunkLayout
    inner: ChunkLayout
    beginnings: ChunkLayout
    ends: ChunkLayout
    inner_counts: Mapping[int, int]
    whole_sequences: Tensor
    sequences: Tensor
    first: Tensor
    last: Tensor
    first_leading: Tensor
    last_following: Tensor
    chains: Tensor
    inner_of_chunks: Tensor


def chunk_counts(batch: int, starts: Sequence[int], chunk: int) -> list[int]:
    """Chunks of each sequence of a layout, in its order."""
    return [-(-(end - begin) // chunk) for begin, end in pairwise(starts)] * batch


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """0 where programs do not run side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def cut(
    layout: ChunkLayout, batch: int, starts: Sequence[int], counts: Sequence[int], chosen: range | None = None
) -> Pieces:
    """counts: segments of each sequence, of nearly equal numbers of chunks; none more than its chunks.

    chosen: the sequences wanted, at least one of them cut; states are then of these alone. None: all.
    """
    chosen = range(len(counts)) if chosen is None else chosen
    whole: list[Row] = []
    chains: list[list[Row]] = []
    numbers: tuple[list[int], list[int]] = ([], [])
    chunks = chunk_counts(batch, starts, layout.chunk)
    spans = [(row, begin, end) for row in range(batch) for begin, end in pairwise(starts)]
    before = list(accumulate(chunks, initial=0))
    for n in chosen:
        rows = in_parts(*spans[n], before[n], layout.chunk, counts[n])
        numbers[len(rows) > 1].append(n - chosen.start)
        if len(rows) > 1:
            chains.append(rows)
        else:
            whole += rows
    device = layout.sequences.device
    inner = [row for chain in chains for row in chain[1:-1]]
    of_chunks = torch.full((layout.chunk_count, 2), -1, dtype=torch.int32)
    for n, (_, _, tokens, chunk) in enumerate(inner):
        count = -(-tokens // layout.chunk)
        of_chunks[chunk : chunk + count] = torch.tensor((n, count))
    first = list(accumulate(map(len, chains), initial=0))

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    return Pieces(
        whole=layout.over(whole),
        pieces=layout.over([row for chain in chains for row in chain]),
        leading=layout.over([row for chain in chains for row in chain[:-1]]),
        following=layout.over([row for chain in chains for row in chain[1:]]),
        inner=layout.over(inner),
        beginnings=layout.over([chain[0] for chain in chains]),
        ends=layout.over([chain[-1] for chain in chains]),
        inner_counts={chosen.start + n: len(chain) - 2 for n, chain in zip(numbers[True], chains, strict=True)},
        whole_sequences=index(numbers[False]),
        sequences=index(numbers[True]),
        first=index(first[:-1]),
        last=index([after - 1 for after in first[1:]]),
        first_leading=index([at - chain for chain, at in enumerate(first[:-1])]),
        last_following=index([after - chain - 2 for chain, after in enumerate(first[1:])]),
        chains=torch.tensor(list(zip(first, map(len, chains), numbers[True], strict=False)), dtype=torch.int32).to(
            device
        ),
        inner_of_chunks=of_chunks.to(device),
    )


def in_parts(row: int, begin: int, end: int, before: int, chunk: int, count: int) -> list[Row]:
    """`count` parts of a sequence, each a whole number of chunks but the last; `before`: chunks before the sequence."""
    chunks = -(-(end - begin) // chunk)
    cuts = [chunks * part // count for part in range(count + 1)]
    return [
        (row, begin + chunk * at, min(begin + chunk * after, end) - begin - chunk * at, before + at)
        for at, after in pairwise(cuts)
    ]
