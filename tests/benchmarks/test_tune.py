"""The tuner, but for the device: what is tried, what is refused before it is timed, what ends up in the table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import tune
from benchmarks.harness import agreement, calls, device, measure, trial, tuner
from benchmarks.harness.candidates import PARTS, Candidate, candidates, parts_of
from benchmarks.harness.compilers import Compiled, Compilers, Job, compile_job
from benchmarks.harness.device import DeviceLostError
from benchmarks.harness.shapes import parse
from benchmarks.harness.tuned_file import Winner, merged
from kcpgen.runtime import tuned, tuned_table
from kcpgen.runtime.launch import Tiles
from kcpgen.runtime.tuned_table import Form, chosen, faults, overridden

ROOT = Path(__file__).resolve().parent.parent.parent
FORM = Form(decay="scalar", terms=1, erases=1)
STRUCTURE, TILES = chosen(FORM, 128, 128, torch.bfloat16)
TUNE = ["--ops", "gdn", "--shape", "1x70x1", "--kernels", "prepare", "--jobs", "1"]
ABOUT = {"date": "", "versions": {}, "shape": "", "ms_before": 2.0, "ms_after": 1.0}


def tiles_now() -> Tiles:
    """As a call made here would have them."""
    find = tuned._instead.get()
    return TILES if find is None else overridden(TILES, find(STRUCTURE))


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A device that is not there. Set `ms`, what `prepare_kernel` takes, and `failures`, by a candidate's label;
    `timed` has the tiles of `prepare` that were timed."""
    faked = SimpleNamespace(ms=lambda prepare: 1.0, failures={}, timed=[], out=tmp_path / "tuned.json")

    class Inline:
        def __init__(self, count: int) -> None:
            self.jobs: list[Job] = []

        def begin(self, jobs: Sequence[Job]) -> None:
            self.jobs += jobs

        def results(self, seconds: float) -> Iterator[Compiled]:
            while self.jobs and seconds > 0:
                job = self.jobs.pop(0)
                yield Compiled(job=job, failure=faked.failures.get(job.candidate.label, ""))

        def stop(self) -> list[Job]:
            return self.jobs

    def kernels(call: Callable[[], Any]) -> dict[str, float]:
        prepare = tiles_now().prepare
        faked.timed.append(prepare)
        return {"prepare_kernel": 5 * faked.ms(prepare), "scan_kernel": 5.0}

    monkeypatch.setattr(calls, "BACKEND", "eager")
    monkeypatch.setattr(tuner, "DEVICE", "cpu")
    monkeypatch.setattr(tuner, "Compilers", Inline)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(device, "kernels", kernels)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *at: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *at: (9, 0))
    return faked


def run(faked: SimpleNamespace, *more: str) -> int:
    return tune.main([*TUNE, "--out", str(faked.out), *more])


def entry_of(path: Path) -> dict[str, Any]:
    (entry,) = json.loads(path.read_text(encoding="utf-8"))["devices"]["A GPU"]
    return entry


def fast(**fields: int) -> Callable[[Any], float]:
    return lambda prepare: 0.5 if all(getattr(prepare, name) == value for name, value in fields.items()) else 1.0


def test_the_best_goes_into_the_table_with_how_it_was_measured(
    faked: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    faked.ms = fast(key_block=64, warps=4, registers=168)
    faked.failures["prepare key_block=128 warps=1"] = "takes 300000 bytes of shared memory, there are 232448"
    assert run(faked) == 0
    entry = entry_of(faked.out)
    assert entry["structure"] == {
        "decay": "scalar", "terms": 1, "erases": 1, "whole_value_axis": False,
        "key_width": 128, "value_width": 128, "scratch_bits": 16, "chunk": 64,
    }  # fmt: skip
    assert entry["tiles"] == {"prepare": {"key_block": 64, "warps": 4, "registers": 168}}
    about = entry["measured"]["prepare"]
    assert (about["ms_before"], about["ms_after"], about["shape"]) == (1.0, 0.5, "1x70x1")
    assert set(about["versions"]) == {"kcpgen", "torch", "triton", "cuda"}
    said = capsys.readouterr().out
    assert "gdn prepare key_block=128 warps=1: REJECTED, takes 300000 bytes of shared memory" in said
    assert said.splitlines()[-1].split()[:7] == ["gdn", "prepare", "1.0000", "0.5000", "14", "1", "0"]
    tuned_table.parse(faked.out.read_text(encoding="utf-8"))


def drifting(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: 1.1 * x if name == "dk" else x for name, x in found.items()}
    if found.gradients:
        found.gradients["k"] = 1.1 * found.gradients["k"]
        return found
    return measure.Result(o=1.1 * found.o, gradients={})


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (measure, "_training", "dk (chosen tiles) 1.0e-01 > 5e-03"),  # wrong where the window does not reach
        (measure, "_forward", "o (forward) 1.0e-01 > 5e-03"),
        (agreement, "_run", "dk 1.0e-01 > 5e-03"),
    ],
)
def test_what_is_wrong_is_never_timed(
    faked: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: Any,
    name: str,
    said: str,
) -> None:
    right = getattr(module, name)

    def planted(*arguments: Any) -> Any:
        reference = "naive" in arguments
        found = right(*arguments)
        return drifting(found) if tiles_now().prepare.key_block == 64 and not reference else found

    monkeypatch.setattr(module, name, planted)
    faked.ms = fast(key_block=64)
    assert run(faked) == 0
    assert f"gdn prepare key_block=64: REJECTED, gdn is wrong: {said}" in capsys.readouterr().out
    assert {prepare.key_block for prepare in faked.timed} == {32, 128}
    assert entry_of(faked.out)["tiles"] == {}


