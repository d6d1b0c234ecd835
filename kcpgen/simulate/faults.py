"""Faults that context-parallel code is known for, planted on purpose: a verdict has to find them.

Each replaces one function of the runtime for the time of a simulated run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel import passes, torch_op
from kcpgen.runtime.context_parallel.payload import Format
from kcpgen.runtime.context_parallel.shard import Shard

Patch = tuple[Any, str, Any]


def _state_lost() -> list[Patch]:
    """The merged state is used by the forward but not kept: the backward starts from what the caller gave."""

    def lost(shard: Shard, initial: Tensor | None, entering: Tensor | None) -> Tensor | None:
        return initial

    return [(module, "entering_states", lost) for module in _backends()]


def _transition_bf16() -> list[Patch]:
    """Transitions rounded to bfloat16 on their way."""
    return _on_arrival(lambda x: x.to(torch.bfloat16).to(x.dtype))


def _head_offset() -> list[Patch]:
    """Every head is given the transition of head 0, as by a pointer without the head's offset."""
    return _on_arrival(lambda x: x[:, :1].expand_as(x).contiguous())


def _wrong_window() -> list[Patch]:
    """A rank passes its first sequence on, not its last; all of them are run as they should be."""
    summarise = passes._summarise

    def wrong(op: Any, cp: Any, exchange: Any, initial: Tensor | None) -> range:
        class First:
            def summarise(self, sequence: int, *rest: Any) -> None:
                op.summarise(0, *rest)

            def run(self, sequences: range, initial: Tensor | None, final: Tensor | None) -> None:
                op.run(range(1), initial, final)  # its outputs are overwritten by its own run
                op.run(sequences, initial, None)

        return summarise(First(), cp, exchange, initial)  # type: ignore[arg-type]

    return [(passes, "_summarise", wrong)]


def _summary_drift() -> list[Patch]:
    """What a rank receives is a little off what the main pass of the rank before arrived at."""
    states = Format.states

    def drifted(self: Format, x: Tensor) -> Tensor:
        return states(self, x) if x.ndim == 1 else states(self, x) * (1 + 2.0**-20)

    return [(Format, "states", drifted)]


def _on_arrival(change: Callable[[Tensor], Tensor]) -> list[Patch]:
    """Change the transitions that were gathered, [W, HV, ...]; one that a rank is about to write is left alone."""
    view = Format.transition

    def changed(self: Format, x: Tensor) -> Tensor:
        return view(self, x) if x.ndim == 1 else change(view(self, x))

    return [(Format, "transition", changed)]


def _backends() -> list[Any]:
    """The modules that take the saved state up again; the one of kernels only where Triton is."""
    try:
        from kcpgen.runtime import chunk_op
    except ImportError:
        return [torch_op]
    return [torch_op, chunk_op]


FAULTS: dict[str, Callable[[], list[Patch]]] = {
    "state-lost": _state_lost,
    "transition-bf16": _transition_bf16,
    "wrong-window": _wrong_window,
    "head-offset": _head_offset,
    "summary-drift": _summary_drift,
}


@contextmanager
def injected(fault: str | None) -> Iterator[None]:
    """Inside, the runtime has this fault; None is no fault."""
    with ExitStack() as stack:
        for target, name, value in FAULTS[fault]() if fault else []:
            stack.enter_context(mock.patch.object(target, name, value))
        yield


__all__ = ["FAULTS", "injected"]
