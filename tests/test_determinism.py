"""The same bytes under any hash seed, in any directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kcpgen.emit.package import files_on_disk


def build_all(root: Path, output: Path, seed: str) -> dict[str, bytes]:
    specs = [str(path) for path in sorted((root / "specs").glob("*.kcp"))]
    subprocess.run(
        [sys.executable, "-m", "kcpgen", "build", *specs, "-o", str(output)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=root,
        check=True,
        capture_output=True,
    )
    return {name: path.read_bytes() for name, path in files_on_disk(output).items()}


def test_generated_bytes_do_not_depend_on_the_hash_seed(root: Path, tmp_path: Path) -> None:
    first, *others = (build_all(root, tmp_path / seed / "generated", seed) for seed in ("0", "1", "4711"))
    assert first
    for other in others:
        assert other == first
