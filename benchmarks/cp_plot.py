"""Speedups and parts of what `time` and `cost` measured, drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PARTS = ("prepare", "pre-process", "gather", "merge", "scan", "replay", "reverse", "gradients")


def plot(files: list[Path], out: Path) -> int:
    """Above, speedup over one device; below, the parts of the slowest rank's forward and backward. A column an op."""
    figures = [
        {
            **figure,
            "ranks_": f"{figure['simulated_ranks']} simulated" if "simulated_ranks" in figure else _real(about, figure),
        }
        for path in files
        for about in [json.loads(path.read_text(encoding="utf-8"))]
        for figure in about["figures"]
        if "speedup" in figure
    ]
    ops = sorted({figure["op"] for figure in figures})
    canvas, axes = plt.subplots(2, len(ops), figsize=(5 * len(ops), 8), squeeze=False)
    for column, op in enumerate(ops):
        own = [figure for figure in figures if figure["op"] == op]
        _speedups(axes[0][column], op, own)
        _parts(axes[1][column], [figure for figure in own if figure["who"] == "kcpgen"])
    canvas.tight_layout()
    canvas.savefig(out, dpi=120)
    return 0


def _real(about: dict[str, Any], figure: dict[str, Any]) -> str:
    layers = figure.get("layers", 1)
    return f"{about['ranks']}{f', {layers} layers' if layers > 1 else ''}"


def _speedups(axis: Any, op: str, figures: list[dict[str, Any]]) -> None:
    groups = sorted({(f["who"], f["H"], f["ranks_"]) for f in figures}, key=str)
    for who, heads, ranks in groups:
        same = [f for f in figures if (f["who"], f["H"], f["ranks_"]) == (who, heads, ranks)]
        for kind, style in (("forward", "--"), ("forward+backward", "-")):
            line = sorted((f["T"], f["speedup"][kind]) for f in same if kind in f["speedup"])
            if line:
                axis.plot(*zip(*line, strict=True), style, marker="o", label=f"{who} H={heads} W={ranks} {kind}")
    axis.set_xscale("log", base=2)
    axis.set_title(op)
    axis.set_xlabel("T of the whole row")
    axis.set_ylabel("one device / ranks")
    axis.legend(fontsize=6)


def _parts(axis: Any, figures: list[dict[str, Any]]) -> None:
    labels = [f"T={f['T']} H={f['H']} W={f['ranks_']}" for f in figures]
    left = [0.0] * len(figures)
    for part in PARTS:
        widths = [_slowest(f).get(part, 0.0) for f in figures]
        axis.barh(labels, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("ms, forward+backward, slowest rank")
    axis.legend(fontsize=6)


def _slowest(figure: dict[str, Any]) -> dict[str, float]:
    ranks = [rank["forward+backward"] for rank in figure["ranks"]["parts_ms_by_rank"]]
    return max(ranks, key=lambda parts: sum(ms for part, ms in parts.items() if part != "gather"))
