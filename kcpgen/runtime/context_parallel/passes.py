"""Forward and backward of one rank: what is computed before, during and after the exchange with the others.

Forward: a rank that passes a sequence on runs it if it begins here, else summarises it, and begins the exchange;
meanwhile it runs what else begins here; then it runs its first sequence, which asks for what came before it as late as
it can. Backward is the mirror image: the first sequence is passed on, the last one waits. Every rank takes part in
every exchange of the group, whatever its own part, so the collectives match on all of them in any mix of forward,
recomputed forward and backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from kcpgen.runtime.awaited import Awaited
from kcpgen.runtime.context_parallel.arguments import told_to_others
from kcpgen.runtime.context_parallel.context import CPContext
from kcpgen.runtime.context_parallel.exchange import Exchange
from kcpgen.runtime.context_parallel.merge import Merge
from kcpgen.runtime.context_parallel.payload import Format, Kind


class Op(Protocol):
    """Sizes of an op on this rank and its way of merging. States are [.., HV, K, V]."""

    name: str
    heads: int
    keys: int
    values: int
    kind: Kind
    merge: Merge
    differentiable: bool  # whether a backward of this call can come

    def states(self, count: int) -> Tensor:
        """Uninitialised [count, HV, K, V] in the dtype and on the device of states."""


class Forward(Op, Protocol):
    """Local sequences are named by a range of their numbers; `initial` and `final` have a row for each of them.

    When a method returns, what the current stream is given next finds all that it has computed.
    """

    def summarise(self, sequence: int, external: Tensor, transition: Tensor | None) -> None:
        """S_next = M S + S_ext over one sequence: S_ext [1, HV, K, V], and M [HV, ...] if asked for.

        S_ext is the final state that `run` would arrive at from none, in its very arithmetic, but for what its gates
        make it forget.
        """

    def run(self, sequences: range, initial: Tensor | Awaited | None, final: Tensor | None) -> None:
        """Their outputs and, if asked for, their final states. What is awaited is asked for as late as can be."""


class Backward(Op, Protocol):
    """`leaving` is the gradient of final states, `entering` that of initial ones; a row for each sequence named."""

    def serially(self) -> AbstractContextManager[None]:
        """Where serial kernels run, and what depends on them alone; what is chunk-parallel may run beside it."""

    def summarise(self, sequence: int, entering: Tensor) -> None:
        """The gradient of one sequence's initial state [1, HV, K, V], when none reaches its final one."""

    def run(self, sequences: range, leaving: Tensor | Awaited | None, entering: Tensor | None) -> None:
        """Everything of their backward that goes from token to token, for `finish` to use; likewise."""

    def finish(self) -> tuple[Tensor | None, ...]:
        """Gradients of the op's tensors, once every sequence was run."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the backward needs of the forward's exchange.

    entering: [HV, K, V], the state that the first sequence entered with; the only one that is not the caller's.
    transitions: [post_num_ranks - 1, HV, ...] of the ranks after this one, which the backward applies transposed.
    """

    entering: Tensor | None
    transitions: Tensor | None


def forward(op: Forward, cp: CPContext, initial: Tensor | None, final: Tensor | None) -> Kept:
    """Run a rank's sequences. initial: [n, HV, K, V]; final: likewise, to be filled.

    Rows of sequences that come from, or go on on, another rank are not the caller's: unused in `initial`, undefined in
    `final`.
    """
    shard = cp.shard
    exchange = _exchange(op, cp, backward=False)
    done = range(0)
    if exchange is not None:
        with exchange.summarising():
            done = _summarise(op, cp, exchange, initial)
    with told_to_others(op.name, cp):
        waiting = range(int(shard.receives))
        _run(op, range(len(waiting), shard.sequences - len(done)), initial, final)
        if exchange is None:
            return Kept(entering=None, transitions=None)
        entering = None
        if shard.receives:
            room = op.states(1)  # kept, so memory of the current stream's, and not a view of all that was gathered
            received = Awaited(lambda: room.copy_(_merge(op, cp, exchange.form, exchange.wait(), None, backward=False)))
            op.run(waiting, received, _rows(final, waiting))
            entering = received.get()[0]
        return Kept(entering=entering, transitions=_transitions_after(op, cp, exchange))


def _run(op: Forward, sequences: range, initial: Tensor | None, final: Tensor | None) -> None:
    if sequences:
        op.run(sequences, _rows(initial, sequences), _rows(final, sequences))


