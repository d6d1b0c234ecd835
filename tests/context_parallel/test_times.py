"""What the benchmark of times reports, run small on a CPU: its figures mean nothing there, their form does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cp_rows import ROOT

sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "benchmarks"))

import cp_loop
import cp_time
from cp_workers import Budget

SMALL = ("--ops", "gla", "--heads", "1", "--width", "8", "--repeats", "2", "--device", "cpu")


def told(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ran(out: Path, *arguments: str) -> list[dict[str, Any]]:
    told("context_parallel.py", *arguments, *SMALL, "--out", str(out))
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["left_out"] == sum("left_out" in figure["one"] for figure in report["figures"])
    figures: list[dict[str, Any]] = report["figures"]
    return figures


def test_cost(tmp_path: Path) -> None:
    figures = ran(tmp_path / "cost.json", "cost", "--tokens", "256", "--ranks", "2,4", "--warm-jobs", "1")
    assert [figure["simulated_ranks"] for figure in figures] == [2, 4]
    for figure in figures:
        assert figure["o_to_one"] < 1e-10
        assert set(figure["work"]) == set(figure["speedup"]) == {"forward", "forward+backward"}
        for share in figure["ranks"]["share"].values():
            assert set(share) == {"pre-process", "merge", "main"}
            assert sum(share.values()) == pytest.approx(1.0, abs=1e-3)


def test_what_there_is_no_time_for_is_listed(tmp_path: Path) -> None:
    figures = ran(tmp_path / "cost.json", "cost", "--tokens", "256,512", "--ranks", "2", "--budget-s", "0.1")
    assert [figure["T"] for figure in figures] == [256, 512]
    assert all("no time left" in figure[part]["left_out"] for figure in figures for part in ("one", "ranks"))


def test_what_would_not_fit_is_told_by_smaller_sizes() -> None:
    chosen: Any = SimpleNamespace(device="cpu", repeats=3)
    fits = cp_time._Fits(chosen, Budget(0.0))
    fits._limit = 1000.0
    op: Any = SimpleNamespace(name="any")

    def subject(tokens: int) -> cp_time.Subject:
        return cp_time.Subject(op=op, who="kcpgen", function=print, tokens=tokens, heads=1)

    assert fits.run(subject(10), "one device", lambda: {"peak_bytes": 500}) == {"peak_bytes": 500}
    assert fits.run(subject(20), "one device", lambda: {"peak_bytes": 900}) == {"peak_bytes": 900}
    assert "needs about" in fits.run(subject(30), "one device", lambda: {})["left_out"]
    assert fits.run(subject(30), "2 ranks", lambda: {}) == {}


@pytest.mark.parametrize(("tokens", "heads", "repeats"), [(2**15, 8, 10), (2**17, 32, 10), (2**19, 64, 3)])
def test_large_sizes_are_repeated_less(tokens: int, heads: int, repeats: int) -> None:
    it: Any = SimpleNamespace(size=tokens * heads)
    chosen: Any = SimpleNamespace(repeats=10)
    assert cp_time.repeats_of(chosen, it) == repeats


def test_nothing_waits_between_the_calls_of_a_loop() -> None:
    seen: list[str] = []
    found = cp_loop.steady(lambda: seen.append("call"), "cpu", 3, lambda: seen.append("together"))
    assert seen == ["together", "call", "call", "call"] * (1 + cp_loop.LOOPS)
    assert 0.0 <= found.host_ms <= found.ms


def test_what_calls_keep_the_host_for_is_told_without_a_gpu() -> None:
    stdout = told("host.py", "--ops", "gla", "--calls", "1", "--device", "cpu")
    rows = [line.split() for line in stdout.splitlines()[1:]]
    assert [" ".join(row[:-4]) for row in rows] == [
        "gla, one device",
        *(f"gla, rank {rank} of {size}" for rank, size in ((0, 2), (1, 2), (1, 3))),
    ]
    assert all(row[-4:-2] == ["-", "-"] and float(row[-2]) > 0 for row in rows)
