"""Kernels compile for sm_90 on a machine without a GPU, and what they take is read from the binary."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kcpgen.runtime.groups import sums_over_groups
from kcpgen.verify.cases import Case
from kcpgen.verify.inputs import make_inputs
from kcpgen.verify.op import load_op
from kcpgen.verify.resources import SHARED_LIMIT, Resources, _compiling_only, _read, resources

SMALL = Case(label="small", backend="triton", dtype="bfloat16", tokens=64, key_width=16, value_width=16)
KERNEL = Resources(kernel="kernel", warps=4, registers=255, stack=0, shared=SHARED_LIMIT)


def test_every_launch_of_a_call_is_compiled(root: Path) -> None:
    found = resources(load_op(root / "generated" / "simple_gla"), SMALL)
    assert {"prepare_kernel", "scan_kernel", "reverse_kernel", "gradients_kernel"} <= {r.kernel for r in found}
    assert all(0 < r.registers <= 255 and 0 < r.shared <= SHARED_LIMIT for r in found)


def test_a_compilation_leaves_nothing_behind(root: Path) -> None:
    op = load_op(root / "generated" / "simple_gla")
    resources(op, SMALL)
    with pytest.raises(RuntimeError, match="needs CUDA tensors"):
        op.chunk(**make_inputs(op, SMALL, "cpu").tokens, backend="triton")


def test_what_exceeds_shared_memory_does_not_fit() -> None:
    assert KERNEL.fits
    assert not replace(KERNEL, shared=SHARED_LIMIT + 1).fits


@pytest.mark.parametrize("width", [128, 72])
def test_sums_over_groups_move_16_bytes_at_once(width: int) -> None:
    """Of every head and of the sum, though tokens and heads are odd in number; inputs of one shape in one kernel."""
    x = torch.empty(1, 7, 3, width, dtype=torch.bfloat16)
    gradient = torch.empty(1, 7, 6, width)
    compiled: list[Any] = []
    with _compiling_only(compiled):
        sums_over_groups((gradient, x), (gradient, x))
    (kernel,) = compiled
    moved = re.findall(r"(ld|st)\.global\S*?\.(v\d\.)?[bfu](\d+)", kernel.asm["ptx"])
    assert {way for way, *_ in moved} == {"ld", "st"}
    assert {(vector, bits) for _, vector, bits in moved} == {("v4.", "32")}
    assert _read(kernel).stack == 0
