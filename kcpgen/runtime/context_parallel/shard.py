"""One rank's share of a packed row, as integers: its tokens and sequences, and with whom it shares the outer two.

Ranks hold consecutive spans of tokens. A sequence that lies on several ranks makes a chain of them; a rank is
*interior* to a chain when the sequence comes in from the rank before and goes on to the rank after.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Shard:
    """start, stop: global tokens. offsets: local cu_seqlens. first_sequence: global number of local sequence 0.

    pre_num_ranks: how many ranks before hold tokens of the first local sequence; post_num_ranks: how many ranks after
    hold tokens of the last one. pre_num_tokens: how many tokens those ranks before hold of it.
    crossing, interiors: whether any rank of the group shares a sequence, whether any is interior to one.
    """

    rank: int
    world_size: int
    start: int
    stop: int
    offsets: tuple[int, ...]
    first_sequence: int
    global_sequences: int
    pre_num_ranks: int
    post_num_ranks: int
    pre_num_tokens: int
    crossing: bool
    interiors: bool

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def receives(self) -> bool:
        """The first local sequence began on another rank."""
        return self.pre_num_ranks > 0

    @property
    def sends(self) -> bool:
        """The last local sequence goes on on another rank."""
        return self.post_num_ranks > 0

    @property
    def interior(self) -> bool:
        """One sequence fills the rank, begun before and going on after: only its transition is of use to others."""
        return self.receives and self.sends and self.sequences == 1

    @property
    def starting(self) -> range:
        """Local sequences that begin here: their initial states are the caller's."""
        return range(self.pre_num_ranks > 0, self.sequences)

    @property
    def ending(self) -> range:
        """Local sequences that end here: their final states are the caller's."""
        return range(self.sequences - (self.post_num_ranks > 0))


def even_bounds(tokens: int, world_size: int) -> tuple[int, ...]:
    """Token offsets of the ranks, as equal as possible; the first `tokens % world_size` ranks hold one more."""
    share, more = divmod(tokens, world_size)
    return tuple(rank * share + min(rank, more) for rank in range(world_size + 1))


@lru_cache(maxsize=256)
def make_shard(offsets: tuple[int, ...], bounds: tuple[int, ...], rank: int) -> Shard:
    """The share of `rank`. offsets: global cu_seqlens, [N + 1]; bounds: token offsets of the ranks, strictly rising.

    A sequence without tokens belongs to the rank of the token after it, at the end of the row to the last rank.
    """
    ranks = range(len(bounds) - 1)
    before = [_ranks_before(offsets, bounds, other) for other in ranks]
    after = [_ranks_after(offsets, bounds, other) for other in ranks]
    held = _sequences(offsets, bounds, rank)
    start, stop = bounds[rank], bounds[rank + 1]
    local = tuple(max(offsets[n], start) - start for n in held)
    return Shard(
        rank=rank,
        world_size=len(ranks),
        start=start,
        stop=stop,
        offsets=(*local, stop - start),
        first_sequence=held.start,
        global_sequences=len(offsets) - 1,
        pre_num_ranks=before[rank],
        post_num_ranks=after[rank],
        pre_num_tokens=start - offsets[held.start] if before[rank] else 0,
        crossing=any(before),
        interiors=any(before[r] and after[r] and len(_sequences(offsets, bounds, r)) == 1 for r in ranks),
    )


def _sequences(offsets: Sequence[int], bounds: Sequence[int], rank: int) -> range:
    """Global numbers of the sequences on a rank, empty ones among them."""
    start, stop, last = bounds[rank], bounds[rank + 1], rank == len(bounds) - 2
    first = bisect_right(offsets, start) - 1  # holds token `start`: empty sequences that begin there come before it
    if offsets[first] == start:
        while first > 0 and offsets[first - 1] == start:
            first -= 1
    behind = len(offsets) - 1 if last else bisect_right(offsets, stop - 1)
    return range(first, behind)


def _ranks_before(offsets: Sequence[int], bounds: Sequence[int], rank: int) -> int:
    begin = offsets[bisect_right(offsets, bounds[rank]) - 1]
    return rank - _owner(bounds, begin)


def _ranks_after(offsets: Sequence[int], bounds: Sequence[int], rank: int) -> int:
    end = offsets[bisect_right(offsets, bounds[rank + 1] - 1)]
    return _owner(bounds, end - 1) - rank


def _owner(bounds: Sequence[int], token: int) -> int:
    return bisect_right(bounds, token) - 1


def check_offsets(offsets: tuple[int, ...]) -> None:
    """Raises ValueError unless the offsets begin at 0 and never fall."""
    if len(offsets) < 2 or offsets[0] != 0:
        raise ValueError(f"cu_seqlens is {list(offsets[:4])}...; allowed: [N + 1] offsets that begin at 0, N >= 1")
    for n, (begin, end) in enumerate(pairwise(offsets)):
        if end < begin:
            raise ValueError(f"cu_seqlens falls from {begin} to {end} at sequence {n}; allowed: values that never fall")
