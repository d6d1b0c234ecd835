"""How long a call takes in a loop of them, by the clock: one device and ranks, ours and peers, measured alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

LOOPS = 3


def steady_ms(call: Callable[[], Any], device: str, repeats: int, together: Callable[[], Any]) -> float:
    """Wall time of one of `repeats` calls that follow each other as in a training loop; median of a few such loops.

    Timed is from before the first call of a loop until the device has done the last. In between nothing waits: the host
    launches as far ahead as it can, and ranks meet in the calls' own exchanges only. So what counts is the slower of
    host and device, whichever that is. With a barrier before every call, which empties the device, ranks would be timed
    from a standstill, all launches included, and one device, which needs no barrier, with its launches hidden.

    `together` stands before each loop: a barrier where there are ranks, so that they begin at once. One loop goes
    untimed before all others: allocators, that of pinned memory too, first grow to what a host that runs ahead takes.
    """
    samples = []
    for loop in range(LOOPS + 1):
        _wait_for(device)
        together()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        _wait_for(device)
        if loop:
            samples.append(1e3 * (time.perf_counter() - start) / repeats)
    return statistics.median(samples)


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
