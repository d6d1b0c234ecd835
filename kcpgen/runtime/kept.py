"""What a forward keeps of its states for a backward: those that enter all chunks, or one in a few.

All of them, rounded as products take them, are written by the scan beside its products, where it hardly notices. With
one in CHECKPOINT, in fp32, a backward begins with a pass that works out the others, and between a forward and its
backward a token and head with K = V = 128 needs 128 bytes of states instead of 512; the peak, in the backward, is the
same.
Outputs are the same to the last bit, gradients but for the rounding of a state.

Inside `torch.utils.checkpoint` nothing is kept for long: there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_replayed: ContextVar[bool] = ContextVar("replayed", default=False)


@contextmanager
def replayed_states(choice: bool = True) -> Iterator[None]:
    """Forwards inside keep the state of one chunk in CHECKPOINT alone; their backwards replay the others, wherever they
    run."""
    token = _replayed.set(choice)
    try:
        yield
    finally:
        _replayed.reset(token)


def replays() -> bool:
    """Whether whoever surrounds this call asks for that."""
    return _replayed.get()
