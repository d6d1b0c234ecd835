"""Work that runs beside the current stream of a CUDA device; elsewhere, in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch


def capturing() -> bool:
    """Whether what the current stream is given goes into a CUDA graph, and nothing of it is done now."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


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


@lru_cache(maxsize=8)
def _stream_apart(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """The body's kernels run on a stream of a CUDA device that no other ever waits for, after what the current one was
    given so far. Memory that they use is to be held until the host has found them done."""
    stream = _stream_apart(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@lru_cache(maxsize=64)
def _serial_stream(device: torch.device, caller: int) -> torch.cuda.Stream:
    """One for each stream that calls: what one caller's waits for must not keep another one's waiting."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class SerialStream:
    """A stream of a CUDA device whose programs are placed before those of the current one; elsewhere, that itself.

    It begins after all that the current stream was given before. At the end of its context the current stream waits for
    it, also where something raised in between. Tensors of the current stream that it uses are allocated before it
    begins or before an `after_all`, and let go after the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._current = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._stream = None if self._current is None else _serial_stream(device, self._current.cuda_stream)

    def work(self) -> AbstractContextManager[None]:
        """The body's kernels run on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def after_all(self) -> AbstractContextManager[None]:
        """Likewise, once all is done that the other has been given so far."""
        self._wait()
        return self.work()

    def _wait(self) -> None:
        if self._stream is not None and self._current is not None:
            self._stream.wait_stream(self._current)

    def now(self) -> torch.cuda.Event | None:
        """Comes about once all is done that this stream has been given so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """What the other stream is given from here on runs after the event."""
        if event is not None and self._current is not None:
            self._current.wait_event(event)

    def __enter__(self) -> SerialStream:
        self._wait()
        return self

    def __exit__(self, *raised: object) -> None:
        self.wait_for(self.now())
