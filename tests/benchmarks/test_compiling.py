"""What is compiled beside, and how peers' tuning is kept short without changing what wins."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import speed
from benchmarks.harness import calls, cold, compiling
from benchmarks.harness.compiling import Compiling
from benchmarks.harness.shapes import parse
from benchmarks.harness.tuning import Tuning, as_data
from benchmarks.harness.warm import Job, Outcome, Workers, jobs_of, small

ROOT = Path(__file__).resolve().parent.parent.parent


def configs(count: int) -> list[Any]:
    return [SimpleNamespace(kwargs={"BV": i}, num_warps=4, num_stages=2) for i in range(count)]


def test_shards_together_try_everything_and_never_nothing() -> None:
    wanted = configs(7)
    tried = [c for i in range(3) for c in Tuning(shard=(i, 3)).choose("k", wanted)]
    assert sorted(c.kwargs["BV"] for c in tried) == list(range(7))
    assert all(Tuning(shard=(i, 5)).choose("k", configs(2)) for i in range(5))


def test_few_configurations_are_spread_over_the_list_and_the_number_is_kept() -> None:
    tuning = Tuning(most=3)
    assert [c.kwargs["BV"] for c in tuning.choose("k", configs(9))] == [0, 3, 6]
    assert tuning.tried == {"k": 3}


def test_a_known_winner_is_taken_unless_it_is_not_allowed(tmp_path: Path) -> None:
    tuning = Tuning(known={"k": as_data(configs(4)[2])})
    tuning.write(tmp_path / "tuning.json")
    again = Tuning()
    again.read(tmp_path / "tuning.json")
    again.read(tmp_path / "none.json")
    assert [c.kwargs["BV"] for c in again.choose("k", configs(4))] == [2]
    assert len(again.choose("k", configs(2))) == 2


def test_tritons_tuner_asks_for_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import autotuner

    for name in ("prune_configs", "run", "do_bench"):
        monkeypatch.setattr(autotuner.Autotuner, name, vars(autotuner.Autotuner)[name])
    launched: list[int] = []

    def kernel(x: Any, H: Any, K: Any, V: Any, BV: Any) -> None: ...

    function = SimpleNamespace(run=lambda *a, **k: launched.append(k["BV"]), fn=kernel)
    tuner = autotuner.Autotuner(
        function, ["x", "H", "K", "V", "BV"], [autotuner.Config({"BV": i}) for i in range(4)], ["H"], None, None
    )
    tuning = Tuning()

    def timer(call: Any, quantiles: Any) -> list[float]:
        call()
        return [abs(launched[-1] - 2.5)] * 3

    tuning.install(timer)
    tuner.run(1, H=8, K=128, V=128)
    assert launched == [0, 1, 2, 3, 2]
    launched.clear()
    tuner.run(1, H=16, K=128, V=128)
    assert launched == [2, 2]
    launched.clear()
    tuner.run(1, H=16, K=64, V=64)
    assert launched == [2]  # the tuner's own key is the same
    assert list(tuning.known) == [
        f"{kernel.__module__}.kernel K=128 V=128",
        f"{kernel.__module__}.kernel K=64 V=64",
    ]


class FakeWorkers(Workers):
    def __init__(self, count: int) -> None:
        self.batches: list[list[Job]] = []

    def run(self, jobs: Sequence[Job], seconds: float) -> tuple[list[Outcome], list[Job]]:  # type: ignore[override]
        self.batches.append(list(jobs))
        done = [Outcome(job=job, seconds=1.0, failure="it broke" if job.peer else "") for job in list(jobs)[:-1]]
        return done, list(jobs)[-1:]

    def stop(self) -> None:
        return


def compiled(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]
) -> tuple[list[list[Job]], list[str]]:
    """The batches of jobs of a run over all shapes, and what is said of them."""
    monkeypatch.setattr(compiling, "Workers", FakeWorkers)
    options = speed.arguments_parser().parse_args([*arguments, "--warm-jobs", "4", "--shards", "3"])
    wanted = list(speed.configurations(options))
    said: list[str] = []
    work = Compiling(options, Tuning(known=known), [calls.FLA, calls.FLASH_QLA], said.append)
    for at, shape in enumerate(dict.fromkeys(c.shape for c in wanted)):
        work.before(at, [c for c in wanted if c.shape == shape], wanted, 10.0)
        if at == 0:
            work._tuning.known["some"] = {}
    assert isinstance(work._workers, FakeWorkers)
    return work._workers.batches, said


def test_the_first_shape_tunes_in_shards_and_the_others_take_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ["1x8192x32", "4x4096x32", "[8*1024]x32", "1x8192x8:64"]
    (first, rest), said = compiled(["--ops", "gdn", "--shapes", *shapes], monkeypatch, {})
    assert [(job.peer, job.shard) for job in first] == [
        ("", (0, 1)),
        ("fla", (0, 3)),
        ("fla", (1, 3)),
        ("fla", (2, 3)),
        ("FlashQLA", (0, 1)),
    ]
    # the second shape is new only to a peer that chooses by length, packing to peers, other heads to all
    assert [(job.peer, job.shape.label) for job in rest] == [
        ("", "1x256x8:64"),
        ("fla", "[2*128]x32"),
        ("fla", "1x256x8:64"),
        ("FlashQLA", "4x4096x32"),
        ("FlashQLA", "[8*1024]x32"),
    ]
    assert any("it broke" in line for line in said)
    assert any("not done" in line for line in said)


def test_with_an_earlier_runs_choice_all_shapes_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, _ = compiled(["--ops", "kda", "--shapes", "1x8192x32", "1x8192x8"], monkeypatch, {"k": {}})
    assert len(batches) == 1
    assert {job.shard for job in batches[0]} == {(0, 1)}
    assert {job.gates for job in batches[0]} == {"open", "bounded"}


def test_small_shapes_compile_the_same_kernels() -> None:
    assert small(parse("4x4096x16/32:64")).label == "1x256x16/32:64"
    ours = jobs_of(ROOT, "", parse("[100,20]x4"), "open", ("forward",))
    assert not ours.shape.lengths


def test_a_cold_process_that_fails_says_why() -> None:
    (found,) = cold.first_calls([ROOT / "generated" / "nothing"], "1x64x2", 1, 60.0)
    assert found["op"] == "nothing"
    assert "no generated package" in found["failure"]


def test_worker_processes_return_what_went_wrong_and_end_when_told() -> None:
    """The jobs fail, for want of a device, each by itself; then one that takes too long is given up."""
    job = jobs_of(ROOT / "generated" / "gdn", "", parse("1x64x2:16"), "open", ("forward",))
    workers = Workers(1)
    outcomes, missed = workers.run([job, job], 120.0)
    assert (len(outcomes), missed) == (2, [])
    assert torch.cuda.is_available() or all("CUDA" in outcome.failure for outcome in outcomes)
    worked = [process.pid for process in multiprocessing.active_children()]
    outcomes, missed = workers.run([job], 0.0)
    assert (outcomes, missed) == ([], [job])
    assert worked
    assert all(_ends(pid) for pid in worked)


def _ends(pid: int | None) -> bool:
    """Asked of the system: `active_children` may go on naming a process that another thread of the pool has reaped."""
    assert pid is not None
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
