"""The whole run, but for the device: what counts, what does not, what is written down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import speed
from benchmarks.harness import calls, measure, record, tables
from benchmarks.harness.agreement import window_of
from benchmarks.harness.device import DeviceLostError, foreign_kernels, triton_names
from benchmarks.harness.floor import Rates, products, work_of
from benchmarks.harness.inputs import draw
from benchmarks.harness.shapes import parse
from kcpgen.runtime import hopper
from kcpgen.runtime.launch import choose_tiles
from kcpgen.runtime.split import asked_for
from kcpgen.verify.op import load_op

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["--ops", "gdn", "--shapes", "1x70x2:16", "--rounds", "2"]


@pytest.fixture
def gdn_peer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """fla, made of our per-token reference; FlashQLA is absent."""
    naive = load_op(ROOT / "generated" / "gdn").naive
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = lambda **k: naive(**k)  # type: ignore[attr-defined]
    for entry in calls.FLA.entries.values():
        monkeypatch.setitem(sys.modules, entry.module, ModuleType(entry.module))
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    return module


def rows_of(path: Path) -> dict[tuple[str, str], record.Row]:
    return {(row.implementation, row.direction): row for row in record.read(path).rows}


def test_a_run_writes_json_a_table_and_a_picture(
    faked_device: SimpleNamespace, gdn_peer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    faked_device.ms = {"kcpgen": 2.0, "fla": 5.0}
    out, picture = tmp_path / "new" / "run.json", tmp_path / "run.png"
    assert speed.main([*SMALL, "--json", str(out), "--plot", str(picture), "--kernels"]) == 0
    rows = rows_of(out)
    assert {row.status for row in rows.values()} == {"ok"}
    assert len(rows) == 4
    ours, theirs = rows["kcpgen", "training"], rows["fla", "training"]
    assert (ours.ms, tables.ratio(theirs, ours)) == (2.0, 2.5)
    assert set(ours.errors) == {"o (timed)", "o", "dq", "dk", "dv", "dg", "dbeta"}
    assert set(theirs.errors) == {"o (timed)", *(f"d{name} (ours)" for name in ("q", "k", "v", "g", "beta"))}
    assert picture.stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "FlashQLA is absent" in printed
    assert "scan_kernel 0.500" in printed
    assert speed.main(["--from", str(out), "--plot", str(picture)]) == 0
    assert "2.50" in capsys.readouterr().out


def test_a_picture_shows_each_shape_once_whatever_the_rows_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def row(shape: str, implementation: str, ms: float) -> record.Row:
        return record.Row(
            op="kda", shape=shape, gates="open", direction="forward", implementation=implementation, status="ok", ms=ms
        )

    slower = [row("1x64x2", "kcpgen", 2.0), row("1x64x2", "fla", 5.0)]
    faster = [row("2x64x2", "kcpgen", 3.0), row("2x64x2", "fla", 1.0)]
    alone = [row("1x64x2", "kcpgen", 4.0)]
    headings, placed, end = tables._places([slower, faster, alone])
    assert headings == [(0, "1x64x2"), (3.25, "2x64x2")]
    assert placed == [(1.5, slower), (2.5, alone), (4.75, faster)]
    assert end == 5.5
    for rows in (slower + faster, alone, []):
        picture = tmp_path / f"{len(rows)}.png"
        tables.plot(record.Record(environment={}, rows=rows), picture)
        assert picture.stat().st_size > 1000


def test_what_disagrees_with_the_reference_does_not_count(
    faked_device: SimpleNamespace, gdn_peer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = measure.our_call

    def wrong(*arguments: Any) -> Callable[[], Any]:
        call = right(*arguments)
        return lambda: (1.02 * call()[0], None)

    monkeypatch.setattr(measure, "our_call", wrong)
    out = tmp_path / "run.json"
    assert speed.main([*SMALL, "--directions", "forward", "--json", str(out)]) == 1
    rows = rows_of(out)
    assert rows["kcpgen", "forward"].status == "wrong"
    assert "o (timed) 2.0e-02" in rows["kcpgen", "forward"].message
    assert tables.ratio(rows["fla", "forward"], rows["kcpgen", "forward"]) is None


def test_a_gradient_that_is_not_finite_does_not_count(
    faked_device: SimpleNamespace, gdn_peer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = measure._training

    def spoilt(*arguments: Any) -> measure.Result:
        found = right(*arguments)
        found.gradients["g"][0, -1, 0] = torch.inf
        return found

    monkeypatch.setattr(measure, "_training", spoilt)
    out = tmp_path / "run.json"
    assert speed.main([*SMALL, "--no-peers", "--json", str(out)]) == 1
    assert rows_of(out)["kcpgen", "forward"].status == "ok"
    assert rows_of(out)["kcpgen", "training"].message == "dg (timed) nan > 8e-03"


def test_a_peer_that_computes_something_else_does_not_count(
    faked_device: SimpleNamespace, gdn_peer: ModuleType, tmp_path: Path
) -> None:
    right = gdn_peer.chunk_gated_delta_rule
    gdn_peer.chunk_gated_delta_rule = lambda **k: right(**{**k, "g": 0.5 * k["g"]})  # type: ignore[attr-defined]
    out = tmp_path / "run.json"
    assert speed.main([*SMALL, "--json", str(out)]) == 0
    rows = rows_of(out)
    assert {rows["fla", direction].status for direction in speed.DIRECTIONS} == {"wrong"}


def test_a_peer_that_refuses_is_reported_and_ours_is_timed(
    faked_device: SimpleNamespace, gdn_peer: ModuleType, tmp_path: Path
) -> None:
    def refuses(**keywords: Any) -> Any:
        raise RuntimeError("install something else\nand more")

    gdn_peer.chunk_gated_delta_rule = refuses  # type: ignore[attr-defined]
    out = tmp_path / "run.json"
    assert speed.main([*SMALL, "--json", str(out)]) == 0
    rows = rows_of(out)
    assert (rows["fla", "training"].status, rows["fla", "training"].ms) == ("failed", None)
    assert rows["fla", "training"].message == "RuntimeError: install something else"
    assert rows["kcpgen", "training"].status == "ok"


def test_a_kernel_of_another_backend_is_named(
    faked_device: SimpleNamespace, gdn_peer: ModuleType, tmp_path: Path
) -> None:
    faked_device.kernels = {"scan_kernel": 0.5, "main_kernel": 0.2}
    out = tmp_path / "run.json"
    assert speed.main([*SMALL, "--directions", "forward", "--json", str(out)]) == 1
    row = rows_of(out)["fla", "forward"]
    assert (row.status, row.message) == ("other kernels", "other kernels ran: main_kernel")


def test_a_lost_device_ends_the_run_with_what_there_is(
    faked_device: SimpleNamespace, gdn_peer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(**keywords: Any) -> Any:
        raise DeviceLostError("illegal memory access")

    out = tmp_path / "run.json"
    found = measure.measure
    monkeypatch.setattr(
        "benchmarks.harness.session.measure",
        lambda problem, direction, protocol: found(problem, direction, protocol) if direction == "forward" else lost(),
    )
    assert speed.main([*SMALL, "--json", str(out)]) == 3
    assert set(rows_of(out)) == {("kcpgen", "forward"), ("fla", "forward")}


def test_nothing_new_is_started_when_time_is_up(
    faked_device: SimpleNamespace, gdn_peer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    assert speed.main([*SMALL, "--budget-s", "5", "--json", str(out)]) == 0
    assert record.read(out).rows == []
    assert "no time left for gdn 1x70x2:16 open" in capsys.readouterr().out


def test_the_default_list_covers_the_shapes_and_groups_heads_where_a_peer_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert speed.main(["--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if "16/32" in line} == {"gdn"}
    assert {line.split()[2] for line in lines if line.startswith("kda")} == {"open", "bounded"}
    assert "dplr [1300,547,2048,963,271,3063]x64 open training" in lines
    assert "gla 1x131072x8 open forward" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ops", "gdn,nothing", "--dry-run"], "no package nothing in"),
        (["--shapes", "8192"], "is no shape"),
        (["--directions", "sideways"], "choose from forward, training"),
        (["--rounds", "0"], "not positive"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        speed.main(arguments)
    assert said in f"{ended.value.code}{capsys.readouterr().err}"


def test_without_a_device_it_says_so() -> None:
    command = [sys.executable, "benchmarks/speed.py", *SMALL]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not torch.cuda.is_available():
        assert (ran.returncode, ran.stderr) == (2, "error: no CUDA device here (--dry-run lists what would be run)\n")


def test_the_floor_counts_every_tensor_once_and_every_product() -> None:
    op = load_op(ROOT / "generated" / "gdn")
    arguments = draw(op, parse("1x100x2"), "open", "cpu")
    forward, training = (work_of(op, arguments, direction) for direction in speed.DIRECTIONS)
    per_token_head = 4 * 128 * 2 + 4 + 2  # q, k, v, o; g in float32; beta
    assert forward.bytes == 200 * per_token_head
    assert training.bytes == 200 * (per_token_head + 3 * 256 + 4 + 2 + 256 + 3 * 256 + 4 + 2)
    assert (products(op), forward.flops) == (3, 200 * 3 * 2 * 128 * 128)
    assert forward.floor_ms(Rates(copy=1e9, matmul=1e15)) == pytest.approx(forward.bytes / 1e6)
    assert forward.floor_ms(Rates(copy=1e15, matmul=1e9)) == pytest.approx(forward.flops / 1e6)


def test_two_terms_make_more_products() -> None:
    assert {name: products(load_op(ROOT / "generated" / name)) for name in ("gla", "dplr")} == {"gla": 2, "dplr": 4}


def test_the_window_is_where_strides_and_offsets_count() -> None:
    packed, batch = window_of(parse("[130,50,10]x2")), window_of(parse("4x300x2"))
    assert (packed.row, packed.start, packed.stop) == (0, 130, 180)
    assert (batch.row, batch.start, batch.stop) == (3, 0, 96)
    x = torch.empty(4, 300, 2, 16)
    assert batch.of(x).stride() == x.stride()


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ({"a_kernel": 1.0, "void at::native::copy": 1.0, "nvjet_tst_128x256": 1.0}, ""),
        ({"void at::native::copy": 1.0}, "none of its Triton kernels ran"),
        ({"a_kernel": 1.0, "tl_main": 1.0}, "other kernels ran: tl_main"),
        ({}, "but nothing"),
    ],
)
def test_kernels_are_told_apart_by_name(found: dict[str, float], fault: str) -> None:
    said = foreign_kernels(found, {"a_kernel"})
    assert fault in said
    assert bool(said) is bool(fault)


def test_triton_kernels_of_an_op_are_known_by_name() -> None:
    load_op(ROOT / "generated" / "gdn")
    __import__("kcpgen_verified_gdn.autograd")
    assert "scan_kernel" in triton_names(["kcpgen_verified_gdn"])


def test_numbers_in_json_are_short_and_never_nan() -> None:
    row = record.Row(
        op="a", shape="s", gates="open", direction="forward", implementation="i", status="ok",
        ms=1.23456789, errors={"o": float("nan")},
    )  # fmt: skip
    text = record.Record(environment={}, rows=[row]).as_json()
    assert json.loads(text)["rows"][0]["ms"] == 1.2346
    assert "NaN" not in text
    assert "nan" in text


def test_it_runs_where_the_compiler_is_not_installed() -> None:
    script = """
