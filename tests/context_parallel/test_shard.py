"""A rank's share of a row: against a token-by-token count, for any row and any ranks."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from kcpgen.runtime.context_parallel.shard import Shard, even_bounds, make_shard


@st.composite
def rows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets of sequences, some of them empty, and of ranks, each with a token or more."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any))
    tokens = sum(lengths)
    cuts = draw(st.sets(st.integers(1, max(1, tokens - 1)), max_size=min(5, tokens - 1))) if tokens > 1 else set()
    return (0, *accumulate(lengths)), (0, *sorted(cuts), tokens)


def shards(offsets: tuple[int, ...], bounds: tuple[int, ...]) -> list[Shard]:
    return [make_shard(offsets, bounds, rank) for rank in range(len(bounds) - 1)]


def ranks_of(offsets: tuple[int, ...], bounds: tuple[int, ...]) -> list[list[int]]:
    """The ranks that hold a token of each sequence."""
    owner = [rank for rank, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]
    return [sorted({owner[token] for token in range(a, b)}) for a, b in pairwise(offsets)]


@given(rows())
def test_every_token_lies_in_its_sequence(row: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    offsets, bounds = row
    sequence = [n for n, (a, b) in enumerate(pairwise(offsets)) for _ in range(a, b)]
    found = [
        shard.first_sequence + n
        for shard in shards(offsets, bounds)
        for n, (a, b) in enumerate(pairwise(shard.offsets))
        for _ in range(a, b)
    ]
    assert found == sequence


@given(rows())
def test_every_sequence_begins_on_one_rank_and_ends_on_one(row: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    offsets, bounds = row
    all_shards = shards(offsets, bounds)
    for part in ("starting", "ending"):
        found = [shard.first_sequence + n for shard in all_shards for n in getattr(shard, part)]
        assert sorted(found) == list(range(len(offsets) - 1))


@given(rows())
def test_chains(row: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    offsets, bounds = row
    chains = [chain or [-1] for chain in ranks_of(offsets, bounds)]  # an empty sequence is on no rank
    all_shards = shards(offsets, bounds)
    for shard in all_shards:
        first = next(chain for chain in chains if shard.rank in chain)
        last = [chain for chain in chains if shard.rank in chain][-1]
        assert shard.pre_num_ranks == shard.rank - first[0]
        assert shard.post_num_ranks == last[-1] - shard.rank
        assert shard.interior == any(chain[0] < shard.rank < chain[-1] for chain in chains)
        begin = offsets[chains.index(first)]
        assert shard.pre_num_tokens == (shard.start - begin if shard.receives else 0)
        assert shard.crossing == any(len(chain) > 1 for chain in chains)
        assert shard.interiors == any(other.interior for other in all_shards)


@given(st.integers(1, 200), st.integers(1, 9))
def test_even_bounds(tokens: int, ranks: int) -> None:
    counts = [b - a for a, b in pairwise(even_bounds(tokens, ranks))]
    assert sum(counts) == tokens
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


def test_summaries_of_one_rank_may_be_about_different_sequences() -> None:
    """4 ranks of 256 tokens, sequences of 700 and 324: rank 2 passes on the second one and receives the first."""
    shard = make_shard((0, 700, 1024), (0, 256, 512, 768, 1024), 2)
    assert shard.offsets == (0, 188, 256)
    assert (shard.pre_num_ranks, shard.post_num_ranks, shard.interior) == (2, 1, False)
    assert [s.interior for s in shards((0, 700, 1024), (0, 256, 512, 768, 1024))] == [False, True, False, False]


def test_empty_sequences_belong_to_the_rank_of_the_token_after_them() -> None:
    offsets, bounds = (0, 0, 4, 4, 4, 8, 8), (0, 4, 8)
    first, last = shards(offsets, bounds)
    assert (first.first_sequence, first.offsets, first.sends) == (0, (0, 0, 4), False)
    assert (last.first_sequence, last.offsets, last.receives) == (2, (0, 0, 0, 4, 4), False)
