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
import torch
from cp_processes import free_port
from cp_rows import ROOT
from triton.runtime.autotuner import Autotuner

sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "benchmarks"))

import context_parallel
import cp_loop
import cp_time
from cp_workers import Budget

from benchmarks.harness.tuning import Tuning, brief

SMALL = ("--ops", "gla", "--heads", "1", "--width", "8", "--repeats", "2", "--device", "cpu")


def told(script: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [sys.executable, *(("-m", *launcher) if launcher else ()), f"benchmarks/{script}", *arguments],
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


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["context_parallel.py", *arguments, "--tokens", "64", *SMALL, "--out", "none"])
    return context_parallel._arguments()


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

    assert fits.run(subject(10), "one device", 1, lambda: {"peak_bytes": 500}) == {"peak_bytes": 500}
    assert fits.run(subject(20), "one device", 1, lambda: {"peak_bytes": 900}) == {"peak_bytes": 900}
    assert "needs about" in fits.run(subject(30), "one device", 1, lambda: {})["left_out"]
    assert fits.run(subject(30), "2 ranks", 1, lambda: {}) == {}


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


def test_a_loop_of_layers_is_timed_by_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(3 * (1 + cp_loop.LOOPS)))  # when a loop begins, is launched and is done
    monkeypatch.setattr(cp_loop.time, "perf_counter", lambda: next(ticks))
    found = cp_loop.steady(lambda: None, "cpu", 2, lambda: None, layers=5)
    assert (found.host_ms, found.ms) == (1000 / 10, 2000 / 10)


@pytest.mark.parametrize(("layers", "loops"), [(1, (10, 1)), (4, (3, 4)), (16, (1, 16))])
def test_loops_have_about_as_many_layers_whatever_their_depth(layers: int, loops: tuple[int, int]) -> None:
    it: Any = SimpleNamespace(size=2**15)
    chosen: Any = SimpleNamespace(repeats=10)
    assert cp_time.loops_of(chosen, it, "forward+backward", layers) == loops
    assert cp_time.loops_of(chosen, it, "forward", layers) == (10, 1)


