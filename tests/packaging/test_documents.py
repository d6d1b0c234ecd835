"""What README and docs show is what the project does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kcpgen.cli import main


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_spec_in_the_readme_is_the_one_in_specs(root: Path) -> None:
    assert blocks(root / "README.md", "")[0] == (root / "specs" / "kda.kcp").read_text(encoding="utf-8")


def test_the_readmes_example_runs(root: Path) -> None:
    (example,) = blocks(root / "README.md", "python")
    ran = subprocess.run([sys.executable, "-c", example], cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_demo_runs(root: Path) -> None:
    command = [sys.executable, "examples/demo.py"]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "dinitial_state" in ran.stdout


def test_the_demo_fails_where_a_bound_is_missed(root: Path, tmp_path: Path) -> None:
    demo = (root / "examples" / "demo.py").read_text(encoding="utf-8")
    assert "return 1e-4" in demo
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "demo.py").write_text(
        demo.replace("return 1e-4", "return 1e-9").replace("torch.cuda.is_available()", "False"), encoding="utf-8"
    )
    (tmp_path / "generated").symlink_to(root / "generated")
    command = [sys.executable, str(tmp_path / "examples" / "demo.py")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("too far from the reference: ")


@pytest.mark.parametrize("document", ["README.md", "docs/add_an_op.md"])
def test_links_lead_somewhere(root: Path, document: str) -> None:
    page = root / document
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_following_add_an_op_gives_a_right_op(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, *_ = blocks(root / "docs" / "add_an_op.md", "")
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "two_keys.kcp").write_text(spec, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in (["derive"], ["build"], ["verify", "--device", "cpu"]):
        result = CliRunner().invoke(main, [command[0], "specs/two_keys.kcp", *command[1:]])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "generated" / "two_keys" / "interface.py").is_file()
