"""When sequences are cut into segments, and where the segments lie."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcpgen.runtime import split
from kcpgen.runtime.chunk_op import _window
from kcpgen.runtime.layout import CHECKPOINT, chunk_layout
from kcpgen.runtime.pieces import chunk_counts, cut, multiprocessors
from kcpgen.runtime.split import (
    SHORTEST,
    asked_for,
    equal_segments,
    forced_segments,
    segment_counts,
    training_steps,
)

MULTIPROCESSORS = 132
# Tokens, heads, and segments with a dense M and with a diagonal one; K = V = 128, chunks of 32.
DECISIONS = [
    (2048, 1, 1, 1),  # two segments of the shortest length save less than they cost
    (4096, 8, 4, 4),
    (8192, 8, 8, 8),
    (8192, 16, 4, 4),
    (8192, 22, 3, 3),
    (8192, 32, 1, 1),  # two segments: the first pass takes what the second one saves
    (8192, 64, 1, 1),
    (131072, 1, 33, 66),  # a fold of dense matrices over twice as many would take longer than it saves
    (131072, 8, 8, 8),
    (131072, 16, 4, 4),
    (131072, 32, 1, 1),
    (131072, 128, 1, 1),
]


def decided(chunks: list[int], heads: int, dense: bool, processors: int = MULTIPROCESSORS) -> tuple[int, ...]:
    return segment_counts(chunks, programs=2 * heads, transition_programs=2 * heads * dense, multiprocessors=processors)


@pytest.mark.parametrize(("tokens", "heads", "dense", "diagonal"), DECISIONS)
def test_one_sequence(tokens: int, heads: int, dense: int, diagonal: int) -> None:
    assert decided([tokens // 32], heads, True) == (dense,)
    assert decided([tokens // 32], heads, False) == (diagonal,)


@pytest.mark.parametrize(
    ("chunks", "heads", "segments"),
    [
        ([4096, 3, 0, 70, 300], 8, (7, 1, 1, 1, 1)),  # only what the longest one has to wait for
        ([1024, 1024], 4, (8, 8)),
        ([256] * 4, 8, (1, 1, 1, 1)),  # as many programs as one sequence of 32 heads
        ([256] * 4, 1, (8, 8, 8, 8)),
        ([0, 0], 1, (1, 1)),
        ([], 1, ()),
    ],
)
def test_several_sequences(chunks: list[int], heads: int, segments: tuple[int, ...]) -> None:
    assert decided(chunks, heads, True) == segments


def test_nothing_is_cut_where_programs_do_not_run_side_by_side() -> None:
    assert multiprocessors(torch.device("cpu")) == 0
    assert decided([4096], 1, False, processors=0) == (1,)


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(1, 64), st.booleans(), st.sampled_from([1, 16, 78, 132]))
def test_no_segment_is_short_and_no_step_gets_slower(
    chunks: list[int], heads: int, dense: bool, processors: int
) -> None:
    counts = decided(chunks, heads, dense, processors)
    assert len(counts) == len(chunks)
    assert all(count == 1 or n // count >= SHORTEST for n, count in zip(chunks, counts, strict=True))
    if chunks and max(counts) > 1:
        whole, parts = (
            training_steps(chunks, some, 2 * heads, 2 * heads * dense, processors)
            for some in ([1] * len(chunks), counts)
        )
        assert parts < whole / 1.2


@pytest.mark.parametrize(("summarised", "segments"), [(False, 1), (True, 2)])
def test_a_rank_inside_a_sequence_cuts_its_part_sooner(summarised: bool, segments: int) -> None:
    """It makes summaries anyway."""
    counts = segment_counts(
        [2048], programs=64, transition_programs=64, multiprocessors=MULTIPROCESSORS, summarised=summarised
    )
    assert counts == (segments,)


@pytest.mark.parametrize(("roles", "dense", "segments"), [(False, True, 4), (True, True, 1), (True, False, 4)])
def test_a_chunk_of_m_counts_as_its_kind_of_kernel_takes(
    roles: bool, dense: bool, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "TRANSITION", {False: 1.5, True: 6.0})
    counts = segment_counts(
        [256], programs=32, transition_programs=32 * dense, multiprocessors=MULTIPROCESSORS, roles=roles
    )
    assert counts == (segments,)


def test_whoever_calls_may_decide() -> None:
    assert asked_for(None) is None
    with forced_segments(3):
        assert (asked_for(None), asked_for(1)) == (3, 1)
        with forced_segments(None):
            assert asked_for(None) is None
    assert asked_for(None) is None
    assert equal_segments([0, 1, 4, 9], 4) == (1, 1, 4, 4)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(2, 6), st.booleans())
def test_segments_are_the_sequences(lengths: list[int], count: int, packed: bool) -> None:
    """Token for token and chunk for chunk, in the order of the chains."""
    starts = (0, *accumulate(lengths)) if packed else (0, lengths[0])
    batch = 1 if packed else len(lengths)
    layout = chunk_layout(batch, starts[-1], starts if packed else None, 16, torch.device("cpu"))
    chunks = chunk_counts(batch, starts, 16)
    counts = equal_segments(chunks, count)
    if max(counts) == 1:
        return
    found = cut(layout, batch, starts, counts)
    rows = layout.sequences.tolist()
    for some in (layout, found.whole, found.pieces, found.leading, found.following, found.inner):
        assert some.lengths == tuple(-(-tokens // 16) for _, _, tokens, _ in some.sequences.tolist())
    some = _window(layout, range(1, len(rows)))
    assert (some.sequences.tolist(), some.lengths) == (rows[1:], layout.lengths[1:])
    assert found.whole.sequences.tolist() == [rows[n] for n in found.whole_sequences.tolist()]
    assert sorted(found.whole_sequences.tolist() + found.sequences.tolist()) == list(range(len(rows)))
    pieces, leading, following, inner = (
        some.sequences.tolist() for some in (found.pieces, found.leading, found.following, found.inner)
    )
    assert found.chains[:, 2].tolist() == found.sequences.tolist()
    for first, size, n in found.chains.tolist():
        chain = pieces[first : first + size]
        row, begin, tokens, chunk = rows[n]
        assert len(chain) == counts[n]
        assert sum(length for _, _, length, _ in chain) == tokens
        for at, start, length, before in chain:
            assert (at, start, before) == (row, begin, chunk)
            assert length > 0
            begin, chunk = start + length, before - (-length // 16)
        assert chunk == rows[n][3] + chunks[n]
        assert all(length % 16 == 0 for _, _, length, _ in chain[:-1])
    ends = zip(found.first.tolist(), found.last.tolist(), strict=True)
    assert [[first, last - first + 1] for first, last in ends] == found.chains[:, :2].tolist()
    assert leading == [row for i, row in enumerate(pieces) if i not in found.last.tolist()]
    assert following == [row for i, row in enumerate(pieces) if i not in found.first.tolist()]
    assert inner == [row for row in leading if row in following]
    assert [leading[i] for i in found.first_leading.tolist()] == [pieces[i] for i in found.first.tolist()]
    assert [following[i] for i in found.last_following.tolist()] == [pieces[i] for i in found.last.tolist()]


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6), st.integers(1, 3))
def test_runs_begin_at_sequences_and_checkpoints_and_cover_every_chunk_once(lengths: list[int], batch: int) -> None:
    starts = tuple(accumulate(lengths, initial=0))
    rows = batch if len(lengths) == 1 else 1
    layout = chunk_layout(rows, starts[-1], starts if len(lengths) > 1 else None, 16, torch.device("cpu"))
    first_chunks = {before: n for n, (_, _, tokens, before) in enumerate(layout.sequences.tolist()) if tokens}
    covered: list[int] = []
    for begin, chunks, state in layout.runs.tolist():
        assert 1 <= chunks <= CHECKPOINT
        if begin in first_chunks:
            assert state == -1 - first_chunks[begin]
        else:
            assert (state, begin % CHECKPOINT) == (begin // CHECKPOINT, 0)
        assert not any(begin < start < begin + chunks for start in first_chunks)
        covered += range(begin, begin + chunks)
    assert covered == list(range(layout.chunk_count))
