"""Headers on their way from a device to the host, checked once they are there, so that the host need not wait."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel.payload import check_headers


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unchecked:
    headers: Tensor
    copied: torch.cuda.Event
    rank: int
    owner: object


_unchecked: deque[_Unchecked] = deque()
_lock = threading.RLock()


def defer(headers: Tensor, rank: int, owner: object) -> None:
    """headers: [W, HEADER] on a device. owner: the transport that they came over."""
    host = torch.empty(headers.shape, dtype=headers.dtype, pin_memory=True)
    host.copy_(headers, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    with _lock:
        _unchecked.append(_Unchecked(headers=host, copied=copied, rank=rank, owner=owner))


def check_deferred(*, wait: bool, owner: object = None) -> None:
    """Check the headers that have arrived (of one owner), all of them if `wait`. May be about an earlier call."""
    while (earliest := _next(wait, owner)) is not None:
        earliest.copied.synchronize()
        check_headers(earliest.headers, earliest.rank)


def _next(wait: bool, owner: object) -> _Unchecked | None:
    with _lock:
        for headers in _unchecked:
            if owner is None or headers.owner is owner:
                if not wait and not headers.copied.query():  # type: ignore[no-untyped-call]
                    return None
                _unchecked.remove(headers)
                return headers
    return None
