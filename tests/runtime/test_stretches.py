"""Which calls go through their chunks in stretches, and where these are cut."""

from __future__ import annotations

import pytest

from kcpgen.runtime.stretches import AHEAD, BEHIND, STEP, halves, side_by_side

H200 = 132  # multiprocessors


@pytest.mark.parametrize(
    ("chunks", "heads", "stretches"),
    [
        ([256], 32, AHEAD),  # 8192 tokens of 32 heads in chunks of 32
        ([128], 32, AHEAD),  # and of 64
        ([64], 32, 0),  # too short for more launches
        ([256], 96, 0),  # serial kernels fill the device
        ([128, 128], 32, 0),
        ([], 32, 0),
        ([0], 32, 0),
        ([1000], 1, 0),
        ([4001], 1, AHEAD),
    ],
)
def test_one_long_sequence_of_few_heads(chunks: list[int], heads: int, stretches: int) -> None:
    found = side_by_side(chunks, heads, 2 * heads, H200, AHEAD)
    assert len(found) == stretches
    assert [chunk for stretch in found for chunk in stretch] == (list(range(chunks[0])) if found else [])
    assert all(stretch.start % STEP == 0 for stretch in found)  # kernels are compiled once
    assert len(side_by_side(chunks, heads, 2 * heads, H200, BEHIND)) == min(stretches, BEHIND)


def test_nothing_runs_side_by_side_where_there_are_no_multiprocessors() -> None:
    assert side_by_side([1000], 32, 64, 0, AHEAD) == ()


@pytest.mark.parametrize(
    ("chunks", "heads", "cut"), [(256, 32, 128), (259, 32, 128), (64, 32, 0), (31, 1000, 0), (32, 1000, 16), (0, 32, 0)]
)
def test_halves_of_what_is_large(chunks: int, heads: int, cut: int) -> None:
    assert halves(chunks, heads, H200) == ((range(cut), range(cut, chunks)) if cut else (range(chunks),))
    assert len(halves(chunks, heads, 0)) == 1 + (chunks >= 2 * STEP)
