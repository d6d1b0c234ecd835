"""Forward and backward of sequences cut into segments within one device.

As on the ranks of context parallelism, a segment is summarised by the scan itself, and M is worked out only strictly
inside a sequence: where one begins, or backward ends, its own state is known, unless a rank awaits it (`foresee`). What
differs is that all segments of all sequences are summarised, put together and run side by side, in one launch each.

Where gates forget what enters a segment, its summary runs few of its chunks, without the caller's state if that is what
enters, and M is zero (`kcpgen.runtime.forgetting`). What runs for its outputs runs whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kcpgen.runtime.chains import fold
from kcpgen.runtime.context_parallel.payload import Kind
from kcpgen.runtime.layout import ChunkLayout
from kcpgen.runtime.pieces import Pieces
from kcpgen.runtime.streams import side_by_side


class Op(Protocol):
    """States are [.., HV, K, V] fp32, a row for each row of the layout that a method is given."""

    kind: Kind

    def states(self, count: int) -> Tensor:
        """Uninitialised [count, HV, K, V]."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Of one sequence, made before the state that reaches it is known: summaries from zero, and M of those segments."""

    summaries: Tensor
    transitions: Tensor | None


class Forward(Op, Protocol):
    @property
    def o(self) -> Tensor:
        """The output, to be filled."""

    def scan(self, layout: ChunkLayout, o: Tensor | None, initial: Tensor | None, final: Tensor | None) -> None:
        """Outputs and final states, each unless None. `initial` and `final` may be one tensor."""

    def make_transitions(self, cut: Pieces) -> None:
        """M of every inner segment, for `transitions`; nothing where that is the identity or known already."""

    def keep_transitions(self, cut: Pieces, inner: Tensor | None) -> None:
        """Likewise of what was made elsewhere."""

    def transitions(self, cut: Pieces) -> Tensor | None:
        """M of inner segments [.., HV, ...]; None where it is the identity."""

    def transitions_of(self, layout: ChunkLayout) -> Tensor | None:
        """M of each row of a layout, made now; None where it is the identity."""


class Backward(Op, Protocol):
    def transitions(self, cut: Pieces) -> Tensor | None:
        """As the forward made them."""

    def transitions_of(self, layout: ChunkLayout) -> Tensor | None:
        """As above."""

    def summary(self, layout: ChunkLayout, leaving: Tensor | None, entering: Tensor) -> None:
        """Gradients of initial states only. `leaving` and `entering` may be one tensor."""

    def reverse(self, layout: ChunkLayout, leaving: Tensor | None, entering: Tensor | None) -> None:
        """Everything that goes from token to token; gradients of initial states unless None."""


def forward(
    op: Forward, cut: Pieces, initial: Tensor | None, final: Tensor | None, entering: Tensor | None = None
) -> None:
    """Fill the op's output and `final` [N, HV, K, V]. entering: the states that enter segments, where known already."""
    if entering is None:
        entering, _ = _entering(op, cut, initial)
    at_once = _of_whole(initial, cut)
    of_whole, of_pieces = (
        None if final is None else op.states(layout.sequence_count) for layout in (cut.whole, cut.pieces)
    )
    _launch(
        lambda: op.scan(cut.pieces, op.o, entering, of_pieces),
        cut.whole,
        lambda: op.scan(cut.whole, op.o, at_once, of_whole),
    )
    if final is not None:
        _put(final, cut, of_whole, of_pieces, cut.last)


def summarise(op: Forward, cut: Pieces, external: Tensor) -> Tensor:
    """The final states alone, from no initial ones, of sequences all of which are cut. Returned are the summaries of
    all segments but the last, for `foresee`."""
    entering, summaries = _entering(op, cut, None)
    op.scan(cut.ends, None, entering[cut.last], external)
    return summaries


def foresee(op: Forward, cut: Pieces, summaries: Tensor | None) -> Ahead:
    """What the segments of one sequence need that does not wait for its initial state.

    summaries: those that `summarise` has made of the same segments, if it has.
    """
    made: list[Tensor | None] = []
    if summaries is None:
        summaries = op.states(cut.leading.sequence_count)
        _launch(
            lambda: op.scan(cut.leading, None, None, summaries),
            cut.leading,
            lambda: made.append(op.transitions_of(cut.leading)),
        )
        op.keep_transitions(cut, None if made[0] is None else made[0][1:])
        return Ahead(summaries=summaries, transitions=made[0])
    first = op.transitions_of(cut.beginnings)
    return Ahead(summaries=summaries, transitions=_joined(first, op.transitions(cut)))


def catch_up(op: Forward, cut: Pieces, initial: Tensor, ahead: Ahead) -> Tensor:
    """The states that enter the segments, now that the first of them is there."""
    entering = op.states(cut.pieces.sequence_count)
    fold(op.kind, cut.chains, initial, ahead.summaries, ahead.transitions, entering, backward=False, ahead=True)
    return entering


