"""The wheel in an empty environment, used from a directory of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

SPEC = """\
op memory "Outer-product memory"
token q, k : [H, K]
token v    : [HV, V]
state S : [HV, K, V]
S[t] = S[t-1] + k[t] v[t]^T
o[t] = scale S[t]^T q[t]
"""
USE = """
import sys, torch
sys.path.insert(0, ".")
import kcpgen
from my_ops.memory import chunk_memory, naive_recurrent_memory
assert "site-packages" in kcpgen.__file__, kcpgen.__file__
x = [torch.randn(1, 70, 2, 8, dtype=torch.float64) for _ in range(3)]
torch.testing.assert_close(chunk_memory(*x)[0], naive_recurrent_memory(*x)[0])
"""


def run(*command: str | Path, cwd: Path) -> str:
    ran = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(__file__).resolve().parent.parent.parent
    output = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", output, root, cwd=output)
    (found,) = output.glob("kcpgen-*.whl")
    return found


@pytest.fixture(scope="module")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with only the wheel in it; its dependencies are lent by the environment of the tests."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (home / "bin" / "ruff").symlink_to(Path(sysconfig.get_path("scripts"), "ruff"))
    return home


def test_the_wheel_ships_templates_and_specs(wheel: Path, root: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    for folder, place in (("templates", "kcpgen/templates"), ("specs", "kcpgen/examples")):
        for path in (root / folder).rglob("*"):
            if path.is_file():
                assert f"{place}/{path.relative_to(root / folder).as_posix()}" in shipped


def test_the_wheel_ships_what_was_tuned(wheel: Path, root: Path) -> None:
    shipped = zipfile.ZipFile(wheel).read("kcpgen/runtime/tuned.json")
    assert shipped == (root / "kcpgen" / "runtime" / "tuned.json").read_bytes()


def test_it_builds_an_op_from_another_directory(empty_environment: Path, tmp_path: Path) -> None:
    (tmp_path / "my.kcp").write_text(SPEC, encoding="utf-8")
    command = empty_environment / "bin" / "kcpgen"
    assert run(command, "build", "my.kcp", "-o", "my_ops", cwd=tmp_path).startswith("my.kcp -> my_ops/memory: ")
    run(command, "build", "--check", "my.kcp", "-o", "my_ops", cwd=tmp_path)
    run(empty_environment / "bin" / "python", "-c", USE, cwd=tmp_path)
    assert "within bounds" in run(command, "verify", "my.kcp", "--quick", "--device", "cpu", cwd=tmp_path)
