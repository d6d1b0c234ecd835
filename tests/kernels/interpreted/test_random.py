"""Sizes, groups and lengths drawn at random: kernels in fp32 against the per-token reference in float64."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcpgen.verify.cases import Case
from kcpgen.verify.compare import compare
from kcpgen.verify.op import load_op

GENERATED = Path(__file__).resolve().parents[3] / "generated"
BOUND = 1e-5


@pytest.mark.parametrize("name", ["gdn2", "comba"])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=2).filter(any),
    packed=st.booleans(),
    group=st.integers(1, 3),
    keys=st.integers(1, 70),
    values=st.integers(1, 70),
    initial_state=st.booleans(),
)
def test_any_sizes(
    name: str,
    lengths: list[int],
    packed: bool,
    group: int,
    keys: int,
    values: int,
    initial_state: bool,
) -> None:
    case = Case(
        label="random",
        backend="triton",
        dtype="float32",
        tokens=sum(lengths),
        heads=1,
        value_heads=group,
        key_width=keys,
        value_width=values,
        offsets=(0, *accumulate(lengths)) if packed else (),
        initial_state=initial_state,
    )
    found = compare(load_op(GENERATED / name), case, "cpu")
    assert not found.failure, found.failure
    assert max(figure.error for figure in found.figures) < BOUND, found.figures
