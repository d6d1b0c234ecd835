"""Checks of an op's arguments that `cp_context` brings with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kcpgen.runtime.checks import refusal
from kcpgen.runtime.context_parallel.context import CPContext
from kcpgen.runtime.context_parallel.errors import ContextParallelError
from kcpgen.runtime.functions import outside_graphs


@contextmanager
def meeting_others(op: str, cp: object) -> Iterator[None]:
    """One call of an op. Ranks whose contexts differ find that out here; an error in the body is reported to all."""
    with told_to_others(op, cp, begins=True):
        yield


@contextmanager
def told_to_others(op: str, cp: object, *, begins: bool = False) -> Iterator[None]:
    """An error in the body is reported to the ranks that will wait for this one. TypeError for a wrong context."""
    if cp is not None and not isinstance(cp, CPContext):
        raise TypeError(
            refusal(op, "cp_context", f"of type {type(cp).__name__}", "what build_cp_context returns, or None")
        )
    if cp is not None and begins:
        _begin(cp)
    try:
        yield
    except ContextParallelError:  # known to the others, or theirs
        raise
    except Exception as error:
        if cp is not None and cp.shard.crossing:
            cp.transport.report(error, ahead=1)
        raise


@outside_graphs
def _begin(cp: CPContext) -> None:
    cp.meet()
    if cp.shard.crossing:
        cp.transport.next_attempt()


def share(op: str, cp: CPContext, cu_seqlens: object, sizes: Mapping[str, int]) -> int:
    """How many sequences the global row has, which is N of the states. Raises ValueError."""
    if cu_seqlens is not None:
        allowed = "None together with `cp_context`, which knows this rank's sequences"
        raise ValueError(refusal(op, "cu_seqlens", "given", allowed))
    if sizes["B"] != 1:
        raise ValueError(refusal(op, "cp_context", f"given with a batch of B = {sizes['B']}", "one packed row, B = 1"))
    if sizes["T"] != cp.tokens:
        allowed = f"the {cp.tokens} tokens that rank {cp.rank} of {cp.world_size} holds"
        raise ValueError(refusal(op, "cp_context", f"given with T = {sizes['T']} tokens", allowed))
    return cp.global_sequences
