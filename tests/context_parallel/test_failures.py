"""A rank that fails, is missing or disagrees: all ranks raise, say which rank and field, and none of them hangs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import cp_processes
import pytest
import torch
from torch.distributed import HashStore

from kcpgen.runtime.context_parallel import deferred
from kcpgen.runtime.context_parallel import transport as module
from kcpgen.runtime.context_parallel.board import Board
from kcpgen.runtime.context_parallel.errors import RankFailedError, RankMismatchError
from kcpgen.runtime.context_parallel.payload import HEADER
from kcpgen.runtime.context_parallel.transport import GroupTransport, Place, Watch

Troubles = list[dict[str, Any]]
PROMPTLY = 5.0  # seconds; in these scenarios a rank would wait for 30


@pytest.fixture(scope="module")
def ranks() -> Troubles:
    return cp_processes.run(3, cp_processes.troubles)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("sizes", "rank 1 has `values` 4, others 8"),
        ("sizes later", "rank 1 has `values` 4, others 8"),
        ("op", "rank 1 has `op` chunk_gla, others chunk_kda"),
        ("cu_seqlens", "rank 1 has `cu_seqlens` [0, 20, 36]"),
        ("cu_seqlens later", "rank 1 has `cu_seqlens` [0, 29, 36]"),
        ("shards later", "rank 1 has `shards` [0, 11, 24, 36]"),
        ("crosses nothing", "rank 1 has `cu_seqlens` [0, 12, 24, 36]"),
        ("crosses nothing later", "rank 1 has `cu_seqlens` [0, 12, 24, 36]"),
        ("crosses alone", "rank 1 has `cu_seqlens` [0, 30, 36]"),
        ("crosses alone later", "rank 1 has `cu_seqlens` [0, 30, 36]"),
        ("stale context", "rank 1 has `cu_seqlens` [0, 30, 36]"),
        ("gradients", "rank 1 has `gradients` not required, others required"),
        ("gradients later", "rank 1 came with another `gradients`: rank 0: required, rank 1: not required"),
        ("no backward", "rank 1 has `direction` forward, others backward"),
        ("no backward later", "rank 1 came with another `direction`: rank 0: backward, rank 1: forward"),
    ],
)
def test_ranks_that_disagree(ranks: Troubles, kind: str, text: str) -> None:
    """Whoever would wait for ever, and whoever would notice nothing: all of them hear of it at once."""
    for troubles in ranks:
        assert troubles[kind]["error"] == "RankMismatchError", troubles[kind]
        assert text in troubles[kind]["text"]
        assert troubles[kind]["seconds"] < PROMPTLY


@pytest.mark.parametrize(
    ("kind", "waits"), [("absent", "in exchange 1"), ("absent, apart", "for all ranks to come to context 1")]
)
def test_a_missing_rank_is_named_in_bounded_time(ranks: Troubles, kind: str, waits: str) -> None:
    first, absent, last = (troubles[kind] for troubles in ranks)
    assert absent["error"] == "none"
    for found in (first, last):
        assert found["error"] == "RankTimeoutError"
        assert f"waits {waits}: no answer within 1 s; not there: rank 1" in found["text"]
        assert found["seconds"] < 10


def test_a_rank_that_refuses_its_arguments_is_quoted_by_the_others(ranks: Troubles) -> None:
    first, failed, last = (troubles["arguments"] for troubles in ranks)
    assert failed["error"] == "TypeError"
    for found in (first, last):
        assert found["error"] == "RankFailedError"
        assert "rank 1 failed before exchange 1: TypeError: chunk_kda: `scale`" in found["text"]
        assert found["seconds"] < PROMPTLY


def test_a_rank_that_refuses_what_concerns_no_other_leaves_them_alone(ranks: Troubles) -> None:
    found = [troubles["arguments, apart"] for troubles in ranks]
    assert [one["error"] for one in found] == ["none", "TypeError", "none"]


def test_a_call_refused_by_one_rank_is_over_for_all(ranks: Troubles) -> None:
    """That rank's next call is not the one in which the others wait, however soon it comes."""
    first, failed, last = (troubles["retry of one"] for troubles in ranks)
    assert failed["error"] == "RankMismatchError"
    assert "rank 1 has `attempt` 2, others 1" in failed["text"]
    for found in (first, last):
        assert found["error"] == "RankFailedError"
        assert "TypeError: chunk_kda: `scale`" in found["text"]
    assert all(found["seconds"] < PROMPTLY for found in (first, failed, last))


def test_a_call_refused_by_all_ranks_may_be_repeated(ranks: Troubles) -> None:
    """A rank that then has to wait does not take the others' old reports for new ones."""
    assert [troubles["retry of all"]["error"] for troubles in ranks] == ["none"] * 3


def test_a_rank_that_fails_after_it_has_joined_is_quoted_by_the_others() -> None:
    first, failed, last = cp_processes.run(3, cp_processes.failing_while_it_waits)
    assert failed["error"] == "MemoryError"
    for found in (first, last):
        assert found["error"] == "RankFailedError"
        assert "rank 1 failed before exchange 2: MemoryError: out of memory" in found["text"]
        assert found["seconds"] < PROMPTLY


@pytest.mark.parametrize("kind", ["error inside", "error in a run"])
def test_a_group_goes_on_after_a_rank_failed_inside_a_call(ranks: Troubles, kind: str) -> None:
    """In a summary, or in the run whose final state would be one. The scenario ends with a call that succeeds."""
    first, failed, last = (troubles[kind] for troubles in ranks)
    assert failed["error"] == "MemoryError"
    for found in (first, last):
        assert found["error"] == "RankFailedError"
        assert "rank 1 failed in exchange 1: MemoryError: out of memory" in found["text"]