def test_what_raises_is_rejected_and_a_lost_device_ends_the_run(
    faked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = measure._training

    def faulting(*arguments: Any) -> Any:
        if tiles_now().prepare.key_block == 128:
            raise RuntimeError("out of resource: shared memory")
        return training(*arguments)

    monkeypatch.setattr(measure, "_training", faulting)
    assert run(faked) == 0
    said = capsys.readouterr().out
    assert "gdn prepare key_block=128: REJECTED, gdn failed: RuntimeError: out of resource: shared memory" in said
    faked.out.unlink()

    def lost() -> None:
        raise DeviceLostError("illegal memory access")

    monkeypatch.setattr(device, "synchronize", lost)
    assert run(faked) == 3
    assert (
        "the device is lost, nothing is written: prepare key_block=128: illegal memory access"
        in capsys.readouterr().out
    )
    assert not faked.out.exists()
    assert run(faked, "--without", "key_block=128") == 0
    assert entry_of(faked.out)["tiles"] == {}


def test_nothing_is_tuned_where_the_chosen_tiles_are_wrong(
    faked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = measure._forward
    monkeypatch.setattr(measure, "_forward", lambda *arguments: drifting(forward(*arguments)))
    assert run(faked) == 1
    assert "gdn is left out: gdn is wrong with the tiles that are chosen for it" in capsys.readouterr().out
    assert not faked.out.exists()


def test_what_is_not_faster_again_is_not_kept(faked: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    faked.ms = lambda prepare: 0.5 if prepare.warps == 1 and len(faked.timed) < 16 else 1.0
    assert run(faked) == 0
    assert "not faster again, and not kept: prepare" in capsys.readouterr().out
    assert entry_of(faked.out)["tiles"] == {}


def test_the_budget_ends_it(faked: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(faked, "--budget-s", str(tuner.RESERVE)) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[4:7] == ["1", "0", "14"]


def test_ops_of_one_structure_are_tuned_as_one() -> None:
    directories = [ROOT / "generated" / name for name in ("gdn", "simple_gla", "comba", "kda")]
    groups = tuner.groups_of(directories, parse("1x8192x32"))
    assert [group.label for group in groups] == ["gdn+comba", "simple_gla", "kda"]
    assert [[part.name for part in parts_of(group.structure)][-1] for group in groups] == [
        "gradients", "gradients", "pairs",
    ]  # fmt: skip


def test_candidates_are_allowed_and_distinct_and_begin_with_the_choice() -> None:
    for part in PARTS.values():
        tried = list(candidates(part, STRUCTURE, TILES))
        assert tried[0].fields == {}
        assert len({json.dumps(candidate.fields, sort_keys=True) for candidate in tried}) == len(tried)
        assert [f for c in tried for f in faults(STRUCTURE, c.overrides)] == []
    narrow, tiles = chosen(FORM, 16, 64, torch.bfloat16)
    assert {c.fields.get("key_block") for c in candidates(PARTS["prepare"], narrow, tiles)} == {None}


def test_a_dry_run_lists_the_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--ops", "gdn,kda", "--kernels", "gradients,pairs", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["gdn gradients as chosen", "gdn gradients key_block=32"]
    assert not [line for line in lines if line.startswith("gdn pairs")]
    assert "kda pairs pair_block=128 pair_warps=8" in lines


def test_without_a_device_it_says_so() -> None:
    command = [sys.executable, "benchmarks/tune.py", "--ops", "gdn"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not torch.cuda.is_available():
        assert (ran.returncode, ran.stderr) == (2, "error: no CUDA device here (--dry-run lists the candidates)\n")


def test_only_what_was_tuned_anew_is_replaced() -> None:
    def winner(part: str, **fields: int) -> Winner:
        return Winner(part=PARTS[part], fields=fields, about=ABOUT)

    table = merged({}, "A GPU", STRUCTURE, [winner("gradients", key_block=32), winner("scores", score_warps=2)])
    table = merged(table, "A GPU", STRUCTURE, [winner("gradients", warps=8), winner("scan")])
    entry = table["A GPU"][STRUCTURE]
    assert entry.tiles == {"gradients": {"score_warps": 2, "warps": 8}}
    assert set(entry.measured) == {"gradients", "scores", "scan"}


def test_a_part_that_did_not_run_has_no_time() -> None:
    with pytest.raises(ValueError, match="none of a, b ran, but c"):
        trial.of(("a", "b"), {"c": 1.0})


def test_candidates_are_compiled_beside_and_what_does_not_fit_is_named() -> None:
    """For a GPU that is not here, in a process of its own."""
    part, shape = PARTS["scan"], parse("1x64x1:256,64")
    jobs = [
        Job(
            group=0,
            directories=(ROOT / "generated" / "simple_gla",),
            shape=shape,
            candidate=Candidate(part=part, fields={"stages": stages}),
        )
        for stages in (1, 8)
    ]
    compilers = Compilers(1)
    try:
        compilers.begin(jobs[:1])
        (fits,) = compilers.results(120.0)
    finally:
        assert compilers.stop() == []
    assert (fits.job, fits.failure) == (jobs[0], "")
    assert 0 < fits.registers <= 255
    assert compile_job(jobs[1]).failure.startswith("takes ")
