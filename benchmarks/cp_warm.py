"""Before anything is timed: compile in parallel processes, let peers tune once, see that ranks agree with one device.

Kernels are compiled for each number of heads, peers' for each configuration that they tune over. So the first number of
heads is compiled with all of those, tuned in a quiet process, and the others with the winners alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import cp_time
import torch
import torch.distributed as dist
from cp_workers import Budget, on_workers

from benchmarks.harness.tuning import Tuning, brief, launch_only
from kcpgen.runtime import stretches
from kcpgen.runtime.split import forced_segments
from kcpgen.verify.compare import relative_rms

TOKENS, RANKS = 4096, 4  # a first rank, two inside and a last one: all that is ever launched
SHARDS = 4  # processes that share the configurations of one peer's kernels
WARM_SHARE = 0.4  # of the time left, the most that one round of compiling may take

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # else other backends replace its Triton kernels silently
os.environ.setdefault("FLA_CACHE_RESULTS", "0")  # what is timed beside others must not be taken for a tuning result

Agreements = dict[tuple[str, str], Any]


def prepare(chosen: argparse.Namespace, budget: Budget, who: str) -> Agreements:
    """By (op, who): how far `o` of simulated ranks is from one device's, on few tokens, or why it does not run.

    Of rank 0, for all ranks.
    """
    tuning = Tuning(most=chosen.peer_configs)
    if chosen.peer_tuning:
        tuning.read(chosen.peer_tuning)
    if chosen.device == "cuda" and who != "kcpgen":  # ours is not tuned at the first call
        tuning.install(brief)
    found: list[Any] = [{}, tuning.known, cp_time.REFUSED]
    if not dist.is_initialized() or dist.get_rank() == 0:
        found[0] = _prepare(chosen, budget, tuning, who)
    if dist.is_initialized():
        dist.broadcast_object_list(found)
        tuning.known.update(found[1])
        cp_time.REFUSED.update(found[2])
    agreements: Agreements = found[0]
    return agreements


def _prepare(chosen: argparse.Namespace, budget: Budget, tuning: Tuning, who: str) -> Agreements:
    names = [(name, who) for name in chosen.ops.split(",") if who in cp_time.implementations(chosen, name)]
    first, *others = cp_time.numbers(chosen.heads)
    start = time.monotonic()
    if chosen.warm_jobs:
        shards = {"kcpgen": 1, "fla": 1 if tuning.known else SHARDS}
        tasks = [(name, who, first, (i, shards[who])) for name, who in names for i in range(shards[who])]
        tasks += [(name, "kcpgen", heads, (0, 1)) for heads, (name, who) in product(others, names) if who == "kcpgen"]
        _compile(chosen, tasks, tuning, budget)
    agreements = {(name, who): _agreement(chosen, name, who, first) for name, who in names}
    if chosen.warm_jobs:
        tasks = [(name, who, heads, (0, 1)) for heads, (name, who) in product(others, names) if who == "fla"]
        _compile(chosen, tasks, tuning, budget)
    print(f"{who} prepared in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return agreements


def _compile(chosen: argparse.Namespace, tasks: list[Any], tuning: Tuning, budget: Budget) -> None:
    """What is not done in time is compiled when it is measured."""
    seconds = min(WARM_SHARE * budget.left, 3600.0)
    known = dict(tuning.known)
    for row in on_workers(compile_one, [(chosen, *task, known) for task in tasks], chosen.warm_jobs, seconds):
        print(row, file=sys.stderr, flush=True)


def compile_one(
    chosen: argparse.Namespace, name: str, who: str, heads: int, shard: tuple[int, int], known: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """In a process of its own: launch everything that a measurement of this subject will."""
    start = time.monotonic()
    Tuning(most=chosen.peer_configs, shard=shard, known=known).install(launch_only)
    for way in _ways_of_long_sequences() if who == "kcpgen" else [nullcontext()]:
        with way:
            _run(chosen, cp_time.subject(chosen, name, who, TOKENS, heads))
    yield {"compiled": name, "who": who, "H": heads, "shard": shard, "seconds": round(time.monotonic() - start, 1)}


def _ways_of_long_sequences() -> list[AbstractContextManager[Any]]:
    """Whole, in stretches, in segments: few tokens would go the first way alone."""
    return [
        forced_segments(1),
        mock.patch.object(stretches, "worth_launches", return_value=True),
        forced_segments(3),
    ]


def _agreement(chosen: argparse.Namespace, name: str, who: str, heads: int) -> float | str:
    try:
        return _run(chosen, cp_time.subject(chosen, name, who, TOKENS, heads))
    except Exception as error:  # a peer may refuse a device or a version in any way
        return f"{type(error).__name__}: {str(error)[:200]}"


def _run(chosen: argparse.Namespace, it: cp_time.Subject) -> float:
    """Relative RMS distance between `o` of simulated ranks and of one device; both trained once."""
    inputs = cp_time.draw(it.op, it.tokens, it.heads, chosen, 0)
    one = cp_time.calls_of(it, inputs)
    expected = one["forward"]().detach()
    try:
        one["forward+backward"]()
    except Exception as error:  # a peer may refuse a device or a version in any way
        if it.who == "kcpgen":
            raise
        cp_time.REFUSED[it.op.name, it.who] = {"forward+backward": f"{type(error).__name__}: {str(error)[:200]}"}
    found = cp_time.on_simulated_ranks(chosen, it, inputs, RANKS, lambda call, transport: call())
    if chosen.device == "cuda":
        torch.cuda.synchronize()
    o = torch.cat([rank["forward"].detach() for rank in found], dim=1)
    return float(f"{relative_rms(o, expected.double()):.2e}")