import sys
for name in ("click", "lark", "sympy", "jinja2", "ruff", "rich"):
    sys.modules[name] = None
from benchmarks import speed
import benchmarks.harness.session, benchmarks.harness.cold
sys.exit(speed.main(["--ops", "gdn", "--shapes", "1x64x2", "--dry-run"]))
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_what_ran_in_segments_is_compared_with_whole_sequences(
    faked_device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run whose results depend on the segments does not count, although its window is right."""
    faked_device.kernels |= {"fold_kernel": 0.1}
    monkeypatch.setattr(measure.device, "triton_names", lambda prefixes: set(faked_device.kernels))
    arguments = [*SMALL, "--no-peers", "--segments", "4", "--json", str(tmp_path / "run.json")]
    assert speed.main(arguments) == 0
    row = rows_of(tmp_path / "run.json")["kcpgen", "training"]
    assert {row.errors[f"{name} (whole)"] for name in ("o", "dq", "dk", "dv", "dg", "dbeta")} == {0.0}

    training = measure._training

    def drifting(*whatever: Any) -> measure.Result:
        found = training(*whatever)
        found.gradients["k"] = found.gradients["k"] * (1.0 if asked_for(None) == 1 else 1.1)
        return found

    monkeypatch.setattr(measure, "_training", drifting)
    assert speed.main(arguments) == 1
    row = rows_of(tmp_path / "run.json")["kcpgen", "training"]
    assert row.status == "wrong"
    assert "dk (whole)" in row.message


def test_a_plot_without_what_draws_it_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "find_spec", lambda name: None)
    assert speed.main(["--plot", "x.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "roles"), [([], True), (["--portable"], False)])
def test_serial_kernels_in_roles_can_be_left_out(
    asked: list[str], roles: bool, faked_device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hopper, "_on_hopper", lambda device: True)
    training, found = measure._training, []
    tiles = choose_tiles(keys=16, values=16, decay="scalar", terms=1, dtype=torch.bfloat16)

    def observed(*whatever: Any) -> measure.Result:
        found.append(hopper.settled(tiles, torch.device("cpu")).scan.roles)
        return training(*whatever)

    monkeypatch.setattr(measure, "_training", observed)
    assert speed.main([*SMALL, *asked, "--no-peers", "--json", str(tmp_path / "run.json")]) == 0
    assert set(found) == {roles}
