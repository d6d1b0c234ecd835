"""The command line around `build`: help, version, derive, verify."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from kcpgen import __version__
from kcpgen.derivation.chunk_form import ChunkForm

Command = Callable[..., Result]


def module(*arguments: str, name: str = "kcpgen") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_version_does_not_wait_for_heavy_imports() -> None:
    probe = (
        "import sys; import kcpgen.cli; print([m for m in ('torch', 'sympy', 'lark', 'jinja2') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_it_runs_as_a_module() -> None:
    began = time.monotonic()
    ran = module("--version")
    assert ran.stdout == f"kcpgen, version {__version__}\n"
    assert time.monotonic() - began < 10
    assert module("--version", name="kcpgen.cli").stdout == ran.stdout


@pytest.mark.parametrize("command", ["build", "derive", "verify"])
def test_every_command_has_help(command: str, kcpgen: Command) -> None:
    result = kcpgen(command, "--help")
    assert result.exit_code == 0
    assert "SPEC" in result.stdout


def test_an_unknown_option_is_a_usage_error(kcpgen: Command) -> None:
    assert kcpgen("build", "--chekc", "x.kcp").exit_code == 2


def test_derive_shows_the_chunk_form_and_its_proof(project: Path, kcpgen: Command) -> None:
    text = kcpgen("derive", "my.kcp").stdout
    assert "proof" in text.lower()
    assert json.loads(kcpgen("derive", "my.kcp", "--json").stdout)
    assert "\\" in kcpgen("derive", "my.kcp", "--latex").stdout


def test_derive_fails_when_the_proof_does(project: Path, kcpgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from kcpgen.derivation import proof

    right = proof.prove

    def doubted(form: ChunkForm) -> proof.Proof:
        found = right(form)
        first, *others = found.identities
        return replace(found, identities=(replace(first, holds=False), *others))

    monkeypatch.setattr(proof, "prove", doubted)
    assert kcpgen("derive", "my.kcp").exit_code == 1


def test_derive_reports_a_wrong_spec(project: Path, kcpgen: Command) -> None:
    (project / "my.kcp").write_text("op my\n", encoding="utf-8")
    result = kcpgen("derive", "my.kcp")
    assert result.exit_code == 1
    assert result.stderr.startswith("error")


def test_verify_prints_a_table_and_leaves_nothing_behind(project: Path, kcpgen: Command) -> None:
    result = kcpgen("verify", "my.kcp", "--device", "cpu", "--quick")
    assert result.exit_code == 0, result.output
    *_, summary, remark = result.stdout.splitlines()
    assert "my: " in summary
    assert "TRITON_INTERPRET=1" in remark
    assert "within bounds" in result.stdout
    assert [path.name for path in project.iterdir()] == ["my.kcp"]


def test_verify_writes_figures_with_what_they_were_measured_on(project: Path, kcpgen: Command) -> None:
    assert kcpgen("verify", "my.kcp", "--device", "cpu", "--quick", "--json", "out.json").exit_code == 0
    report = json.loads((project / "out.json").read_text(encoding="utf-8"))
    assert report["ok"] is True
    assert report["machine"]["kcpgen"] == __version__
    assert {"o", "final_state", "dq", "dk", "dv", "dg", "dinitial_state"} == set(report["cases"][0]["figures"])


def test_verify_as_json_prints_nothing_else(project: Path, kcpgen: Command) -> None:
    assert json.loads(kcpgen("verify", "my.kcp", "--device", "cpu", "--quick", "--json", "-").stdout)["op"] == "my"


@pytest.mark.parametrize("directory", ["", "none"])
def test_figures_that_could_not_be_written_are_refused_first(project: Path, kcpgen: Command, directory: str) -> None:
    (project / "out").mkdir()
    result = kcpgen("verify", "my.kcp", "--device", "cpu", "--json", f"{directory}/x" if directory else "out")
    assert result.exit_code == 1
    assert result.stdout.startswith("error: --json is ")
    assert result.stdout.count("\n") == 1


def test_a_package_that_is_not_there(project: Path) -> None:
    for command in (["kcpgen.verify", "--generated", "none"], ["kcpgen.verify.resources", "none"]):
        ran = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        assert ran.returncode == 1
        assert ran.stdout + ran.stderr == f"error: no generated package in {project / 'none'}\n"
