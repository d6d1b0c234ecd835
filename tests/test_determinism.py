"""The same bytes under any hash seed, in any directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kcpgen.emit.package import files_on_disk


def kcpgen(root: Path, seed: str, *arguments: str) -> bytes:
    command, environment = [sys.executable, "-m", "kcpgen", *arguments], {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(command, env=environment, cwd=root, check=True, capture_output=True).stdout


def build_all(root: Path, output: Path, seed: str) -> dict[str, bytes]:
    specs = [str(path) for path in sorted((root / "specs").glob("*.kcp"))]
    kcpgen(root, seed, "build", *specs, "-o", str(output))
    return {name: path.read_bytes() for name, path in files_on_disk(output).items()}


def test_generated_bytes_do_not_depend_on_the_hash_seed(root: Path, tmp_path: Path) -> None:
    first, *others = (build_all(root, tmp_path / seed / "generated", seed) for seed in ("0", "1", "4711"))
    assert first
    for other in others:
        assert other == first


def test_a_derivation_reads_the_same_under_any_hash_seed(root: Path) -> None:
    texts = {kcpgen(root, seed, "derive", "specs/dplr.kcp", "--json") for seed in ("0", "1", "4711")}
    assert len(texts) == 1
