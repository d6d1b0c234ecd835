"""All-gathers among ranks, each call counted, none of which waits for ever.

On a host (gloo) a rank that waits looks every now and then whether another has reported a failure. On a CUDA device
(NCCL) the wait belongs to the stream, so that the host can launch ahead; there a thread watches, and ends the
communicator when time is up. Either way the message says which ranks are missing or at another call.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]
from torch.nn.functional import pad

from kcpgen.runtime import streams
from kcpgen.runtime.context_parallel.board import Board, differing
from kcpgen.runtime.context_parallel.deferred import check_deferred
from kcpgen.runtime.context_parallel.errors import (
    ContextParallelError,
    RankFailedError,
    RankMismatchError,
    RankTimeoutError,
)

Signature = Mapping[str, "str | int"]
ANSWER_WITHIN = 3.0  # seconds that the others get to say where they are, once something is wrong
LOOK_EVERY = 0.2  # seconds


class Pending(Protocol):
    def wait(self) -> Tensor:
        """The payloads of all ranks, [W, n], in the order of the ranks."""


class Transport(Protocol):
    """One rank's way to the others. All ranks make the same calls in the same order."""

    rank: int
    size: int
    attempt: int  # number of the latest call in which ranks were to meet, whether or not it got as far as that

    def meet(self, context: object, about: Signature, timeout: float, *, alone: bool) -> None:
        """Compare a context with those of all ranks, the first time that it is used. Raises RankMismatchError.

        No rank waits for that but one that is `alone`, without an exchange in which it would hear of a difference.
        """

    def next_attempt(self) -> None:
        """A call begins in which ranks are to meet."""

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


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is: numbers of its latest context, call and exchange."""

    context: int
    attempt: int
    exchange: int


class GroupTransport:
    """Over a torch.distributed group, with a board for what must be said when a collective does not end."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.attempt = 0
        self.call = 0
        self.broken: ContextParallelError | None = None
        self.longest = 0  # bytes of a payload, of those that went through the host
        self._joined = 0  # the last exchange that this rank sent something to
        self._contexts: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._context = self._newest = 0
        self._agreed: list[Signature] = []
        self._latest: dict[str, Any] = {}
        self._waits = "nowhere"
        self._answered: set[str] = set()
        self._heard = 0
        self._board = Board(PrefixStore("kcpgen", _store_of(group)), self.rank)
        self._watch = Watch()

    @cached_property
    def _on_devices(self) -> bool:
        """Whether the group itself gathers what lies on a CUDA device."""
        return _has_backend(self.group, "cuda")

    @property
    def _place(self) -> Place:
        return Place(context=self._context, attempt=self.attempt, exchange=self.call)

    def meet(self, context: object, about: Signature, timeout: float, *, alone: bool) -> None:
        if self.broken is not None:
            raise self.broken
        if context in self._contexts:
            self._context = self._contexts[context]
            return
        if streams.capturing():
            raise RuntimeError(_first_outside("a call with a context that was never used"))
        self._newest += 1
        self._context = self._contexts[context] = self._newest
        self._waits = f"for all ranks to come to context {self._context}"
        self._latest = dict(about)
        topic = f"context/{self._context}"
        if self._board.first_to_say(topic, about) != about:
            self._answer(topic)
        if self._board.arrivals(topic, 1) == self.size:
            self._board.forget(f"context/{self._context - 1}")  # all are here, none waits there any more
        if alone:
            self._wait_for_arrivals(topic, timeout)

    def _wait_for_arrivals(self, topic: str, timeout: float) -> None:
        """Soon all are there; if not, one of them may wait elsewhere, and has to see that this one waits here."""
        until = time.monotonic() + LOOK_EVERY

        def there() -> bool:
            if topic not in self._answered and time.monotonic() > until:
                self._say(topic)
            return self._board.arrivals(topic, 0) >= self.size

        self.wait_until(there, timeout)

    def next_attempt(self) -> None:
        """What is captured in a CUDA graph does not count: it happens whenever that is replayed."""
        self.attempt += not streams.capturing()

    def next_call(self) -> int:
        if self.broken is not None:
            raise self.broken
        self.call += not streams.capturing()
        return self.call

    def agree(self, sizes: Signature, about: Signature, timeout: float) -> None:
        self._waits = f"in exchange {self.call}"
        self._latest = {"exchange": self.call, **about, **sizes}
        if sizes in self._agreed:
            return
        if streams.capturing():
            raise RuntimeError(_first_outside("a call of sizes that no call had before"))
        topic = f"sizes/{self.call}"
        self._say(topic)
        self.wait_until(lambda: len(self._board.said(topic)) == self.size, timeout)
        self._raise_differing(topic)
        self._agreed.append(sizes)

    def all_gather(self, payload: Tensor, timeout: float) -> Pending:
        self._joined = self.call
        if payload.is_cuda and self._on_devices:
            return _OnStream(self, payload, timeout)
        if streams.capturing():
            raise RuntimeError("context parallelism: only NCCL can be captured in a CUDA graph; gloo is the host's")
        return _OnHost(self, payload, timeout)

    def report(self, error: BaseException, *, ahead: int) -> None:
        where = f"before exchange {self.call + 1}" if ahead else f"in exchange {self.call}"
        text = f"rank {self.rank} failed {where}: {type(error).__name__}: {error}"
        inside = {} if ahead else {"inside": self.call}
        self._board.post(failed=text, attempt=self.attempt, joined=self._joined, **inside)

    def raise_reported(self) -> None:
        for notice in self._board.of_others():
            if "failed" in notice and (notice.get("inside") == self.call or notice["attempt"] >= self.attempt):
                raise RankFailedError(f"context parallelism: {notice['failed']}")

    def look(self, place: Place) -> None:
        """Raise what another rank has said that concerns who waits here; answer who asks where this rank is."""
        heard, notices = self._heard, self._board.notices()
        self._heard = len(notices)
        for index, notice in enumerate(notices):
            if notice["rank"] == self.rank:
                continue
            if "failed" in notice and _missed(notice, place):
                raise self._break(RankFailedError(f"context parallelism: {notice['failed']}"))
            if "gone" in notice and index < heard and notice["joined"] < place.exchange:
                text = f"rank {notice['rank']} has given this group up: {notice['gone']}"
                raise self._break(RankFailedError(f"context parallelism: {text}"))
            if _concerns(notice, place):
                self._answer(notice["topic"])

    def wait_until(self, there: Callable[[], bool], timeout: float) -> None:
        """Look again and again, whether it is there or another rank has something to say."""
        pause, now = 2e-5, time.monotonic()
        until, look = now + timeout, now + LOOK_EVERY
        while not there():
            now = time.monotonic()
            if now > look:
                self.look(self._place)
                look = now + LOOK_EVERY
            if now > until:
                raise self.give_up(f"no answer within {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)

    def _say(self, topic: str) -> None:
        self._answered.add(topic)
        self._board.post(topic=topic, fields=self._latest, joined=self._joined)

    def _answer(self, topic: str) -> None:
        """Say what this rank came with and raise if ranks differ, once all others were heard."""
        if topic not in self._answered:
            self._say(topic)
            self._hear(topic)
        elif differing(self._board.said(topic)):
            self._hear(topic)
        self._raise_differing(topic)

    def _hear(self, topic: str) -> dict[int, Mapping[str, Any]]:
        """What ranks say to a topic; waits a little for all of them."""
        until = time.monotonic() + ANSWER_WITHIN
        while len(said := self._board.said(topic)) < self.size and time.monotonic() < until:
            time.sleep(0.02)
        return said

    def _raise_differing(self, topic: str) -> None:
        found = differing(self._board.said(topic))
        if found:
            self.raise_reported()  # a rank that failed before, in its own words
            raise self._break(RankMismatchError(f"context parallelism: {found}"))

    def give_up(self, reason: str) -> ContextParallelError:
        """Say where this rank waits, hear where the others are, and put it into words."""
        topic = f"waiting/{self.call}"
        self._say(topic)
        said = self._hear(topic)
        absent = [r for r in range(self.size) if r not in said]
        text = f"context parallelism: rank {self.rank} waits {self._waits}: {reason}"
        if absent:
            text += f"; not there: rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        last = {notice["rank"]: notice for notice in self._board.of_others() if "failed" in notice}
        text += "".join(f"; {last[r]['failed']}" for r in absent if r in last and last[r]["joined"] < self.call)
        found = differing(said)
        text += f"; {found}" if found else ""
        return self._break(RankMismatchError(text) if found else RankTimeoutError(text))

    def _break(self, error: ContextParallelError) -> ContextParallelError:
        """Collectives are out of step from here on: every later call raises the same."""
        if self.broken is None:
            self._board.post(gone=str(error), joined=self._joined)
        self.broken = error
        return error

    def end(self) -> None:
        """Nothing of this process outlives it in a thread of its own."""
        self._watch.end()

    def settle(self, timeout: float) -> None:
        """Once the devices have ended all exchanges: until none of them is watched any more."""
        if not self._watch.quiet(timeout):
            raise self.give_up("collectives on the device have not ended") if self.broken is None else self.broken
        if self.broken is not None:
            raise self.broken

    def watch(self, work: dist.Work, timeout: float) -> None:
        place, until = self._place, time.monotonic() + timeout
        self._watch.add(work, lambda: self._in_trouble(place, until))

    def _in_trouble(self, place: Place, until: float) -> bool:
        """From the watching thread, of a collective on a device: if it will not end, end the communicator."""
        try:
            check_deferred(wait=False, owner=self)  # what earlier headers say may be why this one does not end
            self.look(place)
            if time.monotonic() > until:
                raise self.give_up("the collective did not end in time")
        except ContextParallelError as error:
            self._break(error)
        else:
            return False
        print(f"{self.broken}\nending the communicator; the next call raises", file=sys.stderr, flush=True)
        with suppress(Exception):
            self.group.abort()
        return True


def _first_outside(what: str) -> str:
    return f"context parallelism: {what} cannot be captured in a CUDA graph; allowed: the same call once before it"


def _missed(notice: Mapping[str, Any], place: Place) -> bool:
    """Another rank's failure is about this call, or a later one, and kept that rank from the exchange at hand."""
    return bool(notice["attempt"] >= place.attempt and notice["joined"] < place.exchange)


def _concerns(notice: Mapping[str, Any], place: Place) -> bool:
    """Another rank asks about this exchange or context, or is at a later context and never came to this exchange."""
    kind, _, number = notice.get("topic", "").partition("/")
    if kind == "sizes":
        return int(number) == place.exchange
    if kind != "context":
        return False
    return int(number) == place.context or (int(number) > place.context and notice["joined"] < place.exchange)


class _OnStream:
    """NCCL: the host goes on, the current stream waits."""

    def __init__(self, transport: GroupTransport, payload: Tensor, timeout: float) -> None:
        self._gathered = payload.new_empty(transport.size, payload.numel())
        self._work = _gather(self._gathered, payload, transport.group)
        if not streams.capturing():
            transport.watch(self._work, timeout)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._gathered


class _OnHost:
    """gloo: the host waits, at most for so long. A payload on a device goes through the host.

    All payloads are as long as the longest so far, which all ranks know: gloo ends a process that is sent more than it
    expects, say another rank's forward in a backward, and headers can only tell of that once they have arrived.
    """

    def __init__(self, transport: GroupTransport, payload: Tensor, timeout: float) -> None:
        self._transport = transport
        self._payload = payload
        self._timeout = timeout
        sent = payload.cpu().view(torch.uint8)
        transport.longest = max(transport.longest, len(sent))
        self._gathered = sent.new_empty(transport.size, transport.longest)
        self._work = _gather(self._gathered, pad(sent, (0, transport.longest - len(sent))), transport.group)

    def wait(self) -> Tensor:
        self._transport.wait_until(self._work.is_completed, self._timeout)
        try:
            self._work.wait()
        except RuntimeError as error:
            self._transport.raise_reported()
            raise self._transport.give_up(str(error).splitlines()[0]) from error
        size = self._payload.numel() * self._payload.element_size()
        return self._gathered[:, :size].contiguous().view(self._payload.dtype).to(self._payload.device)


def _gather(gathered: Tensor, payload: Tensor, group: dist.ProcessGroup) -> dist.Work:
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the newer name, where torch has it
    work: dist.Work = gather(gathered.view(-1), payload, group=group, async_op=True)
    return work


@dataclass(frozen=True, kw_only=True)
class _Watched:
    work: dist.Work
    in_trouble: Callable[[], bool]

    @property
    def ended(self) -> bool:
        """A device may refuse to answer for a while, say as long as a graph is captured; it is asked again."""
        try:
            return self.work.is_completed()
        except RuntimeError:
            return False

    def abandoned(self) -> bool:
        """Whether the communicator was ended. An error of the look itself must not end the watch."""
        try:
            return self.in_trouble()
        except Exception as error:
            print(f"kcpgen-watch: {error}", file=sys.stderr, flush=True)
            return False


class Watch:
    """One thread that looks at collectives under way, alive only while there are any, or until `end`.

    Python ends what is left of its threads where they next ask for the interpreter; inside a call of torch, which lets
    go of it meanwhile, that ends the process with an error.
    """

    def __init__(self) -> None:
        self._items: list[_Watched] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()
        thread = self._thread
        if thread is not None:
            thread.join(ANSWER_WITHIN)

    def quiet(self, timeout: float) -> bool:
        """Whether there is nothing to look at within so many seconds."""
        until = time.monotonic() + timeout
        while self._thread is not None and time.monotonic() < until:
            time.sleep(0.01)
        return self._thread is None

    def add(self, work: dist.Work, in_trouble: Callable[[], bool]) -> None:
        with self._lock:
            self._items.append(_Watched(work=work, in_trouble=in_trouble))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kcpgen-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            with self._lock:
                self._items = [item for item in self._items if not item.ended]
                oldest = self._items[:1]
                if not oldest:
                    self._thread = None
                    return
            if oldest[0].abandoned():
                with self._lock:
                    self._items, self._thread = [], None
                return


def _store_of(group: dist.ProcessGroup) -> Store:
    store: Store = distributed_c10d._get_process_group_store(group)
    return store


def _has_backend(group: dist.ProcessGroup, device: str) -> bool:
    config = str(dist.get_backend_config(group))
    return any(pair.startswith(f"{device}:") and not pair.endswith(":gloo") for pair in config.split(","))
