"""A rank that fails, is missing or disagrees: all ranks raise, say which rank and field, and none of them hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import cp_processes
import pytest

from kcpgen.runtime.context_parallel.transport import Watch

Troubles = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks() -> Troubles:
    return cp_processes.run(3, cp_processes.troubles)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("sizes", "rank 1 has `values` 4, others 8"),
        ("cu_seqlens", "rank 1 has `cu_seqlens` "),
        ("op", "rank 1 has `op` chunk_gla, others chunk_kda"),
        ("cu_seqlens later", "rank 1 came with another `cu_seqlens`"),
        ("shards later", "rank 1 came with another `shards`"),
        ("no backward", "rank 1 has `direction` forward, others backward"),
    ],
)
def test_ranks_that_disagree(ranks: Troubles, kind: str, text: str) -> None:
    for troubles in ranks:
        assert troubles[kind]["error"] == "RankMismatchError"
        assert text in troubles[kind]["text"]


def test_a_missing_rank_is_named_in_bounded_time(ranks: Troubles) -> None:
    first, absent, last = (troubles["absent"] for troubles in ranks)
    assert absent["error"] == "none"
    for found in (first, last):
        assert found["error"] == "RankTimeoutError"
        assert "no answer within 2 s; not there: rank 1" in found["text"]
        assert found["seconds"] < 10


def test_a_rank_that_refuses_its_arguments_is_quoted_by_the_others(ranks: Troubles) -> None:
    first, failed, last = (troubles["arguments"] for troubles in ranks)
    assert failed["error"] == "TypeError"
    for found in (first, last):
        assert found["error"] == "RankFailedError"
        assert "rank 1 failed before exchange 1: TypeError: chunk_kda: `scale`" in found["text"]
        assert found["seconds"] < 2


def test_a_group_goes_on_after_a_rank_failed_inside_a_call(ranks: Troubles) -> None:
    """The scenario ends with a call that succeeds on all ranks."""
    first, failed, last = (troubles["error inside"] for troubles in ranks)
    assert failed["error"] == "MemoryError"
    for found in (first, last):
        assert found["error"] == "RankFailedError"
        assert "rank 1 failed in exchange 1: MemoryError: out of memory" in found["text"]


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
