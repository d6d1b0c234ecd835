"""Where the time of a context-parallel call goes: its parts timed on the device's own clock."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from kcpgen.runtime import stretches
from kcpgen.runtime.context_parallel import exchange, passes, torch_op

Function = Callable[..., Any]


class Clock:
    """Spans between two points of the current stream, in ms; of the host's clock on a CPU.

    A part within a part is none of the outer one.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._inner: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._open: list[str] = []

    def now(self) -> Any:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) if self.device == "cuda" else 1e3 * (end - start)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._open.append(name)
        start = self.now()
        yield
        span = (start, self.now())
        self._open.pop()
        self._spans[name].append(span)
        if self._open:
            self._inner[self._open[-1]].append(span)

    def totals(self) -> dict[str, float]:
        """Sum of each part since the last call."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        found = {name: self._sum(spans) - self._sum(self._inner[name]) for name, spans in self._spans.items()}
        self._spans.clear()
        self._inner.clear()
        return found

    def _sum(self, spans: list[tuple[Any, Any]]) -> float:
        return sum(self.between(*span) for span in spans)


# The clock that parts go to: that of the thread, a simulated rank, or else this one (autograd has its own threads).
_default: list[Clock] = []
_of_thread = threading.local()


@contextmanager
def default_clock(clock: Clock) -> Iterator[None]:
    _default.append(clock)
    yield
    _default.pop()


def set_thread_clock(clock: Clock) -> None:
    _of_thread.clock = clock


def timed(part: str, function: Function) -> Function:
    """The function, its time added to the current clock."""

    def wrapped(*args: Any, **keywords: Any) -> Any:
        clock = getattr(_of_thread, "clock", _default[-1] if _default else None)
        if clock is None:
            return function(*args, **keywords)
        with clock.part(part):
            return function(*args, **keywords)

    return wrapped


# Methods of the runtime, and the part of a call that each of them is.
METHODS = (
    ("Forward", "summarise", "pre-process"),
    ("Forward", "run", "scan"),
    ("Backward", "summarise", "pre-process"),
    ("Backward", "run", "reverse"),
    ("Backward", "finish", "gradients"),
)


@contextmanager
def own_parts(device: str) -> Iterator[None]:
    """Inside, our ops tell the current clock of prepare, pre-process, gather, merge, scan and so on.

    One after the other: chunk-parallel kernels do not run beside serial ones, so that each part is what it takes alone.
    """
    targets: list[tuple[Any, str, str]] = [(exchange.Exchange, "wait", "gather"), (passes, "_merge", "merge")]
    targets += [(getattr(torch_op, f"Torch{owner}"), name, part) for owner, name, part in METHODS]
    if device == "cuda":
        from kcpgen.runtime import chunk_op

        targets += [(getattr(chunk_op, owner), name, part) for owner, name, part in METHODS]
        targets += [(chunk_op.Forward, "prepare", "prepare"), (chunk_op.Backward, "replay", "replay")]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(stretches, "side_by_side", return_value=()))
        for owner, name, part in targets:
            stack.enter_context(mock.patch.object(owner, name, timed(part, getattr(owner, name))))
        yield
