"""Compiles in processes that share caches on disk: each calls once what will be measured, if it can on few tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness.shapes import Shape

TOKENS = 256
LONGEST = 3600.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """peer: "" for the generated op. shard, most, known: see `Tuning`."""

    directory: Path
    peer: str
    shape: Shape
    gates: str
    directions: tuple[str, ...]
    shard: tuple[int, int] = (0, 1)
    most: int | None = None
    known: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def compiles(self) -> tuple[object, ...]:
        """Jobs that agree in this, all shards together, fill the cache with the same kernels."""
        return self.directory, self.peer, self.shape, self.gates

    @property
    def label(self) -> str:
        part = f" {self.shard[0] + 1}/{self.shard[1]}" if self.shard[1] > 1 else ""
        return f"{self.directory.name} {self.peer or 'kcpgen'} {self.shape.label} {self.gates}{part}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    job: Job
    seconds: float
    failure: str


def small(shape: Shape) -> Shape:
    """A shape for which the same kernels are compiled; packed stays packed."""
    return replace(shape, batch=1, tokens=TOKENS, lengths=(TOKENS // 2, TOKENS // 2) if shape.lengths else ())


def jobs_of(
    directory: Path, peer: str, shape: Shape, gates: str, directions: tuple[str, ...], whole: bool = False, **more: Any
) -> Job:
    """The job that compiles for one measurement. Packed or not makes a difference to peers alone.

    whole: with all its tokens, since fewer would not compile the kernels that are measured.
    """
    size = shape if whole else small(shape) if peer else replace(small(shape), lengths=())
    return Job(directory=directory, peer=peer, shape=size, gates=gates, directions=directions, **more)


def run_job(job: Job) -> Outcome:
    start = time.perf_counter()
    try:
        _run(job)
    except Exception as error:
        return Outcome(job=job, seconds=time.perf_counter() - start, failure=_fatal(error))
    return Outcome(job=job, seconds=time.perf_counter() - start, failure="")


def _fatal(error: Exception) -> str:
    """The error's first line; a process whose device faulted ends, since all its later jobs would fail."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if "CUDA error" in text:
        os._exit(1)
    return text


TUNING: Any = None  # of this worker process


def _run(job: Job) -> None:
    import torch

    from benchmarks.harness.calls import PEERS, our_call, peer_call
    from benchmarks.harness.inputs import draw
    from benchmarks.harness.measure import in_direction
    from kcpgen.verify.op import load_op

    _tune(job)
    op = load_op(job.directory)
    arguments = draw(op, job.shape, job.gates, "cuda")
    peer = next((p for p in PEERS if p.name == job.peer), None)
    if peer is None:
        call = our_call(op, arguments)
    else:
        os.environ.update(peer.environment)
        call = peer_call(peer, op.name, arguments)
    for direction in job.directions:
        in_direction(call, arguments, direction)()
    torch.cuda.synchronize()


def _tune(job: Job) -> None:
    from benchmarks.harness.tuning import Tuning, launch_only

    global TUNING
    if TUNING is None:
        TUNING = Tuning()
        TUNING.install(launch_only)
    TUNING.shard, TUNING.most, TUNING.known = job.shard, job.most, dict(job.known)


def start_worker() -> None:
    os.environ["FLA_CACHE_RESULTS"] = "0"  # what is timed here, beside others, must not be taken for a tuning result
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"


class Workers:
    """Processes that outlive one batch of jobs: each imports torch and the peers once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def run(self, jobs: Iterable[Job], seconds: float) -> tuple[list[Outcome], list[Job]]:
        """(outcomes, jobs not done): what took too long, or whose process died, is compiled when it is measured."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._count, mp_context=get_context("spawn"), initializer=start_worker)
        futures: dict[Future[Outcome], Job] = {self._pool.submit(run_job, job): job for job in jobs}
        done, late = wait(futures, timeout=min(max(0.0, seconds), LONGEST))
        outcomes = [future.result() for future in done if future.exception() is None]
        if late or len(outcomes) < len(done):
            self.stop()
        missed = [job for future, job in futures.items() if future in late or future.exception() is not None]
        return outcomes, missed

    def stop(self) -> None:
        """End the processes at once, busy ones too."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