def foresee_gradient(op: Backward, cut: Pieces, summaries: Tensor | None) -> Ahead:
    """Likewise, of what does not wait for the gradient of its final state."""
    last: list[Tensor | None] = []

    def transitions() -> None:
        last.append(op.transitions_of(cut.ends))

    if summaries is None:
        summaries = op.states(cut.following.sequence_count)
        _launch(lambda: op.summary(cut.following, None, summaries), cut.ends, transitions)
    else:
        transitions()
    return Ahead(summaries=summaries, transitions=_joined(op.transitions(cut), last[0]))


def catch_up_gradient(op: Backward, cut: Pieces, leaving: Tensor, ahead: Ahead) -> Tensor:
    """The gradients of the states that leave the segments."""
    gradients = op.states(cut.pieces.sequence_count)
    fold(op.kind, cut.chains, leaving, ahead.summaries, ahead.transitions, gradients, backward=True, ahead=True)
    return gradients


def backward(
    op: Backward, cut: Pieces, leaving: Tensor | None, entering: Tensor | None, gradients: Tensor | None = None
) -> None:
    """leaving: the gradient of final states [N, HV, K, V]; entering: that of initial ones, to be filled.

    gradients: of the states that leave segments, where they are known already.
    """
    if gradients is None:
        gradients, _ = _leaving(op, cut, leaving)
    reaching = _of_whole(leaving, cut)
    of_whole, of_pieces = (
        None if entering is None else op.states(layout.sequence_count) for layout in (cut.whole, cut.pieces)
    )
    _launch(
        lambda: op.reverse(cut.pieces, gradients, of_pieces),
        cut.whole,
        lambda: op.reverse(cut.whole, reaching, of_whole),
    )
    if entering is not None:
        _put(entering, cut, of_whole, of_pieces, cut.first)


def summarise_gradient(op: Backward, cut: Pieces, entering: Tensor) -> Tensor:
    """The gradients of initial states alone, when none reaches final ones, likewise."""
    leaving, summaries = _leaving(op, cut, None)
    op.summary(cut.beginnings, leaving[cut.first], entering)
    return summaries


def _entering(op: Forward, cut: Pieces, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states that enter the segments, and the summaries that they come from."""
    summaries, starting = _summaries(op, cut.leading, initial, cut.first_leading, cut.sequences)
    _launch(
        lambda: op.scan(cut.leading, None, starting, summaries),
        cut.inner,
        lambda: op.make_transitions(cut),
    )
    entering = op.states(cut.pieces.sequence_count)
    fold(op.kind, cut.chains, initial, summaries, op.transitions(cut), entering, backward=False)
    return entering, summaries


def _leaving(op: Backward, cut: Pieces, leaving: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of the states that leave the segments, likewise."""
    summaries, starting = _summaries(op, cut.following, leaving, cut.last_following, cut.sequences)
    op.summary(cut.following, starting, summaries)
    gradients = op.states(cut.pieces.sequence_count)
    fold(op.kind, cut.chains, leaving, summaries, op.transitions(cut), gradients, backward=True)
    return gradients, summaries


def _joined(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else torch.cat([one, other])


def _launch(main: Callable[[], None], layout: ChunkLayout, other: Callable[[], None]) -> None:
    """`main`, and beside it `other`, which works on `layout`; that may be without rows."""
    if layout.sequence_count:
        side_by_side(layout.sequences.device, main, other)
    else:
        main()


def _summaries(
    op: Op, layout: ChunkLayout, given: Tensor | None, rows: Tensor, sequences: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Room for a layout's summaries, and what they start from: the caller's states in `rows`, zero in all others.

    That is the same memory: a program reads its tile of a state before anything, and writes it after everything.
    """
    summaries = op.states(layout.sequence_count)
    if given is None:
        return summaries, None
    summaries.zero_()
    summaries.index_copy_(0, rows, given[sequences])
    return summaries, summaries


def _of_whole(given: Tensor | None, cut: Pieces) -> Tensor | None:
    return None if given is None or not cut.whole.sequence_count else given[cut.whole_sequences]


def _put(out: Tensor, cut: Pieces, of_whole: Tensor | None, of_pieces: Tensor | None, ends: Tensor) -> None:
    """States by row of the tables to the caller's rows, those of chains from the segment at their end."""
    assert of_whole is not None
    assert of_pieces is not None
    if not len(of_whole):  # chains are in the order of the sequences
        torch.index_select(of_pieces, 0, ends, out=out)
        return
    out.index_copy_(0, cut.whole_sequences, of_whole)
    out.index_copy_(0, cut.sequences, of_pieces[ends])
