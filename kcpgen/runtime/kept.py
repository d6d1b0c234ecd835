"""What a forward keeps of its states for a backward: those that enter all chunks, or one in a few.

All of them, rounded as products take them, are written by the scan beside its products, where it hardly notices. With
one in CHECKPOINT, in fp32, a backward begins with a pass that works out the others, and between a forward and its
backward a token and head with K = V = 128 needs 128 bytes of states instead of 512 in chunks of 64 tokens; the peak, in
the backward, is the same. Outputs are the same to the last bit, gradients but for the rounding of a state.

Inside `torch.utils.checkpoint` nothing is kept for long: there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_replayed = False


@contextmanager
def replayed_states(choice: bool = True) -> Iterator[None]:
    """Forwards meanwhile keep the state of one chunk in CHECKPOINT alone; their backwards, whenever they run, replay
    the others.

    For all threads: what a checkpoint has autograd save anew, in the backward and in a thread of its own, must be what
    the forward has saved. Where there are checkpoints, backwards belong inside too, or torch raises a CheckpointError.
    """
    global _replayed
    before, _replayed = _replayed, choice
    try:
        yield
    finally:
        _replayed = before


def replays() -> bool:
    """Whether somebody asks for that."""
    return _replayed
