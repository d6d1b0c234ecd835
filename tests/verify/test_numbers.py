"""Every spec of the repository against its per-token reference: eager in float64, kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_op_agrees_with_its_reference(spec_path: Path, root: Path) -> None:
    package = Path("generated", spec_path.stem)
    ran = subprocess.run(
        [sys.executable, "-m", "kcpgen.verify", "--generated", package, "--device", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Triton's interpreter" in ran.stdout
