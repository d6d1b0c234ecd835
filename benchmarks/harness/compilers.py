"""Candidates compiled in processes that share Triton's cache, without the GPU: nothing disturbs what is timed there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness.candidates import Candidate
from benchmarks.harness.shapes import Shape
from benchmarks.harness.warm import small
from kcpgen.verify.op import Op, load_op


@dataclass(frozen=True, kw_only=True)
class Job:
    """A candidate's own kernels of every op that would share it; `group`: whose they are, for the one who asks."""

    group: int
    directories: tuple[Path, ...]
    shape: Shape
    candidate: Candidate


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """failure: why it cannot run, "" if it can. registers, stack, shared: the most that a kernel takes; bytes."""

    job: Job
    failure: str
    registers: int = 0
    stack: int = 0
    shared: int = 0


def compile_job(job: Job) -> Compiled:
    """What the candidate's kernels take on sm_90. That one does not compile, or not fit, is its failure."""
    from kcpgen.verify.resources import SHARED_LIMIT

    try:
        found = [kernel for directory in job.directories for kernel in _kernels(directory, job.shape, job.candidate)]
    except Exception as error:  # a compiler may fail in any way
        return Compiled(job=job, failure=f"does not compile: {type(error).__name__}: {error}".splitlines()[0][:200])
    if not found:
        return Compiled(job=job, failure=f"none of {', '.join(job.candidate.part.kernels)} is launched")
    shared = max(kernel.shared for kernel in found)
    return Compiled(
        job=job,
        failure=f"takes {shared} bytes of shared memory, there are {SHARED_LIMIT}" if shared > SHARED_LIMIT else "",
        registers=max(kernel.registers for kernel in found),
        stack=max(kernel.stack for kernel in found),
        shared=shared,
    )


def _kernels(directory: Path, shape: Shape, candidate: Candidate) -> list[Any]:
    from benchmarks.harness.calls import our_call
    from benchmarks.harness.measure import DIRECTIONS, in_direction
    from kcpgen.runtime.split import forced_segments
    from kcpgen.runtime.tuned import looked_up_by
    from kcpgen.verify.resources import launched

    op, arguments = _drawn(directory, small(shape))
    call = our_call(op, arguments)

    def both() -> None:
        for direction in DIRECTIONS:
            in_direction(call, arguments, direction)()

    with looked_up_by(lambda structure: candidate.overrides), forced_segments(1):
        return launched(op, both, candidate.part.kernels, portable=True)


@lru_cache(maxsize=8)
def _drawn(directory: Path, shape: Shape) -> tuple[Op, Any]:
    from benchmarks.harness.inputs import draw

    op = load_op(directory)
    return op, draw(op, shape, "open", "cpu")


class Compilers:
    """Jobs begun in the order in which they are given, by `count` processes."""

    def __init__(self, count: int) -> None:
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start)
        self._waiting: dict[Future[Compiled], Job] = {}

    def begin(self, jobs: Sequence[Job]) -> None:
        self._waiting |= {self._pool.submit(compile_job, job): job for job in jobs}

    def results(self, seconds: float) -> Iterator[Compiled]:
        """Those of what was begun and not yet handed out, as they come, for so many seconds."""
        try:
            for future in as_completed(list(self._waiting), timeout=max(0.0, seconds)):
                job = self._waiting.pop(future)
                died = future.exception()
                yield future.result() if died is None else Compiled(job=job, failure=f"its compiler died: {died}")
        except TimeoutError:
            return

    def stop(self) -> list[Job]:
        """End the processes, busy ones too; what they had not done."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        return list(self._waiting.values())


def _start() -> None:
    import torch

    torch.set_num_threads(1)
