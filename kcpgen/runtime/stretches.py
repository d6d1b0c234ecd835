"""Chunk-parallel kernels beside serial ones, on a sequence in stretches of chunks.

A serial kernel of few heads leaves most of a device idle, and what is chunk-parallel could use it: while the scan walks
through one stretch, `prepare` makes the operands of the next; while the reverse scan walks on, what it has left behind
becomes gradients of inputs. Serial kernels have a stream of their own, with priority: they are few programs of many
steps, and whatever keeps one waiting keeps all that follows.

On a rank of context parallelism serial kernels are what waits for a state of another rank, or sends one; what is
chunk-parallel does not.

Of a stretch nothing is computed otherwise than of the whole: a state goes from one to the next as it is, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from typing import Protocol

import torch
from torch import Tensor

from kcpgen.runtime.awaited import Awaited, arrived
from kcpgen.runtime.layout import ChunkLayout
from kcpgen.runtime.streams import SerialStream

# How long stretches are, in the order of their tokens; the first that leaves none too short is taken. How far `prepare`
# is ahead of the scan is a part of its time that nothing hides, but a scan that has to wait hides nothing. A backward
# takes the last stretch first, and nothing hides the gradients of the first one.
SHARES = ((5, 3, 2), (3, 2))
SHORTEST = 48  # chunks: a serial kernel's launch, and the filling of its pipeline, are to go unnoticed
WAVES = 28  # programs of a chunk-parallel kernel for each multiprocessor: fewer cost more than what is hidden
PORTION = 3 / 8  # of a sequence: the most that one launch of gradients is for
STEP = 16  # chunks: cuts are multiples of it, so that kernels are compiled once for all stretches


def worth_launches(chunks: int, heads: int, multiprocessors: int) -> bool:
    """Whether chunk-parallel kernels are so long that launching them more often goes unnoticed."""
    return chunks * heads >= WAVES * multiprocessors


def halves(chunks: int, heads: int, multiprocessors: int) -> tuple[range, ...]:
    """All chunks, in two stretches where that is worth it: what one of them needs meanwhile is half."""
    cut = chunks // (2 * STEP) * STEP if worth_launches(chunks, heads, multiprocessors) else 0
    return (range(cut), range(cut, chunks)) if cut else (range(chunks),)


@lru_cache(maxsize=256)
def side_by_side(chunks: tuple[int, ...], heads: int, programs: int, multiprocessors: int) -> tuple[range, ...]:
    """Stretches of a sequence whose serial kernels leave multiprocessors idle; () where they do not, or of several.

    chunks: of each sequence. programs: of a serial kernel for one of them.
    """
    if len(chunks) != 1 or programs >= multiprocessors or not worth_launches(chunks[0], heads, multiprocessors):
        return ()
    (total,) = chunks
    found = (_cut(total, shares) for shares in SHARES)
    return next((cut for cut in found if min(map(len, cut)) >= SHORTEST), ())


def _cut(total: int, shares: Sequence[int]) -> tuple[range, ...]:
    unit = sum(shares) * STEP
    cuts = [(total * before + unit // 2) // unit * STEP for before in accumulate(shares[:-1], initial=0)]
    return tuple(starmap(range, pairwise([*cuts, total])))


def layouts(layout: ChunkLayout, tokens: int, stretches: tuple[range, ...]) -> tuple[ChunkLayout, ...]:
    """Of the one sequence of a layout, `tokens` long: the same chunks, a stretch of them as the sequence."""
    C = layout.chunk

    def of(chunks: range) -> ChunkLayout:
        begin = chunks.start * C
        return layout.over([(0, begin, min(chunks.stop * C, tokens) - begin, chunks.start)])

    return layout.once(("stretches", stretches), lambda: tuple(map(of, stretches)))


class Forward(Protocol):
    @property
    def o(self) -> Tensor:
        """The output, to be filled."""

    def states(self, count: int) -> Tensor:
        """Uninitialised [count, HV, K, V] fp32."""

    def prepare(self, chunks: range) -> None:
        """The operands of these chunks, unless they are there."""

    def scan(self, layout: ChunkLayout, o: Tensor | None, initial: Tensor | None, final: Tensor | None) -> None:
        """Outputs and final states. `initial` and `final` may be one tensor."""


class Backward(Protocol):
    def states(self, count: int) -> Tensor:
        """As above."""

    def reverse(self, layout: ChunkLayout, leaving: Tensor | None, entering: Tensor | None) -> None:
        """Everything that goes from token to token; `leaving` and `entering` may be one tensor."""


def forward(
    op: Forward,
    stretches: Sequence[range],
    rows: Sequence[ChunkLayout],
    initial: Tensor | Awaited | None,
    final: Tensor | None,
) -> None:
    """Fill the op's output and `final` [1, HV, K, V]. rows: `layouts` of the stretches."""
    state = op.states(1) if final is None else final
    if not isinstance(initial, Awaited):
        _begin(state, initial)  # a small kernel would wait long for its place among those of `prepare`
    op.prepare(stretches[0])
    with SerialStream(state.device) as serial:  # after that
        for chunks, row in zip(stretches, rows, strict=True):
            op.prepare(chunks)
            with serial.after_all() if chunks.start else serial.work():
                if not chunks.start and isinstance(initial, Awaited):
                    _begin(state, initial)
                op.scan(row, op.o, state, state)


