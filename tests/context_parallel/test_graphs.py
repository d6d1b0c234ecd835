"""A rank's call while a CUDA graph is captured, and the benchmark that replays one; what of it needs no device."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cp_rows import ROOT
from torch import Tensor
from torch.distributed import HashStore

sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "benchmarks"))

import cp_graph
import cp_time
from cp_graph import Captured, Meeting, NotReplayedError

from kcpgen.runtime import build_cp_context, layout, streams
from kcpgen.runtime.context_parallel import deferred, passes
from kcpgen.runtime.context_parallel import exchange as exchanges
from kcpgen.runtime.context_parallel import transport as module
from kcpgen.runtime.context_parallel.errors import RankMismatchError
from kcpgen.runtime.context_parallel.exchange import Exchange
from kcpgen.runtime.context_parallel.payload import HEADER, Format, check_headers
from kcpgen.runtime.context_parallel.transport import GroupTransport

FORM = Format(heads=1, keys=2, values=2, kind="scalar", transitions=False)
SIZES = {"op": "any", "heads": 1}


class _OnDevice:
    """A payload as if on a device."""

    is_cuda = True
    device = torch.device("cpu")

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __getitem__(self, span: Any) -> Tensor:
        return self.numbers[span]


class _Way:
    """To no other rank; what this one sends comes back."""

    rank, size, attempt = 0, 1, 1

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.waits = 0

    def next_call(self) -> int:
        return 7

    def agree(self, *about: object) -> None:
        """Nobody to agree with."""

    def all_gather(self, payload: Any, timeout: float) -> Any:
        self.sent.append(payload)
        return SimpleNamespace(wait=self._wait)

    def _wait(self) -> Any:
        self.waits += 1
        return self.sent[-1]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "capturing", lambda: True)
    monkeypatch.setattr(layout, "capturing", lambda: True)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> GroupTransport:
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(module, "_store_of", lambda group: HashStore())
    return GroupTransport(None)  # type: ignore[arg-type]


def exchange_over(way: _Way) -> Exchange:
    cp: Any = SimpleNamespace(
        transport=way, about={}, world_size=1, rank=0, timeout=1.0, fingerprints=(3, 4), check="now"
    )
    made = Exchange("any", cp, FORM, torch.empty(0), backward=False, differentiable=True)
    made.payload = _OnDevice(torch.ones(FORM.numbers))  # type: ignore[assignment]
    return made


@pytest.mark.usefixtures("capture")
def test_an_exchange_of_a_graph_asks_nothing_of_the_device_and_copies_nothing_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: object, **keywords: object) -> None:
        raise AssertionError(args)

    for name in ("check_deferred", "defer", "slot_for", "write"):
        monkeypatch.setattr(exchanges, name, never)
    way = _Way()
    found = exchange_over(way)
    with found.summarising():
        found.payload[HEADER:].fill_(2.0)
    assert way.sent[0].numbers[:HEADER].eq(0.0).all()
    assert way.sent[0].numbers[HEADER:].eq(2.0).all()
    found.leave()  # joins: a graph whose streams have not all met again cannot be ended
    found.leave()
    assert way.waits == 1


def test_a_rank_that_replays_while_another_calls_is_found_by_that_one() -> None:
    called = torch.tensor([float(x) for x in (7, 0, 7, 1, 3, 4, 0)] + [0.0] * (HEADER - 7))
    with pytest.raises(RankMismatchError, match="came with another `call`: rank 0: 7, rank 1: 0"):
        check_headers(torch.stack([called, torch.zeros(HEADER)]), 0)


@pytest.mark.parametrize("captured", [False, True])
def test_a_backward_in_a_graph_joins_the_gather_that_it_needs_nothing_of_last(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    left = SimpleNamespace(captured=captured, leave=lambda: seen.append("leave"), summarising=streams.nullcontext)
    monkeypatch.setattr(passes, "_exchange", lambda op, cp, backward: left)
    op: Any = SimpleNamespace(
        name="any", serially=streams.nullcontext, run=lambda *a: None, finish=lambda: seen.append("finish")
    )
    context = build_cp_context(torch.tensor([0, 4]), SimpleNamespace(rank=0, size=1), check="now")  # type: ignore[arg-type]
    passes.backward(op, context, passes.Kept(entering=None, transitions=None), None, None)
    assert seen == (["finish", "leave"] if captured else ["leave", "finish", "leave"])


def test_what_is_captured_is_not_counted_and_is_known_from_calls_before(
    transport: GroupTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        pass

    known = Context()
    transport.meet(known, {"row": "any"}, 1.0, alone=False)
    transport.next_attempt()
    assert transport.next_call() == 1
    transport.agree(SIZES, {}, 1.0)
    monkeypatch.setattr(streams, "capturing", lambda: True)
    monkeypatch.setattr(type(transport._board), "post", pytest.fail)
    for _ in range(2):
        transport.meet(known, {"row": "any"}, 1.0, alone=False)
        transport.next_attempt()
        assert transport.next_call() == 1
        transport.agree(SIZES, {}, 1.0)
    assert transport.attempt == 1
    once = "allowed: the same call once before it"
    with pytest.raises(RuntimeError, match=f"a context that was never used cannot be captured.*{once}"):
        transport.meet(Context(), {"row": "any"}, 1.0, alone=False)
    with pytest.raises(RuntimeError, match=f"sizes that no call had before cannot be captured.*{once}"):
        transport.agree({**SIZES, "heads": 2}, {}, 1.0)
    with pytest.raises(RuntimeError, match="only NCCL can be captured"):
        transport.all_gather(torch.ones(1), 1.0)


def test_settling_waits_for_the_watch_and_checks_what_has_come(
    transport: GroupTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = build_cp_context(torch.tensor([0, 4]), transport, timeout=5.0)
    context.settle()
    work = SimpleNamespace(done=False, is_completed=lambda: work.done)
    transport._watch.add(work, lambda: False)  # type: ignore[arg-type]
    threading.Timer(0.3, lambda: setattr(work, "done", True)).start()
    context.settle()
    assert work.done
    assert transport._watch._thread is None
    headers = torch.zeros(2, HEADER)
    headers[1, 0] = 1.0
    event: Any = SimpleNamespace(synchronize=lambda: None)
    key = (torch.device("cpu"), torch.float32, 2)
    slot = deferred.Slot(key=key, sent=headers[0], received=headers, copied=event)
    deferred._unchecked.append(deferred._Unchecked(slot=slot, rank=0, owner=transport, held=()))
    with pytest.raises(RankMismatchError, match="another `call`"):
        context.settle()


def test_tables_that_a_graph_reads_stay() -> None:
    def tables() -> layout.ChunkLayout:
        return layout.chunk_layout(1, 17, (0, 3, 17), 16, torch.device("cpu"))

    first = tables()
    derived = first.once("key", lambda: [1])
    assert first.once("key", lambda: [2]) is derived
    assert first not in layout._of_graphs
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layout, "capturing", lambda: True)
        assert tables() is first
    try:
        assert first in layout._of_graphs
    finally:
        layout._of_graphs.clear()


class _Fake(Captured):
    """No graph: a replay makes the call, and writes what it returns where the first one's outputs are."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._outputs: list[Tensor] = []
        self.released = False
        made.append(self)

    def warm_up(self) -> list[Tensor]:
        return cp_graph.tensors(self._call())

    def capture(self) -> int:
        self._outputs = [torch.empty_like(x) for x in cp_graph.tensors(self._call())]
        return 1000

    def replay(self) -> None:
        for x, y in zip(self._outputs, cp_graph.tensors(self._call()), strict=True):
            x.copy_(y)

    def release(self) -> None:
        self.released = True