class _Noted(torch.autograd.Function):
    """Appends to `seen` what runs, and in which layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[str]) -> torch.Tensor:
        ctx.layer = sum(note.startswith("forward") for note in seen)
        ctx.seen = seen
        seen.append(f"forward {ctx.layer}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.seen.append(f"backward {ctx.layer}")
        return do, None


@pytest.mark.parametrize("layers", [1, 3])
def test_all_forwards_of_layers_come_before_their_backwards(layers: int) -> None:
    seen: list[str] = []
    op: Any = SimpleNamespace(name="any")
    it = cp_time.Subject(op=op, who="kcpgen", function=lambda v: (_Noted.apply(v, seen), None), tokens=1, heads=1)
    inputs = {"v": torch.ones(2, requires_grad=True)}
    (gradient,) = cp_time.calls_of(it, inputs, layers=layers)["forward+backward"]()
    assert torch.equal(gradient, torch.ones(2))
    there = [f"forward {layer}" for layer in range(layers)]
    assert seen == [*there, *(f"backward {layer}" for layer in reversed(range(layers)))]


def test_time_of_layers_on_real_ranks(tmp_path: Path) -> None:
    """What a call sends is told of one layer, however many there are."""
    sent = []
    for layers, more in ((1, ()), (2, ("--rank-layers", "3"))):
        out = tmp_path / f"{layers}.json"
        arguments = ("time", "--tokens", "64", "--layers", str(layers), *more, *SMALL, "--out", str(out))
        launcher = ("torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
        told("context_parallel.py", *arguments, launcher=launcher)
        (figure,) = json.loads(out.read_text(encoding="utf-8"))["figures"]
        assert figure["layers"] == layers
        assert figure.get("rank_layers", 1) == (3 if more else 1)
        assert set(figure["one"]["ms"]) == set(figure["ranks"]["ms"]) == {"forward", "forward+backward"}
        sent.append(figure["ranks"]["sent_bytes"])
    assert sent[0] == sent[1]
    assert sent[0]["forward"] < sent[0]["forward+backward"]


@pytest.mark.parametrize(("more", "order"), [((), ["kcpgen", "fla"]), (("--peers-first",), ["fla", "kcpgen"])])
def test_peers_go_first_where_asked_to(
    more: tuple[str, ...], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = parsed(monkeypatch, "cost", "--peers", *more)
    monkeypatch.setattr(cp_time.cp_peers, "available", lambda name: print)
    monkeypatch.setattr(cp_time.cp_warm, "prepare", lambda chosen, budget, who: {})
    monkeypatch.setattr(cp_time, "_one", lambda chosen, it: {})
    tuner, left = vars(Autotuner)["run"], []

    def measured(chosen: Any, it: cp_time.Subject, ranks: int) -> dict[str, Any]:
        left.append(vars(Autotuner)["run"] is tuner)
        Tuning().install(brief)
        return {}

    figures = list(cp_time._figures(chosen, Budget(0.0), [(2, measured)]))
    assert [figure["who"] for figure in figures] == order
    assert left == [True, True]  # what tunes peers is gone when it is our turn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cost", "--layers", "2"), "--layers is of `time` alone"),
        (("time", "--layers", "0"), "--layers: allowed: an integer of at least 1"),
        (("time", "--peers-first"), "--peers-first needs --peers"),
        (("time", "--skip", "x"), "--skip is of `check` alone"),
        (("time", "--graphs"), "--graphs: allowed: with --device cuda, not cpu"),
        (("cost", "--graphs"), "--graphs is of `time` alone"),
    ],
)
def test_options_that_say_nothing_are_refused(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, *arguments)
    assert said in capsys.readouterr().err


def test_what_calls_keep_the_host_for_is_told_without_a_gpu() -> None:
    stdout = told("host.py", "--ops", "gla", "--calls", "1", "--device", "cpu")
    rows = [line.split() for line in stdout.splitlines()[1:]]
    assert [" ".join(row[:-4]) for row in rows] == [
        "gla, one device",
        *(f"gla, rank {rank} of {size}" for rank, size in ((0, 2), (1, 2), (1, 3))),
    ]
    assert all(row[-4:-2] == ["-", "-"] and float(row[-2]) > 0 for row in rows)


def figure_of(who: str, tokens: int, ms: float, **more: Any) -> dict[str, Any]:
    parts = [{"forward+backward": {"prepare": ms, "gather": 9.0}}, {"forward+backward": {"prepare": ms / 2}}]
    measured = {"ranks": {"parts_ms_by_rank": parts}, "speedup": {"forward": 1.5, "forward+backward": 1.8}}
    return {"op": "gla", "who": who, "T": tokens, "H": 8, **measured, **more}


def test_real_and_simulated_ranks_are_drawn_in_columns_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import cp_plot

    canvases: list[Any] = []
    monkeypatch.setattr(cp_plot.plt, "close", canvases.append)
    real = [figure_of("kcpgen", 4096, 1.0, layers=8), figure_of("kcpgen", 4096, 1.5), figure_of("fla", 500, 2.0)]
    real[2]["speedup"].pop("forward+backward")
    simulated = [figure_of("kcpgen", 1024 * at, 50.0 if at == 1 else at, simulated_ranks=4) for at in (1, 2, 3, 4)]
    for name, ranks, figures in (("real", 2, real), ("simulated", "simulated", [*simulated, {"left_out": "no"}])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"ranks": ranks, "figures": figures}), encoding="utf-8")
    assert cp_plot.plot([tmp_path / "real.json", tmp_path / "simulated.json"], tmp_path / "out.png") == 0
    above, below = canvases[0].axes[:2], canvases[0].axes[2:]
    assert [axis.get_title() for axis in above] == ["gla, 2 ranks", "gla, 4 simulated ranks"]
    assert [label.get_text() for label in below[0].get_yticklabels()] == [
        "1k, H=8",
        "2k, H=8",
        "3k, H=8",
        "4k, H=8, 1 layers",
        "4k, H=8, 8 layers",
    ]
    assert [text.get_text() for text in below[1].texts] == ["59 ms →"]
    assert not below[0].texts


@pytest.mark.parametrize(
    ("lengths", "longest"),
    [
        ([], 0),
        ([5, 60], 60),
        ([4, 5, 12, 5, 105, 7], 12),
        ([5, 8, 17, 7, 6, 31], 31),
        ([4, 5, 105, 5, 320, 7], 7),
        ([1, 4, 13, 40], 13),
    ],
)
def test_a_bar_three_times_the_next_shorter_does_not_set_the_axis(lengths: list[float], longest: float) -> None:
    pytest.importorskip("matplotlib")
    from cp_plot import cut

    assert cut(lengths) == longest
