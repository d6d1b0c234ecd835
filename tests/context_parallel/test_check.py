"""The check at full size, run small: what it reports, and that it finds what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cp_rows import ROOT, op, row

from kcpgen.simulate.call import Spread, ordinary_memory
from kcpgen.simulate.compare import simulate
from kcpgen.simulate.faults import injected

sys.path.append(str(ROOT / "benchmarks"))

from cp_check import ROWS, checked
from cp_workers import on_workers


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/context_parallel.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_command(tmp_path: Path) -> None:
    """Two ops in processes of their own: every row once, each with its errors, and a verdict."""
    out = tmp_path / "check.json"
    arguments = ("check", "--simulated", "--ops", "gla,delta_rule", "--sizes", "8", "--scale", "100", "--device", "cpu")
    ran = command(*arguments, "--workers", "2", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(out.read_text(encoding="utf-8"))["figures"]
    rows = {(f["op"], f["simulated_ranks"], *f["lengths"]) for f in figures}
    assert len(figures) == len(rows) == 2 * len(ROWS)
    for figure in figures:
        assert figure["ok"] is True
        assert figure["why"] == []
        assert figure["memory"] == "ordinary"
        assert {"o", "final_state", "dq", "dk", "dv", "dinitial_state"} <= set(figure["errors"])
        assert all(error["cp"] < 1e-10 for error in figure["errors"].values())


NUMBERS = {"dtype": "float64", "backend": "eager", "scale": 100, "heads_checked": 0, "reference": "eager"}


def test_rows_that_were_ok_are_not_run_again(tmp_path: Path) -> None:
    """Those of other memory or real ranks were not these, and what failed or found no time is wanted."""
    about = {"op": "gla", "K": 8, "memory": "ordinary"}
    rows: list[dict[str, Any]] = [
        {**about, "simulated_ranks": ranks, "lengths": list(lengths), "ok": True} for ranks, lengths in ROWS
    ]
    rows[1]["ok"] = False
    rows[2] = {**rows[2], "memory": "long"}
    rows[3] = {**about, "real_ranks": rows[3]["simulated_ranks"], "lengths": rows[3]["lengths"], "ok": True}
    wanted = [lengths for _, lengths in ROWS[1:5]]
    skipped, more, out = (tmp_path / name for name in ("skipped.json", "more.json", "out.json"))
    for path, figures in (
        (skipped, rows[:4] + rows[5:]),
        (more, [{**rows[4], "left_out": "no time left", "ok": False}]),
    ):
        path.write_text(json.dumps({**NUMBERS, "figures": figures}), encoding="utf-8")
    arguments = ["check", "--simulated", "--ops", "gla", "--sizes", "8", "--scale", "100", "--device", "cpu"]
    ran = command(*arguments, "--skip", str(skipped), str(more), "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [tuple(figure["lengths"]) for figure in report["figures"]] == wanted
    assert NUMBERS.items() <= report.items()  # for a --skip of this file
    assert f"{len(ROWS) - len(wanted)} rows are ok already, {len(wanted)} are left" in ran.stderr


@pytest.mark.parametrize(("name", "value"), [("dtype", "bfloat16"), ("scale", 200), ("heads_checked", 1)])
def test_what_was_ok_in_other_numbers_is_no_reason_to_skip(name: str, value: object, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({**NUMBERS, name: value, "figures": []}), encoding="utf-8")
    arguments = ("check", "--simulated", "--scale", "100", "--device", "cpu", "--skip", str(earlier))
    ran = command(*arguments, "--out", str(tmp_path / "out.json"))
    assert ran.returncode == 1
    assert f"has `{name}` {value}, this run {NUMBERS[name]}" in ran.stderr
    ran = command(*arguments, "--out", str(tmp_path / "elsewhere" / ".." / "earlier.json"))
    assert ran.returncode == 2
    assert "its rows would be lost" in ran.stderr


@pytest.mark.parametrize("fault", ["state-lost", "wrong-window", "transition-bf16", "head-offset"])
def test_a_fault_is_not_ok(fault: str) -> None:
    case = row((70, 34))
    with injected(fault):
        found = checked(
            simulate(op("kda"), case, Spread(ranks=4), "cpu", inputs=ordinary_memory(op("kda"), case, "cpu")), None
        )
    assert found["ok"] is False
    assert found["why"]


def test_a_cut_on_a_chunk_border_has_to_be_bit_identical_on_two_ranks() -> None:
    case = row((128,))
    found = simulate(op("gla"), case, Spread(ranks=2), "cpu", inputs=ordinary_memory(op("gla"), case, "cpu"))
    drifted = tuple(replace(figure, equal=figure.tensor != "dq") for figure in found.figures)
    aligned = checked(replace(found, chunk=32, figures=drifted), None)
    assert "cut on a chunk border, but not bit-identical: dq" in aligned["why"]
    assert checked(replace(found, chunk=48, figures=drifted), None)["ok"] is True  # the cut is inside a chunk


def _rows(name: str, count: int) -> Any:
    for number in range(count):
        yield {"name": name, "number": number}
    if name == "raises":
        raise ValueError("no more")
    if name == "dies":
        os._exit(3)


def test_a_worker_that_fails_leaves_a_row_and_the_others_go_on() -> None:
    found = list(on_workers(_rows, [("a", 2), ("raises", 1), ("dies", 0), ("b", 1)], 2))
    assert sorted(row["name"] for row in found if "name" in row) == ["a", "a", "b", "raises"]
    failed = [row["why"][0] for row in found if row.get("ok") is False]
    assert len(failed) == 2
    assert any("no more" in why for why in failed)
    assert any("ended with code 3" in why for why in failed)