def _summarise(op: Forward, cp: CPContext, exchange: Exchange, initial: Tensor | None) -> range:
    """The last sequence. Where it begins here its summary is the final state of its run: nothing is done twice."""
    shard, form = cp.shard, exchange.form
    if not shard.sends:
        return range(0)
    last = range(shard.sequences - 1, shard.sequences)
    summary = form.states(exchange.payload)[None]
    if shard.interior:
        op.summarise(last.start, summary, form.transition(exchange.payload) if form.transitions else None)
        return range(0)
    op.run(last, _rows(initial, last), summary)
    return last


def backward(
    op: Backward, cp: CPContext, kept: Kept, leaving: Tensor | None, entering: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the op's tensors. leaving: [n, HV, K, V], of final states; entering: likewise, to be filled.

    Rows of sequences that go on on, or come from, another rank are not the caller's: unused in `leaving`, undefined
    in `entering`.
    """
    shard = cp.shard
    exchange = _exchange(op, cp, backward=True)
    done = range(0)
    if exchange is not None:
        with op.serially(), exchange.summarising():
            done = _summarise_gradient(op, cp, exchange, leaving)
    with told_to_others(op.name, cp):
        waiting = range(shard.sequences - int(shard.sends), shard.sequences)
        _run_back(op, range(len(done), waiting.start), leaving, entering)
        if exchange is not None and shard.sends:
            received = Awaited(
                lambda: _merge(op, cp, exchange.form, exchange.wait(), kept.transitions, backward=True)[None]
            )
            op.run(waiting, received, _rows(entering, waiting))
        elif exchange is not None and not exchange.captured:
            exchange.leave()
        found = op.finish()
        if exchange is not None:
            exchange.leave()  # a graph waits for it, as late as can be
        return found


def _summarise_gradient(op: Backward, cp: CPContext, exchange: Exchange, leaving: Tensor | None) -> range:
    """The first sequence. Where it ends here its summary is a result of its backward: nothing is done twice either."""
    shard, first = cp.shard, range(1)
    if not shard.receives:
        return range(0)
    summary = exchange.form.states(exchange.payload)[None]
    if shard.interior:
        op.summarise(0, summary)
        return range(0)
    op.run(first, _rows(leaving, first), summary)
    return first


def _run_back(op: Backward, sequences: range, leaving: Tensor | None, entering: Tensor | None) -> None:
    if sequences:
        op.run(sequences, _rows(leaving, sequences), _rows(entering, sequences))


def _exchange(op: Op, cp: CPContext, *, backward: bool) -> Exchange | None:
    """None where no sequence of the whole row lies on two ranks, which every rank knows."""
    if not cp.shard.crossing:
        return None
    transitions = cp.shard.interiors and op.kind != "identity" and not backward
    form = _format(op.heads, op.keys, op.values, op.kind, transitions)
    return Exchange(op.name, cp, form, op.states(0), backward=backward, differentiable=op.differentiable)


@lru_cache(maxsize=64)
def _format(heads: int, keys: int, values: int, kind: Kind, transitions: bool) -> Format:
    return Format(heads=heads, keys=keys, values=values, kind=kind, transitions=transitions)


def _merge(
    op: Op, cp: CPContext, form: Format, gathered: Tensor, transitions: Tensor | None, *, backward: bool
) -> Tensor:
    """What enters the first sequence, or the gradient of what leaves the last one."""
    shard = cp.shard
    chain = slice(shard.rank + 1, shard.rank + 1 + shard.post_num_ranks)
    if not backward:
        chain = slice(shard.rank - shard.pre_num_ranks, shard.rank)
        transitions = form.transition(gathered)[chain][1:] if form.transitions else None
    return op.merge(form.states(gathered)[chain], transitions, kind=op.kind, backward=backward, method=cp.merge)


def _transitions_after(op: Op, cp: CPContext, exchange: Exchange) -> Tensor | None:
    """A copy: the gathered payloads are not kept until the backward. A rank that needs none of them does not wait."""
    interior = cp.shard.post_num_ranks - 1
    if not (op.differentiable and exchange.form.transitions) or interior < 1:
        exchange.leave()
        return None
    return exchange.form.transition(exchange.wait())[cp.rank + 1 : cp.rank + 1 + interior].clone()


def _rows(states: Tensor | None, sequences: range) -> Tensor | None:
    return None if states is None else states[sequences.start : sequences.stop]
