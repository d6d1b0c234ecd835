"""Descriptors of scratch, whose sizes are checked once."""

from __future__ import annotations

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kcpgen.runtime import launch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_descriptor_of_known_sizes_is_one_that_triton_has_checked(dtype: torch.dtype) -> None:
    made = []
    for _ in range(2):
        scratch = torch.empty(3, 2, 32, 64, dtype=dtype)
        made.append(launch.tile_descriptor(scratch, 32, 64))
        assert made[-1] == TensorDescriptor(scratch, [192, 64], [64, 1], [32, 64])
        assert made[-1].base is scratch
    assert made[0].base is not made[1].base  # nothing keeps a tensor for later calls


@pytest.mark.parametrize("in_place", [True, False])
def test_so_is_one_of_vectors(in_place: bool) -> None:
    """An input, whose strides may be any, or scratch."""
    for wide in (2, 3, 2):
        vectors = torch.empty(1, 128, 2 * wide, 64, dtype=torch.bfloat16)[:, :, ::wide]
        seen = vectors.transpose(1, 2) if in_place else vectors
        made = launch.vector_descriptor(vectors, in_place, 32, 64)
        assert (made.shape, made.strides) == (list(seen.shape), list(seen.stride()))
        assert made.block_shape == [1, 1, 32, 64]
        assert made.base is vectors  # a descriptor has sizes and strides of its own: nothing is transposed


def test_sizes_that_triton_refuses_are_refused_every_time() -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match="shape must be positive"):
            launch.tile_descriptor(torch.empty(0, 2, 32, 64), 32, 64)


def test_scratch_that_no_tile_can_be_copied_from_is_refused() -> None:
    scratch = torch.empty(2 * 32 * 64 + 8, dtype=torch.bfloat16)
    launch.tile_descriptor(scratch[8:].view(2, 32, 64), 32, 64)
    with pytest.raises(ValueError, match="multiples of 16"):
        launch.tile_descriptor(scratch[1:-7].view(2, 32, 64), 32, 64)