class Behind:
    """A backward whose reverse scan, and what depends on it alone, has a stream; gradients of inputs follow it.

    Between `begin` and `end`, after which the current stream has it all. It does not hold the op that it is part of: in
    a cycle of the two, what a backward works with would stay until Python looks for such cycles.
    """

    def __init__(self, stretches: Sequence[range], rows: Sequence[ChunkLayout]) -> None:
        self._stretches = stretches
        self._rows = rows
        self._serial = SerialStream(rows[0].sequences.device)
        self._done: list[torch.cuda.Event | None] = []

    def begin(self, op: Backward) -> None:
        op.reverse(_of_no_sequence(self._rows[0]), None, None)  # no kernel: its results are allocated here
        self._serial.__enter__()

    def end(self, *raised: object) -> None:
        self._serial.__exit__(*raised)

    def serially(self) -> AbstractContextManager[None]:
        """What runs in here waits for nothing that the current stream was given since the beginning."""
        return self._serial.work()

    def reverse(self, op: Backward, leaving: Tensor | Awaited | None, entering: Tensor | None) -> None:
        """leaving: gradient of the final state [1, HV, K, V]; entering: that of the initial one, to be filled."""
        with self.serially():
            state = op.states(1) if entering is None else entering
            _begin(state, leaving)
            for row in reversed(self._rows):
                op.reverse(row, state, state)
                self._done.append(self._serial.now())

    def once_reversed(self, in_portions: bool) -> Iterator[range]:
        """The stretches, each as soon as what the current stream is given next will find it done; long ones in two
        portions, if asked for, where what their gradients need meanwhile would be the most of any."""
        total = self._stretches[-1].stop
        for chunks, event in zip(reversed(self._stretches), self._done, strict=True):
            self._serial.wait_for(event)
            middle = (chunks.start + chunks.stop) // (2 * STEP) * STEP
            long = in_portions and len(chunks) > PORTION * total and middle > chunks.start
            yield from (range(middle, chunks.stop), range(chunks.start, middle)) if long else (chunks,)


def _of_no_sequence(layout: ChunkLayout) -> ChunkLayout:
    return layout.once("no sequence", lambda: replace(layout, sequence_count=0))


def _begin(state: Tensor, given: Tensor | Awaited | None) -> None:
    """What goes from stretch to stretch, as it is before the first; after the last it is what was wanted.

    The same memory all the way, given or not, wanted or not: serial kernels are compiled once.
    """
    found = arrived(given)
    if found is None:
        state.zero_()
    else:
        state.copy_(found)
