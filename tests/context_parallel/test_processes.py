"""Real processes over gloo: forward and every gradient of every op, with activation checkpointing off and on."""

from __future__ import annotations

import cp_processes
import pytest
from cp_rows import OPS


@pytest.mark.parametrize(
    ("ranks", "lengths", "layout"),
    [(2, (20, 0, 32), "contiguous"), (3, (4, 57, 2, 0), "contiguous"), (4, (70, 36), "uneven")],
)
def test_every_op(ranks: int, lengths: tuple[int, ...], layout: str) -> None:
    for worst in cp_processes.run(ranks, cp_processes.every_op, lengths, layout):
        assert set(worst) == {f"{name} {checkpointed}" for name in OPS for checkpointed in (False, True)}, worst
        assert max(worst.values()) < 1e-10, worst
