"""One all-gather of rank summaries: begun when the summary is there, waited for when it is needed, then checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel.errors import RankFailedError
from kcpgen.runtime.context_parallel.payload import HEADER, Format, check_headers, fingerprint, header, write
from kcpgen.runtime.context_parallel.transport import Pending

if TYPE_CHECKING:
    from kcpgen.runtime.context_parallel.context import CPContext


@dataclass(frozen=True, kw_only=True)
class _Unchecked:
    """Headers on their way from a device to the host."""

    headers: Tensor
    copied: torch.cuda.Event
    rank: int


_unchecked: deque[_Unchecked] = deque()


class Exchange:
    """`payload` is this rank's to fill inside `summarising`; `wait` then returns those of all ranks, [W, n]."""

    def __init__(self, op: str, cp: CPContext, form: Format, like: Tensor, *, backward: bool) -> None:
        check_deferred(wait=False)
        self.form = form
        self._cp = cp
        self._backward = backward
        self._call = cp.transport.next_call()
        cp.transport.agree(self._sizes(op, like), self._about(), cp.timeout)
        self.payload = like.new_empty(form.numbers)
        self._pending: Pending | None = None

    def _sizes(self, op: str, like: Tensor) -> dict[str, str | int]:
        form = self.form
        return {
            "op": op,
            "direction": "backward" if self._backward else "forward",
            "ranks": self._cp.world_size,
            "heads": form.heads,
            "keys": form.keys,
            "values": form.values,
            "transition": form.kind,
            "dtype": str(like.dtype),
            "numbers": form.numbers,
        }

    def _about(self) -> dict[str, str | int]:
        return {"cu_seqlens": fingerprint(self._cp.offsets), "shards": fingerprint(self._cp.bounds)}

    @contextmanager
    def summarising(self) -> Iterator[None]:
        """Send what the body wrote; if it raises, send that instead, so that the other ranks raise rather than wait."""
        try:
            yield
        except BaseException as error:
            self._cp.transport.report(error, ahead=0)
            self._send(failed=True)
            raise
        self._send(failed=False)

    def _send(self, *, failed: bool) -> None:
        cp = self._cp
        numbers = header(call=self._call, backward=self._backward, offsets=cp.offsets, bounds=cp.bounds, failed=failed)
        write(numbers, self.payload[:HEADER])
        self._pending = cp.transport.all_gather(self.payload, cp.timeout)

    def wait(self) -> Tensor:
        assert self._pending is not None
        gathered = self._pending.wait()
        if not gathered.is_cuda:
            self._check(gathered[:, :HEADER])
        elif not torch.cuda.is_current_stream_capturing():
            self._defer(gathered[:, :HEADER])
        return gathered

    def _check(self, headers: Tensor) -> None:
        try:
            check_headers(headers, self._cp.rank)
        except RankFailedError:
            self._cp.transport.raise_reported()  # the same, with the other rank's own words
            raise

    def _defer(self, headers: Tensor) -> None:
        host = torch.empty(headers.shape, dtype=headers.dtype, pin_memory=True)
        host.copy_(headers, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        _unchecked.append(_Unchecked(headers=host, copied=copied, rank=self._cp.rank))
        check_deferred(wait=self._cp.check == "now")


def check_deferred(*, wait: bool) -> None:
    """Check the headers that have arrived, all of them if `wait`. What it raises may be about an earlier call."""
    while _unchecked and (wait or _arrived(_unchecked[0])):
        earliest = _unchecked.popleft()
        earliest.copied.synchronize()
        check_headers(earliest.headers, earliest.rank)


def _arrived(headers: _Unchecked) -> bool:
    return bool(headers.copied.query())  # type: ignore[no-untyped-call]
