"""Comparisons for people, a row a case as soon as it is there, and for machines, as JSON with what they ran on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kcpgen import __version__
from kcpgen.verify.compare import Comparison, Figure
from kcpgen.verify.op import Op

LABEL = 46
SHORT = {"final_state": "state", "dinitial_state": "dstate"}


def unwritable(path: Path | None) -> str:
    """Why figures cannot be written to `path`, found before the minutes that they take; "" where they can."""
    if path is None or path == Path("-"):
        return ""
    if path.is_dir():
        return f"--json is {path}, a directory; allowed: a file, or - for stdout"
    if not path.parent.is_dir():
        return f"--json is {path}, but there is no directory {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"--json is {path}, which cannot be written"
    return ""


def heading(tensors: Sequence[str]) -> str:
    return " " * LABEL + "".join(f"{SHORT.get(name, name):>{_width(name)}}" for name in tensors)


def row(comparison: Comparison, tensors: Sequence[str]) -> str:
    """Errors under their tensors' names, one over its bound marked `!`."""
    label = f"{comparison.case.label[: LABEL - 2]:<{LABEL}}"
    if comparison.failure:
        return f"{label}failed: {comparison.failure}"
    figures = {figure.tensor: figure for figure in comparison.figures}
    return label + "".join(_cell(figures.get(name), _width(name)) for name in tensors)


def _cell(figure: Figure | None, width: int) -> str:
    if figure is None:
        return " " * width
    text = f"{figure.error:.1e}" + ("" if figure.ok else "!")
    return f"{text:>{width}}"


def _width(name: str) -> int:
    return max(9, len(SHORT.get(name, name)) + 2)


def summary(comparisons: Sequence[Comparison]) -> str:
    """One line: how many cases, and either the tightest margin or which cases missed their bounds."""
    bad = [comparison.case.label for comparison in comparisons if not comparison.ok]
    if bad:
        return f"{len(bad)} of {len(comparisons)} cases MISSED: {', '.join(bad)}"
    figures = [(figure, comparison) for comparison in comparisons for figure in comparison.figures]
    figure, comparison = max(figures, key=lambda pair: pair[0].error / pair[0].bound)
    closest = f"closest: {figure.tensor} {figure.error:.1e} of {figure.bound:.0e} in {comparison.case.label!r}"
    return f"{len(comparisons)} cases within bounds; {closest}"


def as_json(op: Op, device: str, comparisons: Iterable[Comparison]) -> str:
    """A JSON object, a line for each case."""
    cases = [_case(comparison) for comparison in comparisons]
    about = {
        "op": op.name,
        "generated_sha256": digest(op.directory),
        "machine": machine(device),
        "ok": all(case["ok"] for case in cases),
    }
    head = json.dumps(about, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(case, allow_nan=False) for case in cases)
    return f'{head},\n "cases": [\n{lines}\n ]\n}}\n'


def _case(comparison: Comparison) -> dict[str, Any]:
    figures = {figure.tensor: _figure(figure) for figure in comparison.figures}
    return {
        **asdict(comparison.case),
        "ok": comparison.ok,
        **({"failure": comparison.failure} if comparison.failure else {"figures": figures}),
    }


def _figure(figure: Figure) -> Mapping[str, float | str]:
    values = {
        "error": figure.error,
        "bound": figure.bound,
        "worst_sequence": figure.worst_sequence,
        "floor": figure.floor,
    }
    return {name: _significant(value) for name, value in values.items() if value is not None}


def _significant(value: float) -> float | str:
    """Three digits; JSON knows no NaN."""
    return float(f"{value:.2e}") if math.isfinite(value) else str(value)


def machine(device: str) -> dict[str, str]:
    """Names and versions of what the figures were measured on."""
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu ({platform.machine()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "kcpgen": __version__,
    }
    return {**found, "cuda": str(torch.version.cuda)} if device == "cuda" else found


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def digest(directory: Path) -> str:
    """Of every generated file: with it, figures can be traced to the source they belong to."""
    found = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        found.update(f"{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def say(line: str) -> None:
    print(line, flush=True, file=sys.stdout)
