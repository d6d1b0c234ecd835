"""Generated source laid out by ruff, pinned to one version: templates need not care about line breaks or imports."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

LINE_LENGTH = 120
_OPTIONS = ["--isolated", "--no-cache", f"--line-length={LINE_LENGTH}", "--target-version=py310"]


class UnformattableError(Exception):
    """A template produced text that is not Python: a fault of the compiler, never of a spec."""


def format_sources(sources: Mapping[str, str]) -> dict[str, str]:
    """The same files, without unused imports and formatted. Raises UnformattableError with ruff's message."""
    with tempfile.TemporaryDirectory(prefix="kcpgen-") as scratch:
        for name, text in sources.items():
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        _ruff("check", "--select=F401", "--fix", directory=scratch)
        _ruff("format", directory=scratch)
        return {name: Path(scratch, name).read_text(encoding="utf-8") for name in sources}


def _ruff(command: str, *options: str, directory: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "ruff", command, *_OPTIONS, *options, "."],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise UnformattableError(f"generated text is not Python:\n{(ran.stdout + ran.stderr).strip()}")
