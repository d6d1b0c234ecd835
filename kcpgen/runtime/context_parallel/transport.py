"""All-gathers among ranks, each call counted, none of which waits for ever.

On a host (gloo) a rank that waits looks every now and then whether another has reported a failure. On a CUDA device
(NCCL) the wait belongs to the stream, so that the host can launch ahead; there a thread watches, and ends the
communicator when time is up. Either way the message says which ranks are missing or at another call.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from kcpgen.runtime.context_parallel.errors import (
    ContextParallelError,
    RankFailedError,
    RankMismatchError,
    RankTimeoutError,
)

Signature = Mapping[str, "str | int"]
ANSWER_WITHIN = 3.0  # seconds that the others get to say where they are, once a wait has run out


class Pending(Protocol):
    def wait(self) -> Tensor:
        """The payloads of all ranks, [W, n], in the order of the ranks."""


class Transport(Protocol):
    """One rank's way to the others. All ranks make the same calls in the same order."""

    rank: int
    size: int

    def next_call(self) -> int:
        """Number of the exchange that begins."""

    def agree(self, sizes: Signature, about: Signature, timeout: float) -> None:
        """Compare with all ranks the first time that these sizes occur. Raises RankMismatchError on every rank.

        `about` is what else the exchange is about: compared too, but no reason to compare again.
        """

    def all_gather(self, payload: Tensor, timeout: float) -> Pending: ...

    def report(self, error: BaseException, *, ahead: int) -> None:
        """Tell the others what failed here: in this exchange (ahead = 0), or before the next one (1), then missed."""

    def raise_reported(self) -> None:
        """Raise RankFailedError if another rank reported a failure of this exchange."""


