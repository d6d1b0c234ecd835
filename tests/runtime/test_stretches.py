"""Which calls go through their chunks in stretches, and where these are cut."""

from __future__ import annotations

import pytest
import torch

from kcpgen.runtime.layout import chunk_layout
from kcpgen.runtime.stretches import SHORTEST, STEP, Behind, halves, layouts, side_by_side

H200 = 132  # multiprocessors


@pytest.mark.parametrize(
    ("chunks", "heads", "lengths"),
    [
        ((256,), 32, [128, 80, 48]),  # 8192 tokens of 32 heads in chunks of 32
        ((128,), 32, [80, 48]),  # and of 64
        ((104,), 36, []),  # one would be too short
        ((64,), 32, []),  # too short for more launches
        ((256,), 96, []),  # serial kernels fill the device
        ((128, 128), 32, []),
        ((), 32, []),
        ((0,), 32, []),
        ((1000,), 1, []),
        ((4001,), 1, [2000, 1200, 801]),
    ],
)
def test_one_long_sequence_of_few_heads(chunks: tuple[int, ...], heads: int, lengths: list[int]) -> None:
    found = side_by_side(chunks, heads, 2 * heads, H200)
    assert [len(stretch) for stretch in found] == lengths
    assert [chunk for stretch in found for chunk in stretch] == (list(range(chunks[0])) if found else [])
    assert all(stretch.start % STEP == 0 for stretch in found)  # kernels are compiled once
    assert all(len(stretch) >= SHORTEST for stretch in found)


def test_nothing_runs_side_by_side_where_there_are_no_multiprocessors() -> None:
    assert side_by_side((1000,), 32, 64, 0) == ()


@pytest.mark.parametrize(
    ("chunks", "heads", "cut"), [(256, 32, 128), (259, 32, 128), (64, 32, 0), (31, 1000, 0), (32, 1000, 16), (0, 32, 0)]
)
def test_halves_of_what_is_large(chunks: int, heads: int, cut: int) -> None:
    assert halves(chunks, heads, H200) == ((range(cut), range(cut, chunks)) if cut else (range(chunks),))
    assert len(halves(chunks, heads, 0)) == 1 + (chunks >= 2 * STEP)


def test_gradients_take_long_stretches_in_two_portions() -> None:
    layout = chunk_layout(1, 8192, None, 32, torch.device("cpu"))
    cuts = (range(128), range(128, 208), range(208, 256))
    rows = layouts(layout, 8192, cuts)
    assert [row.lengths for row in rows] == [(128,), (80,), (48,)]
    behind = Behind(cuts, rows)
    behind._done = [None] * 3
    halved = [range(208, 256), range(128, 208), range(64, 128), range(64)]
    assert list(behind.once_reversed(in_portions=True)) == halved
    assert list(behind.once_reversed(in_portions=False)) == [range(208, 256), range(128, 208), range(128)]
