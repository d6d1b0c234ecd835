"""How long a call takes where the host does not count: captured in a CUDA graph, which is replayed in a loop.

What is captured is one call, with all its layers. Ranks capture and replay alike, each a graph of its own. No time
counts before a replay has given what the call itself gives, to the last bit; a capture that fails is an error, never a
call that is made without one.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from cp_loop import Steady, steady
from torch import Tensor
from torch.distributed import distributed_c10d

Call = Callable[[], Any]
WARM_UPS = 2  # calls before the capture, on its stream: kernels, tables, streams and the communicator are there then


class NotReplayedError(RuntimeError):
    """A capture failed, or what is replayed is not what the call does. Raised on all ranks, whichever it was."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How ranks keep in step; as it is, of one device.

    together: a barrier. settle: after it nothing but the call itself touches the device. heard: what each rank says.
    """

    together: Callable[[], Any] = lambda: None
    settle: Callable[[], Any] = lambda: torch.cuda.synchronize()
    heard: Callable[[str], list[str]] = lambda text: [text]


@dataclass(frozen=True, kw_only=True)
class Replays:
    """times: of a layer; its host's part is the launch of graphs. peak_bytes: of the call, when it was captured."""

    times: Steady
    peak_bytes: int


class Captured:
    """One call in a graph."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._graph = torch.cuda.CUDAGraph()
        self._stream = _stream(torch.cuda.current_device())
        self._outputs: list[Tensor] = []

    def warm_up(self) -> list[Tensor]:
        """What the call returns, made on the stream that the graph is captured from."""
        found: list[Tensor] = []
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                found.clear()
                found += tensors(self._call())
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        return found

    def capture(self) -> int:
        """Returned is the most memory that was allocated meanwhile. Threads that watch collectives may go on."""
        current = torch.cuda.current_stream()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        try:
            with (
                _no_collector(),
                torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._outputs = tensors(self._call())
        finally:
            torch.cuda.set_stream(current)  # torch leaves it at the other where a capture fails
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def replay(self) -> None:
        self._graph.replay()

    def check(self, expected: Sequence[Tensor]) -> None:
        """Replay it once; what was there before is gone."""
        for x in self._outputs:
            x.fill_(1.0)
        self.replay()
        self.compare(expected)

    def compare(self, expected: Sequence[Tensor]) -> None:
        """What the last replay has left."""
        torch.cuda.synchronize()
        differing(self._outputs, expected)

    def release(self) -> None:
        """Its memory, all of which it holds on to, is free for others."""
        self._outputs.clear()
        with suppress(RuntimeError):  # of a capture that failed, which is told already
            torch.cuda.synchronize()
            self._graph.reset()
        gc.collect()
        torch.cuda.empty_cache()


def replays(call: Call, device: str, repeats: int, meeting: Meeting, *, layers: int = 1) -> Replays:
    """As `cp_loop.steady`, of replays. Raises NotReplayedError on all ranks where anything went wrong on one."""
    graph = Captured(call)
    try:
        expected = graph.warm_up()
        meeting.settle()
        meeting.together()
        peak = _on_all(meeting, "capture", graph.capture)
        _on_all(meeting, "first replay", lambda: graph.check(expected))
        times = steady(graph.replay, device, repeats, meeting.together, layers=layers)
        _on_all(meeting, "last replay", lambda: graph.compare(expected))
        held = sum(x.numel() * x.element_size() for x in expected)
        return Replays(times=times, peak_bytes=peak - held)
    finally:
        graph.release()


def _on_all(meeting: Meeting, what: str, step: Callable[[], Any]) -> Any:
    """Ranks go on only where all of them can: one that replays waits in its graph for the others, and for ever."""
    wrong, found = "", None
    try:
        found = step()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        wrong = f"{what}: {told(error)}"
    said = meeting.heard(wrong)
    if any(said):
        ranks = [f"rank {rank}: {text}" if len(said) > 1 else text for rank, text in enumerate(said) if text]
        raise NotReplayedError("; ".join(ranks))
    return found


def told(error: BaseException) -> str:
    """What was raised first comes first: the end of a capture that failed raises once more."""
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    return ", then ".join(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}" for e in reversed(chain))


def tensors(found: Any) -> list[Tensor]:
    """What a call returned, without what autograd keeps for it."""
    return [x.detach() for x in ([found] if isinstance(found, Tensor) else found)]


def differing(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raises ValueError unless all are the same to the last bit."""
    for number, (x, y) in enumerate(zip(outputs, expected, strict=True)):
        if not torch.equal(x, y):
            apart, most = int((x != y).sum()), float((x.double() - y.double()).abs().max())
            raise ValueError(
                f"tensor {number} of {len(expected)} differs in {apart} of {x.numel()} numbers by {most:.3g}"
            )


_numbers = itertools.count()


def heard_over_store(text: str) -> list[str]:
    """What each rank says, by the host alone: a failed capture may have left a communicator that gathers no more."""
    store, number = distributed_c10d._get_default_store(), next(_numbers)
    store.set(f"graphs/{number}/{dist.get_rank()}", json.dumps(text))
    found: list[str] = [json.loads(store.get(f"graphs/{number}/{rank}")) for rank in range(dist.get_world_size())]
    return found


@contextmanager
def _no_collector() -> Iterator[None]:
    """What Python finds to be garbage may be memory or events of a device, and a capture is no time to free them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@lru_cache(maxsize=8)
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
