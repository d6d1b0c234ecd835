"""How long a call takes in a loop of them, by the clock: one device and ranks, ours and peers, measured alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LOOPS = 3


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Of one call: all of it, and until the host had launched it. About the same: the host is the slower of the two."""

    ms: float
    host_ms: float


def steady(
    call: Callable[[], Any], device: str, repeats: int, together: Callable[[], Any], *, layers: int = 1
) -> Steady:
    """Wall time of one of `repeats` calls that follow each other as in a training loop; median of a few such loops.

    layers: what one call stands for; the time is of one of them.

    Timed is from before the first call of a loop until the device has done the last. In between nothing waits: the host
    launches as far ahead as it can, and ranks meet in the calls' own exchanges only. So what counts is the slower of
    host and device, whichever that is. With a barrier before every call, which empties the device, ranks would be timed
    from a standstill, all launches included, and one device, which needs no barrier, with its launches hidden.

    `together` stands before each loop: a barrier where there are ranks, so that they begin at once. One loop goes
    untimed before all others: allocators, that of pinned memory too, first grow to what a host that runs ahead takes.
    """
    whole, host = [], []
    for loop in range(LOOPS + 1):
        _wait_for(device)
        together()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        launched = time.perf_counter()
        _wait_for(device)
        if loop:
            whole.append(1e3 * (time.perf_counter() - start) / (repeats * layers))
            host.append(1e3 * (launched - start) / (repeats * layers))
    return Steady(ms=statistics.median(whole), host_ms=statistics.median(host))


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
