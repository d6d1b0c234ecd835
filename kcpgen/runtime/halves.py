"""Sequences of few heads, in two halves of heads that forget and whole of the others.

A head whose gates leave nothing of what enters a sequence's second half needs a few chunks of the first one to begin
there, and both halves side by side take half the time. One that remembers would need all of them first. Sizes decide
what is launched, long before anybody has seen a gate; so both are, and of each head one launch does nothing: a head has
as many programs either way, since 64 columns of two halves are 32 columns of the whole (`kcpgen.runtime.hopper_roles`).

What a head forgets is a bound's to say (`kcpgen.runtime.forgetting`), of the end of the first half in the forward, and
of the start of the second one, through which gradients go back, in the backward. Two segments of a sequence are
bit-identical to all of it, but for what was forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from kcpgen.runtime.layout import ChunkLayout
from kcpgen.runtime.pieces import in_parts
from kcpgen.runtime.streams import beside, join, side_by_side

SHORTEST = 64  # chunks of a half: with 32, heads that remember lose by two more launches what the others gain

_forced: ContextVar[bool | None] = ContextVar("halves", default=None)


@contextmanager
def forced_halves(choice: bool | None) -> Iterator[None]:
    """Calls made inside have halves, of sequences of two chunks or more, or none; None leaves it to their sizes."""
    token = _forced.set(choice)
    try:
        yield
    finally:
        _forced.reset(token)


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Layouts of all N sequences over the same chunks: as they are, their first halves, their second ones, and both.

    both: N first halves, then N second ones.
    """

    whole: ChunkLayout
    first: ChunkLayout
    second: ChunkLayout
    both: ChunkLayout


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The heads that a launch of a serial kernel is for: of others it reads and writes nothing.

    forgotten: int32 [rows, HV], how many chunks of a half do not matter to what goes from one to the other. forgetting:
    whether heads of which there are any are meant, or the others. needed: int32 [rows, HV], the chunks of such a half
    that do, for its summary.
    """

    forgotten: Tensor
    forgetting: bool
    needed: Tensor | None = None


def wanted(layout: ChunkLayout, *, few: bool) -> bool:
    """Whether sequences of such lengths are to have halves.

    few: whether serial kernels take 32 columns of a whole sequence, and so both halves 64 of the same multiprocessors.
    """
    shortest = min(layout.lengths, default=0)
    forced = _forced.get()
    if forced is not None:
        return forced and shortest >= 2
    return few and shortest >= 2 * SHORTEST


def halved(layout: ChunkLayout, batch: int, starts: Sequence[int]) -> Halves:
    """Of a layout whose sequences have two chunks or more. batch, starts: as `pieces.cut` takes them."""
    spans = [(row, begin, end) for row in range(batch) for begin, end in pairwise(starts)]
    before = accumulate(layout.lengths, initial=0)
    rows = [in_parts(*span, at, layout.chunk, 2) for span, at in zip(spans, before, strict=False)]
    first, second = ([row[half] for row in rows] for half in range(2))
    return Halves(
        whole=layout, first=layout.over(first), second=layout.over(second), both=layout.over([*first, *second])
    )


class Op(Protocol):
    def states(self, count: int) -> Tensor:
        """Uninitialised [count, HV, K, V] fp32."""

    def counts(self, *rows: int) -> Tensor:
        """Uninitialised int32 [.., HV]."""

    def look(self, layout: ChunkLayout, needed: Tensor, *, from_the_start: bool, forgotten: Tensor) -> None:
        """Fill `needed` [N, HV], how many chunks at the end of each sequence its summary depends on, or at its start
        that of the gradient; and `forgotten` [2, N, HV], twice how many others there are."""


class Forward(Op, Protocol):
    @property
    def o(self) -> Tensor:
        """The output, to be filled."""

    def prepare_all(self) -> None:
        """The operands of all chunks."""

    def scan(
        self, layout: ChunkLayout, o: Tensor | None, initial: Tensor | None, final: Tensor | None, chosen: Chosen
    ) -> None:
        """Outputs and final states of chosen heads, each unless None. `initial` and `final` may be one tensor."""


class Backward(Op, Protocol):
    def summary(self, layout: ChunkLayout, leaving: Tensor | None, entering: Tensor, chosen: Chosen) -> None:
        """Gradients of initial states only, of chosen heads."""

    def reverse(self, layout: ChunkLayout, leaving: Tensor | None, entering: Tensor | None, chosen: Chosen) -> None:
        """Everything that goes from token to token, of chosen heads; gradients of initial states unless None. `leaving`
        and `entering` may be one tensor."""


def forward(op: Forward, halves: Halves, initial: Tensor | None, final: Tensor | None) -> None:
    """Fill the op's output and `final` [N, HV, K, V], unless None."""
    count = halves.whole.sequence_count
    needed, forgotten = op.counts(count), op.counts(2, count)
    states = op.states(2 * count)  # that enter halves, then those that leave them
    with beside(states.device):
        op.look(halves.first, needed, forgotten=forgotten, from_the_start=False)
        _begin(states[:count], initial)
    op.prepare_all()
    o = op.o
    join(states.device)

    def both() -> None:
        summarised = Chosen(forgotten=forgotten[0], forgetting=True, needed=needed)
        op.scan(halves.first, None, None, states[count:], summarised)
        leaving = None if final is None else states
        op.scan(halves.both, o, states, leaving, Chosen(forgotten=forgotten, forgetting=True))

    others = Chosen(forgotten=forgotten[0], forgetting=False)
    side_by_side(states.device, lambda: op.scan(halves.whole, o, initial, final, others), both)
    if final is not None:
        _put(final, forgotten[0], states[count:])


def backward(op: Backward, halves: Halves, leaving: Tensor | None, entering: Tensor | None) -> None:
    """leaving: the gradient of final states [N, HV, K, V]; entering: that of initial ones, to be filled."""
    count = halves.whole.sequence_count
    needed, forgotten = op.counts(count), op.counts(2, count)
    states = op.states(2 * count)  # gradients of states that leave halves, then of those that enter them
    op.look(halves.second, needed, forgotten=forgotten, from_the_start=True)
    _begin(states[count:], leaving)

    def both() -> None:
        summarised = Chosen(forgotten=forgotten[0], forgetting=True, needed=needed)
        op.summary(halves.second, None, states[:count], summarised)
        into = None if entering is None else states
        op.reverse(halves.both, states, into, Chosen(forgotten=forgotten, forgetting=True))

    others = Chosen(forgotten=forgotten[0], forgetting=False)
    side_by_side(states.device, lambda: op.reverse(halves.whole, leaving, entering, others), both)
    if entering is not None:
        _put(entering, forgotten[0], states[:count])


def _begin(states: Tensor, given: Tensor | None) -> None:
    if given is None:
        states.zero_()
    else:
        states.copy_(given)


def _put(into: Tensor, forgotten: Tensor, states: Tensor) -> None:
    """Of heads that forget, what came of their halves."""
    into.copy_(torch.where((forgotten > 0)[:, :, None, None], states, into))
