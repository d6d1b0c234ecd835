"""The comparison that everything rests on can fail: a wrong sign, planted in a copy of the compiler, is caught."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DERIVATION = [
    ("kcpgen/derivation/chunk_form.py", 'total += block("W", j) * S', 'total -= block("W", j) * S'),
    ("kcpgen/derivation/chunk_form.py", 'block("q_in") * S + sympy.Add', 'block("q_in") * S - sympy.Add'),
    ("kcpgen/derivation/words.py", "else left.value - right.value", "else left.value + right.value"),
    ("kcpgen/emit/columns.py", "combine = add if isinstance(matrix, Sum) else subtract", "combine = add"),
]
KERNELS = [
    ("templates/decay/pairs_vector.py.jinja", "d_{{ column }} += {{ decay", "d_{{ column }} -= {{ decay"),
    ("templates/decay/scores_vector.py.jinja", "to_edge = tl.exp2(edge - G)", "to_edge = tl.exp2(G - edge)"),
    ("templates/decay/gradients_vector.py.jinja", "reverse=True) - dG_block", "reverse=True) + dG_block"),
    ("templates/states.py.jinja", "+= tl.load(checkpoints_ptr", "-= tl.load(checkpoints_ptr"),
    ("templates/scan.py.jinja", "+= tl.load(initial_state_ptr", "-= tl.load(initial_state_ptr"),
    ("templates/reverse.py.jinja", "+= tl.load(final_state", "-= tl.load(final_state"),
]


def verify(tree: Path, *, interpret: bool) -> subprocess.CompletedProcess[str]:
    """`kcpgen verify` of one op by the compiler in `tree`; the interpreter stands in for a GPU where asked for."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-m", "kcpgen", "verify", "specs/kda.kcp", "--quick", "--device", "cpu"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(root: Path, tmp_path: Path) -> Path:
    for folder in ("kcpgen", "templates", "specs"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def plant(tree: Path, file: str, right: str, wrong: str) -> None:
    text = (tree / file).read_text(encoding="utf-8")
    assert right in text, f"{file}: what this mutation changes is gone; choose something else"
    (tree / file).write_text(text.replace(right, wrong), encoding="utf-8")


def test_the_copy_itself_is_right(tree: Path) -> None:
    ran = verify(tree, interpret=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(("file", "right", "wrong"), DERIVATION)
def test_a_wrong_sign_in_a_derivation_is_caught(tree: Path, file: str, right: str, wrong: str) -> None:
    plant(tree, file, right, wrong)
    ran = verify(tree, interpret=False)
    assert (ran.returncode, "MISSED" in ran.stdout) == (1, True), ran.stdout + ran.stderr


@pytest.mark.parametrize(("file", "right", "wrong"), KERNELS)
def test_a_wrong_sign_in_a_kernel_template_is_caught(tree: Path, file: str, right: str, wrong: str) -> None:
    plant(tree, file, right, wrong)
    ran = verify(tree, interpret=True)
    assert (ran.returncode, "MISSED" in ran.stdout) == (1, True), ran.stdout + ran.stderr
