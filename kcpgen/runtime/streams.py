"""Work that runs beside the current stream of a CUDA device; elsewhere, in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """The body's kernels run beside what the current stream does next, until `join`."""
    if device.type != "cuda":
        yield
        return
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def join(device: torch.device) -> None:
    """From here on the current stream has what ran `beside` it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_side_stream(device))


def side_by_side(device: torch.device, main: Callable[[], None], other: Callable[[], None]) -> None:
    """`main` and, at the same time, `other`, which may use what `main` allocates but nothing that it computes.

    Both are done for what the current stream does next.
    """
    if device.type != "cuda":
        main()
        other()
        return
    side, current = _side_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    main()
    with torch.cuda.stream(side):
        other()
    current.wait_stream(side)