def test_contexts_that_agree_cost_no_wait_and_leave_nothing_behind() -> None:
    for stored, seconds in cp_processes.run(2, cp_processes.many_contexts):
        assert stored <= 2, stored
        assert seconds < PROMPTLY


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> GroupTransport:
    """Of rank 0 of two, without a group: what the watching thread does is the same on any device."""
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(module, "_store_of", lambda group: HashStore())
    monkeypatch.setattr(module, "ANSWER_WITHIN", 0.1)
    return GroupTransport(None)  # type: ignore[arg-type]


def test_a_collective_under_way_is_ended_by_what_earlier_headers_say(
    transport: GroupTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, later = Place(context=1, attempt=1, exchange=2), time.monotonic() + 60
    assert not transport._in_trouble(place, later)

    def mismatch(*, wait: bool, owner: object) -> None:
        assert (wait, owner) == (False, transport)
        raise RankMismatchError("rank 1 came with another `gradients`")

    monkeypatch.setattr(module, "check_deferred", mismatch)
    assert transport._in_trouble(place, later)
    with pytest.raises(RankMismatchError, match="another `gradients`"):
        transport.next_call()


class Event:
    """Of a copy to the host."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


KEY = (torch.device("cpu"), torch.float32, 2)


def slot_of(values: torch.Tensor, done: bool) -> deferred.Slot:
    return deferred.Slot(key=KEY, sent=values[0], received=values, copied=Event(done))  # type: ignore[arg-type]


def test_headers_are_checked_once_they_have_arrived_each_owners_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    good = torch.zeros(2, HEADER)
    bad = good.clone()
    bad[1, 0] = 1.0  # another call
    mine, other = object(), object()

    def headers(owner: object, done: bool, values: torch.Tensor) -> deferred._Unchecked:
        slot = slot_of(values, done)
        return deferred._Unchecked(slot=slot, rank=0, owner=owner, held=())

    waiting = deque([headers(other, False, bad), headers(mine, True, good), headers(mine, False, bad)])
    monkeypatch.setattr(deferred, "_unchecked", waiting)
    deferred.check_deferred(wait=False)
    assert len(waiting) == 3  # the oldest is still on its way
    free = len(deferred._free[KEY])
    deferred.check_deferred(wait=False, owner=mine)
    assert len(waiting) == 2
    assert len(deferred._free[KEY]) == free + 1
    assert deferred.slot_for(*KEY).received is good  # pinned once
    with pytest.raises(RankMismatchError, match="rank 1 came with another `call`"):
        deferred.check_deferred(wait=True, owner=mine)
    assert [found.owner for found in waiting] == [other]


def test_a_collective_under_way_is_ended_by_what_another_rank_posts(transport: GroupTransport) -> None:
    other = Board(transport._board._store, 1)
    place, later = Place(context=1, attempt=4, exchange=5), time.monotonic() + 60
    other.post(failed="rank 1 failed before exchange 5", attempt=3, joined=4)
    assert not transport._in_trouble(place, later)  # of an earlier call
    other.post(failed="rank 1 failed before exchange 6", attempt=5, joined=5)
    assert not transport._in_trouble(place, later)  # it did come to this exchange
    other.post(failed="rank 1 failed before exchange 5", attempt=4, joined=4)
    assert transport._in_trouble(place, later)
    assert isinstance(transport.broken, RankFailedError)


def test_a_collective_that_does_not_end_is_ended(transport: GroupTransport) -> None:
    assert transport._in_trouble(Place(context=1, attempt=1, exchange=1), time.monotonic() - 1)
    assert "not there: rank 1" in str(transport.broken)


def test_any_group_will_do() -> None:
    first, *others = cp_processes.run(3, cp_processes.on_a_subgroup)
    assert first is None
    assert all(worst < 1e-12 for worst in others), others


class Work:
    """A collective on a device, as the watching thread sees it."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5.0
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_the_watch_outlives_a_look_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """A device that does not answer, as while a graph is captured, is asked again; and so are those that come later."""

    class Silent(Work):
        def is_completed(self) -> bool:
            raise RuntimeError("operation not permitted")

    def fails() -> bool:
        looks.append(1)
        raise RuntimeError("no answer")

    looks: list[int] = []
    for first, look in ((Silent(), lambda: bool(looks.append(1))), (Work(), fails)):  # type: ignore[func-returns-value]
        watch = Watch()
        looks.clear()
        watch.add(first, look)  # type: ignore[arg-type]
        assert eventually(lambda: len(looks) >= 2)
        with watch._lock:
            watch._items = []
        assert eventually(lambda: watch._thread is None)  # noqa: B023
    assert "no answer" in capfd.readouterr().err


def test_the_watch_looks_until_a_collective_ends_or_is_in_trouble() -> None:
    watch, work, looks = Watch(), Work(), []
    watch.add(work, lambda: bool(looks.append(1)))  # type: ignore[arg-type, func-returns-value]
    assert eventually(lambda: len(looks) >= 2)
    work.done = True
    assert eventually(lambda: watch._thread is None)
    troubled: list[int] = []
    watch.add(Work(), lambda: not troubled.append(1))  # type: ignore[arg-type, func-returns-value]
    assert eventually(lambda: watch._thread is None)
    assert troubled == [1]


def test_a_watch_ends_with_the_process_and_not_after_it() -> None:
    watch = Watch()
    watch.add(Work(), lambda: False)  # type: ignore[arg-type]
    thread = watch._thread
    assert thread is not None
    watch.end()
    assert not thread.is_alive()
