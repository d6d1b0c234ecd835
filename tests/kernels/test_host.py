"""The host side of the kernels: where chunks lie, tiles, strides and gradient buffers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcpgen.runtime.launch import (
    StatesAround,
    altered,
    choose_tiles,
    gradient_buffer,
    padded,
    partial_sums,
    sum_over_chunks,
    unit_stride,
    within_block_range,
)
from kcpgen.runtime.layout import ChunkLayout, chunk_layout

CPU = torch.device("cpu")


def layout(batch: int, tokens: int, lengths: list[int] | None, chunk: int = 16) -> ChunkLayout:
    offsets = None if lengths is None else tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
    return chunk_layout(batch, tokens, offsets, chunk, CPU)


def test_layout_of_a_batch() -> None:
    found = layout(2, 35, None)
    assert found.chunks.tolist() == [[0, 0, 16], [0, 16, 16], [0, 32, 3], [1, 0, 16], [1, 16, 16], [1, 32, 3]]
    assert found.sequences.tolist() == [[0, 0, 35, 0], [1, 0, 35, 3]]


@pytest.mark.parametrize(
    ("lengths", "chunks", "sequences"),
    [
        ([0, 5, 0, 17, 0], [[0, 0, 5], [0, 5, 16], [0, 21, 1]], [[0, 0], [0, 5], [5, 0], [5, 17], [22, 0]]),
        ([0, 0], [], [[0, 0], [0, 0]]),
        ([16, 16], [[0, 0, 16], [0, 16, 16]], [[0, 16], [16, 16]]),
        ([], [], []),
    ],
)
def test_layout_of_packed_sequences(lengths: list[int], chunks: list[list[int]], sequences: list[list[int]]) -> None:
    found = layout(1, sum(lengths), lengths)
    assert found.chunks.tolist() == chunks
    assert found.chunks.shape == (found.chunk_count, 3)
    assert found.sequences.shape == (found.sequence_count, 4)
    assert found.sequences[:, 1:3].tolist() == sequences


@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (3, 0)])
def test_layout_of_nothing(batch: int, tokens: int) -> None:
    found = layout(batch, tokens, None)
    assert (found.chunk_count, found.sequence_count, found.chunks.dtype) == (0, batch, torch.int32)


@given(lengths=st.lists(st.integers(0, 40), max_size=6), chunk=st.sampled_from([16, 32, 64]))
def test_chunks_cover_every_token_once_and_cross_no_border(lengths: list[int], chunk: int) -> None:
    found = layout(1, sum(lengths), lengths, chunk)
    covered = [first + i for _, first, count in found.chunks.tolist() for i in range(count)]
    assert covered == list(range(sum(lengths)))
    ends = [*found.sequences[:, 3].tolist(), found.chunk_count]
    for (_, first, tokens, _), (begin, end) in zip(found.sequences.tolist(), pairwise(ends), strict=True):
        assert end - begin == -(-tokens // chunk)
        assert all(first <= at < first + tokens for _, at, _ in found.chunks[begin:end].tolist())


def test_layouts_are_shared_by_value() -> None:
    assert layout(1, 7, [3, 4]) is layout(1, 7, [3, 4])
    assert layout(1, 7, [3, 4]) is not layout(1, 7, [4, 3])


@pytest.mark.parametrize(("width", "expected"), [(1, 16), (16, 16), (17, 32), (60, 64), (100, 128), (256, 256)])
def test_padded(width: int, expected: int) -> None:
    assert padded(width) == expected


@given(
    keys=st.integers(1, 256),
    values=st.integers(1, 256),
    decay=st.sampled_from(["none", "scalar", "vector"]),
    terms=st.integers(1, 4),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    whole=st.booleans(),
)
def test_tiles_divide_what_they_walk(
    keys: int, values: int, decay: str, terms: int, dtype: torch.dtype, whole: bool
) -> None:
    tiles = choose_tiles(keys=keys, values=values, decay=decay, terms=terms, dtype=dtype, whole_value_axis=whole)
    prepare, gradients = tiles.prepare, tiles.gradients
    assert prepare.key_width >= keys
    assert prepare.value_width >= values
    for block in (prepare.key_block, gradients.key_block):
        assert prepare.key_width % block == 0
    for scan in (tiles.scan, tiles.states, tiles.reverse):
        assert prepare.value_width % scan.value_block == 0
    for block in (prepare.value_block, gradients.value_block):
        assert prepare.value_width % block == 0
        assert block == prepare.value_width or not whole
    assert tiles.chunk in (16, 32, 64)


def test_dense_columns_are_taken_as_they_are() -> None:
    packed = torch.randn(2, 5, 3, 40)
    for view in (packed, packed[..., 8:24], packed[:, ::2], packed[:, :, 1:2].expand(-1, -1, 4, -1), packed.flip(1)):
        assert unit_stride(view) is view
    scalars = torch.randn(2, 3, 5).transpose(1, 2)
    assert unit_stride(scalars) is scalars


def test_other_columns_are_copied() -> None:
    packed = torch.randn(2, 5, 16, 3)
    for view in (packed.transpose(2, 3), packed[..., ::2], packed[..., :1].expand(-1, -1, -1, 8)):
        dense = unit_stride(view)
        assert torch.equal(dense, view)
        assert dense.stride(-1) == 1


@pytest.mark.parametrize(
    ("shape", "heads", "carrying", "expected", "dtype"),
    [
        ((2, 5, 4, 8), 4, False, (2, 5, 4, 8), torch.bfloat16),
        ((2, 5, 2, 8), 4, False, (2, 5, 4, 8), torch.float32),
        ((2, 5, 4), 4, True, (2, 5, 4), torch.float32),
    ],
)
def test_gradient_buffers(
    shape: tuple[int, ...], heads: int, carrying: bool, expected: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.zeros(8, 8, 8, 8, dtype=torch.bfloat16).expand(8, 8, 8, 8)[tuple(slice(0, n) for n in shape)]
    x = x if len(shape) == 4 else x[..., 0]
    found = gradient_buffer(x, heads, carrying)
    assert (found.shape, found.dtype, found.is_contiguous()) == (expected, dtype, True)


def test_shares_of_parameters_add_up_over_chunks() -> None:
    param = torch.zeros(4, 8)
    shares = partial_sums(param, 3, 4)
    assert shares is not None
    assert shares.shape == (3, 4, 8)
    torch.testing.assert_close(sum_over_chunks(shares.fill_(2.0), param), torch.full((4, 8), 6.0))
    assert partial_sums(None, 3, 4) is None
    assert sum_over_chunks(None, None) is None


@pytest.mark.parametrize(("promise", "expected"), [(None, False), (0.0, True), (-5.0, True), (-5.01, False)])
def test_a_promise_decides_whether_all_pairs_meet_at_one_border(promise: float | None, expected: bool) -> None:
    assert within_block_range(promise) is expected


def test_the_reverse_scan_of_several_terms_holds_fewer_chunks_where_keys_are_wide() -> None:
    stages = {
        (keys, terms): choose_tiles(
            keys=keys, values=256, decay="vector", terms=terms, dtype=torch.bfloat16
        ).reverse.stages
        for keys in (128, 256)
        for terms in (1, 2)
    }
    assert stages == {(128, 1): 3, (128, 2): 3, (256, 1): 2, (256, 2): 1}


def test_an_altered_copy_is_what_dataclasses_would_make() -> None:
    tiles = choose_tiles(keys=64, values=64, decay="none", terms=1, dtype=torch.bfloat16)
    assert altered(tiles, chunk=16) == replace(tiles, chunk=16) != tiles


def test_states_are_let_go() -> None:
    states = StatesAround(entering=torch.empty(1), leaving=torch.empty(1))
    states.release()
    assert states.entering is None
    assert states.leaving is None
