"""Forms made up to reach every branch of the emitter: fp32 kernels against the per-token reference in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kcpgen.runtime.tuned import looked_up_by
from kcpgen.runtime.tuned_table import Overrides, Structure
from kcpgen.verify.cases import Case, option_keywords
from kcpgen.verify.compare import compare
from kcpgen.verify.op import load_op
from tests.kernels.forms import FORMS, built

BOUND = 1e-5


@pytest.mark.parametrize("name", FORMS)
def test_kernels_and_their_gradients(name: str, tmp_path: Path) -> None:
    assert_form(name, name, tmp_path, key_width=12)


def assert_form(name: str, op_name: str, tmp_path: Path, key_width: int) -> None:
    op = load_op(built(name, tmp_path, op_name))
    sizes = {"heads": 1, "value_heads": 2, "key_width": key_width, "value_width": 20}
    plain = Case(label=name, backend="triton", dtype="float32", tokens=39, offsets=(0, 0, 5, 39), **sizes)
    for case in [replace(plain, label=label, keywords=on) for label, on in option_keywords(op)] or [plain]:
        found = compare(op, case, "cpu")
        assert not found.failure, found.failure
        worst = {figure.tensor: figure.error for figure in found.figures}
        assert max(worst.values()) < BOUND, (case.label, worst)


BLOCKED = (
    "three_erases",
    "erases_before_and_after_a_promised_decay",
    "an_erase_before_a_scalar_decay",
    "a_coefficient_on_one_of_two_writes",
    "sums_in_sums",
    "a_scalar_made_with_a_sum_over_keys",
    "two_options_on_one_axis",
)


@pytest.mark.parametrize("name", BLOCKED)
def test_kernels_walk_the_keys_in_blocks(name: str, tmp_path: Path) -> None:
    """Three of the four blocks hold keys, the third only some."""
    widths = set()

    def in_blocks(structure: Structure) -> Overrides:
        widths.add(structure.key_width)
        return {"prepare": {"key_block": 16}}

    with looked_up_by(in_blocks):
        assert_form(name, f"{name}_wide", tmp_path, key_width=40)
    assert widths == {64}
