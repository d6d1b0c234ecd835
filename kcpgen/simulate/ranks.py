"""Several ranks in one process, one at a time: the gather becomes a stack, everything else is the code that ranks run.

Each rank is a thread, but only one of them ever runs. A rank that waits for the others gives way to the next; when
all of them wait, what they sent is stacked and they go on in turn. So a run is as deterministic as a single process,
needs no process group, and kernels of different ranks never overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel.errors import ContextParallelError, RankTimeoutError
from kcpgen.runtime.context_parallel.transport import Signature

T = TypeVar("T")
Sent = tuple[Tensor, "torch.cuda.Event | None"]  # with what says that it is there, where that takes a while
Payloads = dict[int, dict[int, Sent]]  # call -> rank -> what it sent


class SimulatedTransport:
    """The `group` of `build_cp_context` on a simulated rank."""

    def __init__(self, rank: int, size: int, payloads: Payloads, park: Callable[[], None]) -> None:
        self.rank = rank
        self.size = size
        self.attempt = 0
        self.sent_bytes = 0
        self._call = 0
        self._payloads = payloads
        self._park = park

    def meet(self, context: object, about: Signature, timeout: float, *, alone: bool) -> None:
        """Nothing to compare, as in `agree`."""

    def next_attempt(self) -> None:
        self.attempt += 1

    def next_call(self) -> int:
        self._call += 1
        return self._call

    def agree(self, sizes: Signature, about: Signature, timeout: float) -> None:
        """Nothing to compare: all ranks run the same program."""

    def report(self, error: BaseException, *, ahead: int) -> None:
        """Nothing to tell: the others find its payload missing, or marked as failed."""

    def raise_reported(self) -> None:
        """Nothing was told."""

    def all_gather(self, payload: Tensor, timeout: float) -> SimulatedGather:
        self.sent_bytes += payload.numel() * payload.element_size()
        there = torch.cuda.current_stream().record_event() if payload.is_cuda else None
        self._payloads.setdefault(self._call, {})[self.rank] = (payload, there)
        return SimulatedGather(self, self._call)

    def collect(self, call: int) -> Tensor:
        self._park()
        sent = self._payloads[call]
        missing = [rank for rank in range(self.size) if rank not in sent]
        if missing:
            text = f"rank {self.rank} waits in exchange {call}; not there: {missing}"
            raise RankTimeoutError(f"context parallelism: {text}")
        for _, there in sent.values():
            if there is not None:
                torch.cuda.current_stream().wait_event(there)
        return torch.stack([sent[rank][0] for rank in range(self.size)])


class SimulatedGather:
    def __init__(self, transport: SimulatedTransport, call: int) -> None:
        self._transport = transport
        self._call = call

    def wait(self) -> Tensor:
        return self._transport.collect(self._call)


class _Rank(threading.Thread, Generic[T]):
    """A thread that runs between `go_on` and the moment it parks or ends."""

    def __init__(self, rank: int, size: int, payloads: Payloads, body: Callable[..., T]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.transport = SimulatedTransport(rank, size, payloads, self._park)
        self.results: list[T] = []
        self.error: BaseException | None = None
        self._body = body
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._grad = torch.is_grad_enabled()

    def go_on(self) -> None:
        self._turn.release()
        self._back.acquire()

    def _park(self) -> None:
        self._back.release()
        self._turn.acquire()

    def run(self) -> None:
        self._turn.acquire()
        try:
            # With threads of its own, autograd would run the backward of every rank in one of them, and wait for ever.
            with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(self._grad):
                self.results.append(self._body(self.transport))
        except BaseException as error:
            self.error = error
        finally:
            self._back.release()


def run_ranks(size: int, body: Callable[[SimulatedTransport], T]) -> list[T]:
    """`body(transport)` of every rank, results in their order. Raises what a rank raised first of its own."""
    payloads: Payloads = {}
    ranks = [_Rank(rank, size, payloads, body) for rank in range(size)]
    for rank in ranks:
        rank.start()
    running: Sequence[_Rank[T]] = ranks
    while running:
        for rank in running:
            rank.go_on()
        running = [rank for rank in running if rank.error is None and not rank.results]
    errors = [rank.error for rank in ranks if rank.error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, ContextParallelError)), errors[0])
    return [rank.results[0] for rank in ranks]
