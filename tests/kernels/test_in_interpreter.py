"""Runs the tests beside it in processes of their own: whether Triton interprets kernels is decided as they are defined.

`TRITON_INTERPRET=1 pytest tests/kernels/interpreted` is the same by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("path", sorted(INTERPRETED.glob("test_*.py")), ids=lambda path: path.stem)
def test_interpreted(path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
