"""Work spread over processes on one machine, and a limit to its time."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from queue import Empty
from typing import Any

Rows = Callable[..., Iterable[dict[str, Any]]]


class Budget:
    """Seconds from now on; 0 is no limit. Other processes of this machine may be given it."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds if seconds else float("inf")

    @property
    def left(self) -> float:
        return self._until - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left <= 0


def on_workers(
    rows: Rows, tasks: Sequence[tuple[Any, ...]], workers: int, seconds: float = float("inf")
) -> Iterator[dict[str, Any]]:
    """The rows of `rows(*task)` for all tasks, as they come; a task whose process dies leaves a row that says so.

    After so many seconds what still runs is ended, and what has not begun is left.
    """
    until = time.monotonic() + seconds
    context = get_context("spawn")
    results = context.Queue()
    waiting = list(enumerate(tasks))
    running: dict[int, Any] = {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes to come: they share the cores
    while waiting or running:
        if time.monotonic() > until:
            for process in running.values():
                process.kill()
                process.join()
            yield {"ok": False, "why": [f"no time left for {[task[1:3] for _, task in waiting]} and what ran"]}
            return
        while waiting and len(running) < workers:
            number, task = waiting.pop(0)
            running[number] = context.Process(target=_work, args=(results, number, rows, task))
            running[number].start()
        try:
            number, row = results.get(timeout=0.5)
        except Empty:
            for number in [n for n, process in running.items() if not process.is_alive() and process.exitcode]:
                died = running.pop(number)
                yield {"ok": False, "why": [f"process of {tasks[number][1:3]} ended with code {died.exitcode}"]}
            continue
        if row is None:
            running.pop(number).join()
        else:
            yield row


def _work(results: Any, number: int, rows: Rows, task: tuple[Any, ...]) -> None:
    try:
        for row in rows(*task):
            results.put((number, row))
    except Exception:
        traceback.print_exc()
        results.put((number, {"ok": False, "why": [traceback.format_exc(limit=-3)]}))
    results.put((number, None))
