"""Shapes as they are written on the command line."""

from __future__ import annotations

import pytest

from benchmarks.harness.shapes import DEFAULT, GROUPED, parse


@pytest.mark.parametrize("shape", [*DEFAULT, GROUPED, parse("2x100x4/8:64,96")], ids=lambda shape: shape.label)
def test_a_label_is_what_one_writes(shape: object) -> None:
    assert parse(shape.label) == shape  # type: ignore[attr-defined]


def test_a_packed_row_has_its_lengths() -> None:
    shape = parse("[1300, 547, 2*10]x64")
    assert (shape.batch, shape.tokens, shape.offsets) == (1, 1867, (0, 1300, 1847, 1857, 1867))


@pytest.mark.parametrize("text", ["", "8192x32", "1x8192", "1x0x32", "1x64x3/4", "[]x4", "[4**2]x4", "[,]x1", "axbxc"])
def test_what_is_no_shape_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no (shape|list of lengths): "):
        parse(text)