made: list[_Fake] = []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cp_graph, "Captured", _Fake)
    monkeypatch.setattr(cp_graph.torch.cuda, "synchronize", lambda: None)
    yield
    made.clear()


@pytest.mark.usefixtures("fake")
def test_replays_are_timed_once_they_are_right() -> None:
    seen: list[str] = []

    def call() -> Tensor:
        seen.append("call")
        return torch.arange(4.0)

    meeting = Meeting(together=lambda: seen.append("together"), settle=lambda: seen.append("settle"))
    found = cp_graph.replays(call, "cpu", 3, meeting, layers=2)
    assert seen[:5] == ["call", "settle", "together", "call", "call"]  # warm-up, capture, checked replay
    assert seen[5:] == ["together", "call", "call", "call"] * (1 + cp_graph.steady.__globals__["LOOPS"])
    assert found.peak_bytes == 1000 - 16
    assert made[0].released


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("at", "said"),
    [(0, "no such call"), (1, "capture: ValueError"), (2, "first replay: ValueError: tensor 0 of 1 diff")],
)
def test_no_time_counts_where_a_replay_is_wrong(at: int, said: str) -> None:
    calls: list[int] = []

    def call() -> Tensor:
        calls.append(1)
        if at == 2:
            return torch.tensor([float(len(calls))])
        if len(calls) == at + 1:
            raise ValueError("no such call")
        return torch.zeros(1)

    with pytest.raises(ValueError if at == 0 else NotReplayedError, match=said):
        cp_graph.replays(call, "cpu", 3, Meeting(), layers=1)
    assert made[0].released


@pytest.mark.usefixtures("fake")
def test_no_rank_replays_where_another_could_not_capture() -> None:
    told: list[str] = []

    def heard(text: str) -> list[str]:
        told.append(text)
        return [text, "capture: OutOfMemoryError: no"]

    with pytest.raises(NotReplayedError, match=r"^rank 1: capture: OutOfMemoryError: no$"):
        cp_graph.replays(lambda: torch.zeros(1), "cpu", 3, Meeting(heard=heard), layers=1)
    assert told == [""]


