"""Checks of an op's arguments that `cp_context` brings with it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from kcpgen.runtime.checks import refusal
from kcpgen.runtime.context_parallel.context import CPContext
from kcpgen.runtime.context_parallel.errors import ContextParallelError
from kcpgen.runtime.functions import outside_graphs


def meeting_others(op: str, cp: object) -> AbstractContextManager[None]:
    """One call of an op. Ranks whose contexts differ find that out here; an error in the body is reported to all."""
    return _Told(op, cp, begins=True)


def told_to_others(op: str, cp: object) -> AbstractContextManager[None]:
    """An error in the body is reported to the ranks that will wait for this one. TypeError for a wrong context."""
    return _Told(op, cp, begins=False)


class _Told(AbstractContextManager[None]):
    def __init__(self, op: str, cp: object, *, begins: bool) -> None:
        if cp is not None and not isinstance(cp, CPContext):
            allowed = "what build_cp_context returns, or None"
            raise TypeError(refusal(op, "cp_context", f"of type {type(cp).__name__}", allowed))
        self._cp = cp
        self._begins = begins

    def __enter__(self) -> None:
        if self._cp is not None and self._begins:
            _begin(self._cp)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Not of errors that are known to the others, or theirs."""
        if self._cp is None or not isinstance(error, Exception) or isinstance(error, ContextParallelError):
            return
        if self._cp.shard.crossing:
            self._cp.transport.report(error, ahead=1)


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
