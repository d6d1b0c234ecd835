"""Generated source laid out by ruff, pinned to one version, so that templates need not care about line breaks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

LINE_LENGTH = 120
_COMMAND = [sys.executable, "-m", "ruff", "format", "--isolated", "--no-cache"]
_OPTIONS = [f"--line-length={LINE_LENGTH}", "--target-version=py310"]


class UnformattableError(Exception):
    """A template produced text that is not Python: a fault of the compiler, never of a spec."""


def format_sources(sources: Mapping[str, str]) -> dict[str, str]:
    """The same files, formatted; one ruff process for all of them. Raises UnformattableError with ruff's message."""
    with tempfile.TemporaryDirectory(prefix="kcpgen-") as scratch:
        for name, text in sources.items():
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        ran = subprocess.run([*_COMMAND, *_OPTIONS, "."], cwd=scratch, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise UnformattableError(f"generated text is not Python:\n{ran.stderr.strip()}")
        return {name: Path(scratch, name).read_text(encoding="utf-8") for name in sources}
