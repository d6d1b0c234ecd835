"""What three comparisons of every tensor say about where a fault lies.

CP to one device, cuts on chunk borders     the same kernels on the same chunks: equal for two ranks; beyond an interior
                                            rank the state comes from M, which the scan's rounding of a state never met
CP to one device, other cuts                other chunks: as far apart as either is from the truth
one device to naive                         noise of the chunked form, nothing to do with ranks
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from kcpgen.runtime.context_parallel.shard import Shard, make_shard
from kcpgen.simulate.compare import Comparison, Figure

FORWARD = ("o", "final_state")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """kind: "agrees" or the name of what is wrong; text: where to look."""

    kind: str
    text: str

    @property
    def ok(self) -> bool:
        return self.kind == "agrees"


def judge(comparison: Comparison) -> Verdict:
    aligned = comparison.chunk is not None and cuts_on_chunks(comparison, comparison.chunk)
    far = [f for f in comparison.figures if _far(comparison, f, aligned)]
    if not far:
        return _agreement(comparison, aligned)
    shards = [make_shard(comparison.case.offsets, comparison.bounds, r) for r in range(comparison.spread.ranks)]
    forward = [f for f in far if f.tensor in FORWARD]
    return _in_forward(comparison, forward, shards, aligned) if forward else _in_backward(far, shards)


def cuts_on_chunks(comparison: Comparison, chunk: int) -> bool:
    """Every cut lies a whole number of chunks after the start of its sequence: ranks have the chunks of one device."""
    offsets = comparison.case.offsets
    for cut in comparison.bounds[1:-1]:
        begin = max(a for a, b in pairwise(offsets) if a <= cut < b)
        if (cut - begin) % chunk:
            return False
    return True


def tolerance(comparison: Comparison, figure: Figure, aligned: bool) -> float:
    """How far CP may be from one device."""
    if comparison.case.dtype == "float64":
        return 1e-10
    if comparison.case.dtype == "float32":
        return 1e-4
    if aligned:
        return 1e-3 if comparison.spread.ranks == 2 else max(1e-3, 1.5 * figure.one_to_naive)
    return max(1e-3, 3 * figure.one_to_naive)


def _far(comparison: Comparison, figure: Figure, aligned: bool) -> bool:
    """Written so that NaN is far."""
    return not figure.cp_to_one <= tolerance(comparison, figure, aligned)


def _agreement(comparison: Comparison, aligned: bool) -> Verdict:
    different = [f.tensor for f in comparison.figures if not f.equal]
    by_token = [f.tensor for f in comparison.figures if not f.equal and f.worst_token is not None]
    if aligned and comparison.spread.ranks == 2 and by_token:
        text = f"cuts lie on chunk borders, yet {_listed(by_token)} are not bit-identical: a state changes on its way"
        return Verdict(kind="kernel", text=f"{text}; look at a scan's initial and final states, or at its tiles")
    missed = [f for f in comparison.figures if not f.cp_to_naive <= f.bound]
    if missed:
        text = f"ranks agree with one device, and both are far from naive in {_listed(f.tensor for f in missed)}"
        return Verdict(kind="noise", text=f"{text}: look at the chunked form and its precision, not at the ranks")
    exact = "bit-identical to one device" if not different else "as close to one device as rounding allows"
    return Verdict(kind="agrees", text=f"{exact}, and within bounds of naive")


def _in_forward(comparison: Comparison, far: list[Figure], shards: list[Shard], aligned: bool) -> Verdict:
    ranks = _ranks(comparison, far, aligned)
    if _first_head_is_right(comparison, far, aligned):
        text = "head 0 is right and later heads are not"
        return Verdict(kind="heads", text=f"{text}: look for a pointer without its head offset in what ranks summarise")
    receiving = [shards[rank] for rank in ranks]
    where = f"outputs differ on {_named(ranks)}"
    if receiving and all(shard.pre_num_ranks >= 2 for shard in receiving):
        text = f"{where}, behind an interior rank, and on no rank next to where its sequence began"
        return Verdict(kind="transition", text=f"{text}: look at M, its precision and its order")
    before = [shards[shard.rank - 1] for shard in receiving if shard.pre_num_ranks == 1]
    if before and all(shard.sequences > 1 for shard in before):
        text = f"{where}, behind ranks with several sequences"
        return Verdict(kind="window", text=f"{text}: look at which sequence a rank passes on")
    return Verdict(kind="summary", text=f"{where}: look at S_ext, the gather and the merge")


def _in_backward(far: list[Figure], shards: list[Shard]) -> Verdict:
    far_ranks = sorted({rank for f in far for rank, error in enumerate(f.ranks) if error > f.cp_to_one / 100})
    where = f"outputs agree, gradients ({_listed(f.tensor for f in far)}) differ on {_named(far_ranks)}"
    if far_ranks and all(shards[rank].receives for rank in far_ranks):
        text = f"{where}, all of which received a state"
        return Verdict(
            kind="saved state", text=f"{text}: look at what is saved for the backward, and what it replays from"
        )
    return Verdict(kind="backward summary", text=f"{where}: look at the backward's summary, gather and merge")


def _ranks(comparison: Comparison, far: list[Figure], aligned: bool) -> list[int]:
    return sorted({r for f in far for r, error in enumerate(f.ranks) if not error <= tolerance(comparison, f, aligned)})


def _first_head_is_right(comparison: Comparison, far: list[Figure], aligned: bool) -> bool:
    limits = [(f.heads, tolerance(comparison, f, aligned)) for f in far if f.heads]
    first = all(heads[0] <= limit for heads, limit in limits)
    return first and any(max(heads[1:], default=0.0) > limit for heads, limit in limits)


def _named(ranks: list[int]) -> str:
    if not ranks:
        return "no rank's tokens"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