def test_what_was_raised_first_is_told_first() -> None:
    def fails() -> None:
        try:
            raise ValueError("a wait\nwithin")
        finally:
            raise RuntimeError("capture invalid")

    with pytest.raises(RuntimeError) as found:
        fails()
    assert cp_graph.told(found.value) == "ValueError: a wait within, then RuntimeError: capture invalid"


def test_ranks_hear_each_other_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(cp_graph.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(cp_graph.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(cp_graph.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(cp_graph, "_numbers", iter([5, 6]))
    store.set("graphs/5/1", '"not here"')
    assert cp_graph.heard_over_store("") == ["", "not here"]


@pytest.mark.usefixtures("fake")
def test_a_row_of_graphs_says_so_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: Any = SimpleNamespace(device="cpu", graphs=True, repeats=2, width=8, layers=1, rank_layers=1)
    it: Any = SimpleNamespace(size=64, about={"op": "any"})
    calls = {"forward": lambda: torch.zeros(1), "forward+backward": lambda: (torch.zeros(1), torch.ones(2))}
    found = cp_time._measured(chosen, it, lambda: calls, Meeting(), 1)
    assert set(found["ms"]) == set(found["host_ms"]) == set(calls)
    assert found["peak_bytes"] == 1000 - 4
    assert cp_time._figure(chosen, it, found, found)["graphs"] is True
    monkeypatch.setattr(_Fake, "capture", lambda captured: 1 / 0)
    failed = cp_time._measured(chosen, it, lambda: calls, Meeting(), 1)
    assert failed == {"failed": "in a CUDA graph, capture: ZeroDivisionError: division by zero"}


class _Stream:
    def wait_stream(self, other: object) -> None:
        """Nothing runs beside anything."""


class _Cuda:
    """What of torch.cuda a capture uses; `seen` is what was asked of it."""

    def __init__(self, *, broken: bool) -> None:
        self.seen: list[str] = []
        self.current = self.first = _Stream()
        self.broken = broken
        self.side: Any = None

    def stream_made(self, device: int) -> _Stream:
        self.side = _Stream()
        return self.side  # type: ignore[no-any-return]

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: object, *, stream: _Stream, capture_error_mode: str) -> Iterator[None]:
        assert (stream, capture_error_mode) == (self.side, "thread_local")
        self.current = stream
        self.seen.append("begin")
        try:
            yield
        finally:
            self.seen.append("end")
            if self.broken:  # as torch does then, it leaves the stream where it is
                raise RuntimeError("capture invalid")
        self.current = self.first

    def patch(self, patched: pytest.MonkeyPatch) -> None:
        graph = SimpleNamespace(replay=lambda: self.seen.append("replay"), reset=lambda: self.seen.append("reset"))
        cuda = {
            "CUDAGraph": lambda: graph,
            "Stream": self.stream_made,
            "stream": self.stream,
            "graph": self.graph,
            "current_device": lambda: 0,
            "current_stream": lambda: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "synchronize": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "max_memory_allocated": lambda: 99,
            "empty_cache": lambda: self.seen.append("empty"),
        }
        for name, value in cuda.items():
            patched.setattr(cp_graph.torch.cuda, name, value)
        cp_graph._stream.cache_clear()


@pytest.mark.parametrize("broken", [False, True])
def test_a_capture_is_of_the_stream_that_was_warmed_up_and_leaves_it(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = _Cuda(broken=broken)
    cuda.patch(monkeypatch)
    streams_seen: list[object] = []

    def call() -> tuple[Tensor, ...]:
        streams_seen.append(cuda.current)
        if broken and "begin" in cuda.seen:
            raise ValueError("a wait within")
        return (torch.ones(2, requires_grad=True) * 2, torch.zeros(1))

    if broken:
        said = "^capture: ValueError: a wait within, then RuntimeError: capture invalid$"
        with pytest.raises(NotReplayedError, match=said):
            cp_graph.replays(call, "cpu", 2, Meeting(settle=lambda: None))
        assert cuda.seen == ["begin", "end", "reset", "empty"]
    else:  # what is replayed leaves what the check has filled the outputs with
        with pytest.raises(
            NotReplayedError, match=r"^first replay: ValueError: tensor 0 of 2 differs in 2 of 2 numbers by 1$"
        ):
            cp_graph.replays(call, "cpu", 2, Meeting(settle=lambda: None))
        assert cuda.seen == ["begin", "end", "replay", "reset", "empty"]
    assert streams_seen == [cuda.side] * (cp_graph.WARM_UPS + 1)
    assert cuda.current is cuda.first
    cp_graph._stream.cache_clear()