class GroupTransport:
    """Over a torch.distributed group, with the group's store for what must be said when a collective does not end."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.call = 0
        self.broken: ContextParallelError | None = None
        self._agreed: list[Signature] = []
        self._latest: dict[str, Any] = {}
        self._store = PrefixStore("kcpgen", _store_of(group))
        self._watch = Watch()

    def next_call(self) -> int:
        if self.broken is not None:
            raise self.broken
        self.call += 1
        return self.call

    def agree(self, sizes: Signature, about: Signature, timeout: float) -> None:
        self._latest = {"exchange": self.call, **about, **sizes}
        if sizes in self._agreed:
            return
        table = f"sizes/{len(self._agreed)}"
        self._store.set(f"{table}/{self.rank}", json.dumps(self._latest))
        self.wait_until(lambda: self._store.check([f"{table}/{r}" for r in range(self.size)]), timeout)
        differing = _differing(self._read(table), self._latest)
        if differing:
            raise self._break(RankMismatchError(f"context parallelism: {differing}"))
        self._agreed.append(sizes)

    def all_gather(self, payload: Tensor, timeout: float) -> Pending:
        if payload.is_cuda and _has_backend(self.group, "cuda"):
            return _OnStream(self, payload, timeout)
        return _OnHost(self, payload, timeout)

    def report(self, error: BaseException, *, ahead: int) -> None:
        call = self.call + ahead
        text = f"rank {self.rank} failed {'before' if ahead else 'in'} exchange {call}: {type(error).__name__}: {error}"
        with suppress(Exception):
            self._store.set(f"failed/{call}", json.dumps([ahead, text]))

    def raise_reported(self) -> None:
        error, missed = self._reported(self.call)
        if error is not None:
            raise self._break(error) if missed else error

    def _reported(self, call: int) -> tuple[RankFailedError | None, bool]:
        """What another rank said of this exchange, and whether it then missed it."""
        told = ""
        with suppress(dist.DistError):
            if self._store.check([f"failed/{call}"]):
                told = self._store.get(f"failed/{call}").decode()
        if not told:
            return None, False
        missed, text = json.loads(told)
        return RankFailedError(f"context parallelism: {text}"), bool(missed)

    def wait_until(self, there: Callable[[], bool], timeout: float) -> None:
        """Look again and again, whether it is there or another rank has reported a failure."""
        pause, now = 2e-5, time.monotonic()
        until, look = now + timeout, now + 0.2
        while not there():
            now = time.monotonic()
            if now > look:
                self.raise_reported()
                look = now + 0.2
            if now > until:
                raise self.give_up(f"no answer within {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)

    def give_up(self, reason: str) -> ContextParallelError:
        """Say where this rank waits, hear where the others are, and put it into words."""
        self.say_where("waiting")
        answers = self.answers()
        absent = [r for r in range(self.size) if r not in answers]
        text = f"context parallelism: rank {self.rank} waits in exchange {self.call}: {reason}"
        if absent:
            text += f"; not there: rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        differing = _differing(answers, {**self._latest, "state": "waiting"})
        text += f"; {differing}" if differing else ""
        return self._break(RankMismatchError(text) if differing else RankTimeoutError(text))

    def say_where(self, state: str) -> None:
        with suppress(Exception):
            self._store.set(f"where/{self.call}/{self.rank}", json.dumps({**self._latest, "state": state}))

    def answers(self) -> dict[int, Mapping[str, Any]]:
        """What the others said of this exchange or, while they have not, of nothing; waits a little for them."""
        table = f"where/{self.call}"
        until = time.monotonic() + ANSWER_WITHIN
        while time.monotonic() < until:
            with suppress(Exception):
                if self._store.check([f"{table}/{r}" for r in range(self.size)]):
                    break
            time.sleep(0.05)
        with suppress(Exception):
            return self._read(table)
        return {self.rank: self._latest}

    def _break(self, error: ContextParallelError) -> ContextParallelError:
        """Collectives are out of step from here on: every later call raises the same."""
        self.broken = error
        return error

    def _read(self, table: str) -> dict[int, Mapping[str, Any]]:
        there = [r for r in range(self.size) if self._store.check([f"{table}/{r}"])]
        return {r: json.loads(self._store.get(f"{table}/{r}")) for r in there}

    def watch(self, work: dist.Work, timeout: float) -> None:
        call, until = self.call, time.monotonic() + timeout
        self._watch.add(work, lambda: self._in_trouble(call, until))

    def _in_trouble(self, call: int, until: float) -> bool:
        """From the watching thread, of a collective on a device: if it will not end, end the communicator."""
        error, missed = self._reported(call)
        if error is not None and missed:
            self._break(error)
        elif time.monotonic() > until:
            self.give_up("the collective did not end in time")
        else:
            return False
        print(f"{self.broken}\nending the communicator; the next call raises", file=sys.stderr, flush=True)
        with suppress(Exception):
            self.group.abort()
        return True


class _OnStream:
    """NCCL: the host goes on, the current stream waits."""

    def __init__(self, transport: GroupTransport, payload: Tensor, timeout: float) -> None:
        self._gathered = payload.new_empty(transport.size, payload.numel())
        self._work = _gather(self._gathered, payload, transport.group)
        if not torch.cuda.is_current_stream_capturing():
            transport.watch(self._work, timeout)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._gathered


class _OnHost:
    """gloo: the host waits, at most for so long. A payload on a device goes through the host."""

    def __init__(self, transport: GroupTransport, payload: Tensor, timeout: float) -> None:
        self._transport = transport
        self._device = payload.device
        self._timeout = timeout
        host = payload.cpu()
        self._gathered = host.new_empty(transport.size, host.numel())
        self._work = _gather(self._gathered, host, transport.group)

    def wait(self) -> Tensor:
        self._transport.wait_until(self._work.is_completed, self._timeout)
        try:
            self._work.wait()
        except RuntimeError as error:
            self._transport.raise_reported()
            raise self._transport.give_up(str(error).splitlines()[0]) from error
        return self._gathered.to(self._device)


def _gather(gathered: Tensor, payload: Tensor, group: dist.ProcessGroup) -> dist.Work:
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the newer name, where torch has it
    work: dist.Work = gather(gathered.view(-1), payload, group=group, async_op=True)
    return work


@dataclass(frozen=True, kw_only=True)
class _Watched:
    work: dist.Work
    in_trouble: Callable[[], bool]


class Watch:
    """One thread that looks at collectives under way, alive only while there are any."""

    def __init__(self) -> None:
        self._items: list[_Watched] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work, in_trouble: Callable[[], bool]) -> None:
        with self._lock:
            self._items.append(_Watched(work=work, in_trouble=in_trouble))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kcpgen-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(0.2)
            with self._lock:
                self._items = [item for item in self._items if not item.work.is_completed()]
                oldest = self._items[:1]
                if not oldest:
                    self._thread = None
                    return
            if oldest[0].in_trouble():
                with self._lock:
                    self._items, self._thread = [], None
                return


def _differing(answers: Mapping[int, Mapping[str, Any]], mine: Mapping[str, Any]) -> str:
    """The first field in which some rank differs from most, in words; "" if there is none."""
    for field in mine:
        values = {rank: answer.get(field) for rank, answer in answers.items()}
        common = max(sorted(map(str, set(values.values()))), key=[str(v) for v in values.values()].count)
        for rank, value in values.items():
            if str(value) != common:
                return f"rank {rank} has `{field}` {value}, others {common}"
    return ""


def _store_of(group: dist.ProcessGroup) -> Store:
    store: Store = distributed_c10d._get_process_group_store(group)
    return store


def _has_backend(group: dist.ProcessGroup, device: str) -> bool:
    config = str(dist.get_backend_config(group))
    return any(pair.startswith(f"{device}:") and not pair.endswith(":gloo") for pair in config.split(","))
