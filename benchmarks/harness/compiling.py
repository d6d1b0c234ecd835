"""What is compiled before what is measured, and with which of the peers' tuning choices."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.calls import Peer
from benchmarks.harness.inputs import BOUND
from benchmarks.harness.tuning import Tuning
from benchmarks.harness.warm import Job, Outcome, Workers, jobs_of


class Compiling:
    """Before the first shape: all it needs, every configuration that peers tune over. Before the second, when their
    choice is known: all that the other shapes need. At once, if an earlier run's choice was read."""

    def __init__(
        self, options: argparse.Namespace, tuning: Tuning, peers: Sequence[Peer], say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._tuning = tuning
        self._peers = peers
        self._say = say
        self._workers = Workers(options.warm_jobs) if options.warm_jobs else None
        self._done: set[tuple[object, ...]] = set()

    def before(self, at: int, group: Sequence[Any], wanted: Sequence[Any], seconds: float) -> None:
        """`group`: the configurations of shape number `at`; `wanted`: of all shapes."""
        if self._workers is None or at > 1:
            return
        chosen = group if at == 0 and not self._tuning.known else wanted
        jobs = [job for job in self._jobs(chosen) if job.compiles not in self._done]
        if not jobs:
            return
        self._done.update(job.compiles for job in jobs)
        self._say(f"compiling: {len(jobs)} jobs in {self._options.warm_jobs} processes")
        self._report(*self._workers.run(jobs, seconds))

    def close(self) -> None:
        if self._workers is not None:
            self._workers.stop()

    def _jobs(self, configurations: Sequence[Any]) -> list[Job]:
        """Ours first, whose times are wanted most. A configuration that compiles nothing new has no job."""
        calls = list(dict.fromkeys((c.op, c.shape, c.gates) for c in configurations))
        ours = [self._job("", *call) for call in calls]
        theirs = [job for peer in self._peers for call in calls for job in self._peer_jobs(peer, *call)]
        return list(dict.fromkeys([*ours, *theirs]))

    def _job(self, peer: str, op: str, shape: Any, gates: str, **more: Any) -> Job:
        directory = self._options.generated / op
        return jobs_of(directory, peer, shape, gates, tuple(self._options.directions), **more)

    def _peer_jobs(self, peer: Peer, op: str, shape: Any, gates: str) -> list[Job]:
        if peer.unsupported(op, shape, BOUND if gates == "bounded" else None):
            return []
        known = self._tuning.known
        count = self._options.shards if peer.tuned and not known else 1
        more = {"most": self._options.peer_configs, "known": known, "whole": peer.by_tokens}
        return [self._job(peer.name, op, shape, gates, shard=(i, count), **more) for i in range(count)]

    def _report(self, outcomes: Sequence[Outcome], missed: Sequence[Job]) -> None:
        slowest = max(outcomes, key=lambda outcome: outcome.seconds, default=None)
        longest = "" if slowest is None else f", the longest in {slowest.seconds:.0f} s: {slowest.job.label}"
        self._say(f"compiled {len(outcomes)}{longest}")
        for outcome in outcomes:
            if outcome.failure:
                self._say(f"  {outcome.job.label}: {outcome.failure}")
        if missed:
            self._say(f"  not done: {', '.join(job.label for job in missed)}")
