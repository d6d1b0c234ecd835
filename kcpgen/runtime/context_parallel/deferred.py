"""Headers on their way to a device and back, checked once they are there, so that the host need not wait."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel.payload import HEADER, check_headers

Key = tuple[torch.device, torch.dtype, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """Pinned memory for the headers of one exchange. Once they were checked it serves another one: to pin memory anew
    takes the host longer than all else that is done with it.

    sent: [HEADER], of this rank; received: [W, HEADER]. copied: comes about once all is copied.
    """

    key: Key
    sent: Tensor
    received: Tensor
    copied: torch.cuda.Event


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unchecked:
    """held: what the copies need, and others may have let go."""

    slot: Slot
    rank: int
    owner: object
    held: tuple[Tensor, ...]


_unchecked: deque[_Unchecked] = deque()
_free: defaultdict[Key, list[Slot]] = defaultdict(list)
_lock = threading.RLock()


def slot_for(device: torch.device, dtype: torch.dtype, ranks: int) -> Slot:
    key = (device, dtype, ranks)
    with _lock:
        if _free[key]:
            return _free[key].pop()
    return Slot(
        key=key,
        sent=torch.empty(HEADER, dtype=dtype, pin_memory=True),
        received=torch.empty((ranks, HEADER), dtype=dtype, pin_memory=True),
        copied=torch.cuda.Event(),  # type: ignore[no-untyped-call]
    )


def defer(headers: Tensor, slot: Slot, rank: int, owner: object, held: tuple[Tensor, ...] = ()) -> None:
    """headers: [W, HEADER] on a device, gathered of what each rank wrote into its slot. owner: the transport that they
    came over."""
    slot.received.copy_(headers, non_blocking=True)
    slot.copied.record(torch.cuda.current_stream(headers.device))  # that of the copy
    with _lock:
        _unchecked.append(_Unchecked(slot=slot, rank=rank, owner=owner, held=held))


def check_deferred(*, wait: bool, owner: object = None) -> None:
    """Check the headers that have arrived (of one owner), all of them if `wait`. May be about an earlier call."""
    while (earliest := _next(wait, owner)) is not None:
        slot = earliest.slot
        slot.copied.synchronize()
        check_headers(slot.received, earliest.rank)
        with _lock:
            _free[slot.key].append(slot)


def _next(wait: bool, owner: object) -> _Unchecked | None:
    with _lock:
        for headers in _unchecked:
            if owner is None or headers.owner is owner:
                if not wait and not headers.slot.copied.query():  # type: ignore[no-untyped-call]
                    return None
                _unchecked.remove(headers)
                return headers
    return None
