"""`kcpgen simulate` finds the faults that context parallelism is known for, and says where each of them is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cp_rows import ROOT, op, row

from kcpgen.runtime.checks import MAX_STATE
from kcpgen.simulate.arguments import FAULT_NAMES, MAX_WIDTH, parser
from kcpgen.simulate.call import Spread
from kcpgen.simulate.command import Request, run
from kcpgen.simulate.compare import Comparison, Figure, simulate
from kcpgen.simulate.faults import FAULTS, injected
from kcpgen.simulate.verdict import Verdict, cuts_on_chunks, judge


def verdict(name: str, ranks: int, lengths: tuple[int, ...], fault: str | None = None) -> Verdict:
    with injected(fault):
        return judge(simulate(op(name), row(lengths), Spread(ranks=ranks), "cpu"))


@pytest.mark.parametrize("name", ["kda", "gla", "delta_rule"])
def test_no_fault(name: str) -> None:
    assert verdict(name, 4, (70, 34)).kind == "agrees"


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("state-lost", "saved state", "differ on ranks 1, 2, 3, all of which received a state"),
        ("transition-bf16", "transition", "differ on rank 2, behind an interior rank"),
        ("wrong-window", "window", "differ on rank 3, behind ranks with several sequences"),
        ("head-offset", "heads", "head 0 is right"),
        ("summary-drift", "summary", "look at S_ext"),
    ],
)
@pytest.mark.parametrize("name", ["kda", "dplr", "gla"])
def test_faults(name: str, fault: str, kind: str, words: str) -> None:
    found = verdict(name, 4, (70, 34), fault)
    assert (found.kind, found.ok) == (kind, False), found
    assert words in found.text


def test_every_fault_is_listed() -> None:
    assert tuple(FAULTS) == FAULT_NAMES


def test_widths_end_where_those_of_ops_do() -> None:
    assert MAX_WIDTH == MAX_STATE


def comparison(**changes: object) -> Comparison:
    """A made-up one: ranks equal to one device unless changed."""
    numbers = {"cp_to_one": 0.0, "one_to_naive": 2e-3, "cp_to_naive": 2e-3, "equal": True, "bound": 5e-3, **changes}
    figure = Figure(tensor="o", sequence=0, worst_token=3, worst_rank=1, ranks=(0.0, 0.0), heads=(0.0,), **numbers)  # type: ignore[arg-type]
    return Comparison(
        op=op("gla"),
        case=row((128,), backend="triton", dtype="bfloat16"),
        spread=Spread(ranks=2),
        bounds=(0, 64, 128),
        chunk=32,
        figures=(figure,),
    )


def test_noise_of_the_chunked_form_is_not_blamed_on_ranks() -> None:
    assert judge(comparison()).kind == "agrees"
    assert judge(comparison(one_to_naive=9e-3, cp_to_naive=9e-3)).kind == "noise"
    assert judge(comparison(equal=False, cp_to_one=1e-6)).kind == "kernel"
    assert judge(comparison(equal=False, cp_to_one=float("nan"), cp_to_naive=float("nan"))).kind == "summary"


def test_cuts_are_counted_from_where_a_sequence_begins() -> None:
    """Lengths 400 and 624 on two ranks: the cut at 512 is 112 tokens into the second sequence."""
    found = comparison()
    for lengths, bounds, chunk, aligned in [
        ((400, 624), (0, 512, 1024), 16, True),
        ((400, 624), (0, 512, 1024), 64, False),
        ((1024,), (0, 512, 1024), 64, True),
        ((512, 0, 512), (0, 512, 1024), 64, True),
    ]:
        case = row(lengths, backend="triton")
        changed = Comparison(**{**vars(found), "case": case, "bounds": bounds})
        assert cuts_on_chunks(changed, chunk) is aligned


def command(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    return subprocess.run(
        [sys.executable, "-m", "kcpgen", "simulate", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_command(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    row_ = ["specs/gla.kcp", "--ranks", "4", "--lengths", "70,34", "--key-width", "16", "--value-width", "16"]
    ran = command(*row_, "--json", str(figures))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "verdict: agrees" in ran.stdout
    assert "cut at 26, 52, 78" in ran.stdout
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found["verdict"] == "agrees"
    assert {f["tensor"] for f in found["figures"]} == {"o", "final_state", "dq", "dk", "dv", "dg", "dinitial_state"}
    ran = command(*row_, "--inject", "state-lost")
    assert ran.returncode == 1
    assert "verdict: saved state" in ran.stdout


def test_command_refuses_what_the_context_refuses() -> None:
    ran = command("specs/gla.kcp", "--ranks", "3", "--lengths", "70,34")
    assert ran.returncode == 1
    assert "104 tokens do not divide into 3 equal shards" in ran.stdout
    assert command("specs/gla.kcp", "--ranks", "3", "--lengths", "70;34").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", "0"), "--ranks: '0'; allowed: an integer of at least 1"),
        (("--ranks", "-1"), "--ranks: '-1'; allowed: an integer of at least 1"),
        (("--ranks", "2", "--key-width", "0"), "--key-width: '0'; allowed: an integer from 1 to 256"),
        (("--ranks", "2", "--value-heads", "x"), "--value-heads: 'x'; allowed: an integer of at least 1"),
    ],
)
def test_a_number_out_of_range_is_named_in_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parser("simulate", "").parse_args(["--lengths", "128", *arguments])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"simulate: error: argument {said}\n"


def test_what_cannot_be_simulated_is_said_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Request(ranks=2, lengths=(128,), device="cpu")
    for request, said in [
        (replace(asked, value_heads=3), "error: --value-heads is 3; allowed: a multiple of --heads, 2\n"),
        (replace(asked, json_path=Path("none/x")), "error: --json is none/x, but there is no directory none\n"),
        (asked, "error: no generated package in "),
    ]:
        assert run(Path("none"), request) == 1
        assert capsys.readouterr().out.startswith(said)
