"""Speedups and parts of what `time` and `cost` measured, drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

PARTS = ("prepare", "pre-process", "gather", "merge", "scan", "replay", "reverse", "gradients")
OURS = "kcpgen"
KINDS = {"forward": ("--", "^"), "forward+backward": ("-", "o")}  # a line's style and its marker's
OUTLIER = 3
Bar = tuple[int, int, int]  # tokens, heads, layers


def plot(files: list[Path], out: Path) -> int:
    """Above, speedup over one device; below, the parts of the slowest rank's forward and backward.

    A column is an op on a number of ranks. The columns share the vertical axes and the legends.
    """
    figures = [
        {**figure, "column_": (figure["op"], *_ranks(about, figure)), "layers": figure.get("layers", 1)}
        for path in files
        for about in [json.loads(path.read_text(encoding="utf-8"))]
        for figure in about["figures"]
        if "speedup" in figure
    ]
    columns = sorted({figure["column_"] for figure in figures})
    tokens = sorted({figure["T"] for figure in figures})
    heads = sorted({figure["H"] for figure in figures})
    colours = dict(zip(heads, plt.get_cmap("plasma")([at / len(heads) for at in range(len(heads))]), strict=True))
    bars = sorted({(f["T"], f["H"], f["layers"]) for f in figures if f["who"] == OURS})
    canvas, axes = plt.subplots(
        2, len(columns), figsize=(2.3 + 2.6 * len(columns), 7), squeeze=False, sharey="row", layout="constrained"
    )
    for (op, ranks, kind), (above, below) in zip(columns, axes.T, strict=True):
        own = [figure for figure in figures if figure["column_"] == (op, ranks, kind)]
        above.set_title(f"{op}, {ranks} {kind}")
        _speedups(above, ranks, own, colours)
        above.set_xscale("log", base=2)
        above.set_xticks(tokens, [_thousands(count) for count in tokens])
        above.set_xlim(tokens[0] / 1.5, tokens[-1] * 1.5)
        above.set_xlabel("tokens of the whole row", fontsize=9)
        _parts(below, bars, [figure for figure in own if figure["who"] == OURS])
    axes[0][0].set_ylabel("speedup over one device")
    axes[0][0].set_ylim(bottom=0)
    axes[1][0].set_yticks(range(len(bars)), _labels(bars))
    axes[1][0].invert_yaxis()
    peers = sorted({figure["who"] for figure in figures} - {OURS})
    canvas.legend(handles=_legend(colours, peers), loc="outside right upper", fontsize=9)
    canvas.legend(*axes[1][0].get_legend_handles_labels(), loc="outside right lower", fontsize=9)
    canvas.savefig(out, dpi=120)
    plt.close(canvas)
    return 0


def cut(lengths: Sequence[float]) -> float:
    """The longest bar the axis has to hold: one that is more than three times as long as the next shorter runs over it,
    with all that are longer. At most half of the bars do, so that one stall hides neither the others nor itself.
    """
    ascending = sorted(lengths)
    upper = ascending[len(ascending) // 2 :]
    for shorter, longer in pairwise(upper):
        if longer > OUTLIER * shorter:
            return shorter
    return max(ascending, default=0.0)


def _ranks(about: dict[str, Any], figure: dict[str, Any]) -> tuple[int, str]:
    if "simulated_ranks" in figure:
        return figure["simulated_ranks"], "simulated ranks"
    return about["ranks"], "ranks"


def _speedups(axis: Any, ranks: int, figures: list[dict[str, Any]], colours: dict[int, Any]) -> None:
    """A line for each implementation, heads, layers and kind of call, heads a little beside each other: equal speedups
    would hide one another. Across all: one device, and what so many ranks could give."""
    for reference, style in ((1, ":"), (ranks, "-")):
        axis.axhline(reference, color="grey", linestyle=style, linewidth=1, zorder=1)
    beside = {heads: 2 ** (0.15 * (at - (len(colours) - 1) / 2)) for at, heads in enumerate(colours)}
    for who, heads, layers in sorted({(f["who"], f["H"], f["layers"]) for f in figures}):
        same = [f for f in figures if (f["who"], f["H"], f["layers"]) == (who, heads, layers)]
        for kind, (style, marker) in KINDS.items():
            line = sorted((f["T"] * beside[heads], f["speedup"][kind]) for f in same if kind in f["speedup"])
            face = colours[heads] if who == OURS else "white"
            if line:
                axis.plot(*zip(*line, strict=True), style, marker=marker, color=colours[heads], mfc=face)


def _parts(axis: Any, bars: list[Bar], figures: list[dict[str, Any]]) -> None:
    """A bar a figure, a colour a part. Where a bar runs over the axis its length is written."""
    at = [bars.index((f["T"], f["H"], f["layers"])) for f in figures]
    left = [0.0] * len(figures)
    for part in PARTS:
        widths = [_slowest(f).get(part, 0.0) for f in figures]
        axis.barh(at, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("ms, slowest rank", fontsize=9)
    longest = cut(left)
    axis.set_xlim(0, 1.1 * longest or 1)
    for row, length in zip(at, left, strict=True):
        if length > longest:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axis.text(1.07 * longest, row, f"{length:.0f} ms →", ha="right", va="center", fontsize=9, bbox=box)


def _slowest(figure: dict[str, Any]) -> dict[str, float]:
    ranks = [rank["forward+backward"] for rank in figure["ranks"]["parts_ms_by_rank"]]
    return max(ranks, key=lambda parts: sum(ms for part, ms in parts.items() if part != "gather"))


def _labels(bars: list[Bar]) -> list[str]:
    """Layers are told only where nothing else tells two bars apart."""
    shapes = [(tokens, heads) for tokens, heads, _ in bars]
    return [
        f"{_thousands(tokens)}, H={heads}" + (f", {layers} layers" if shapes.count((tokens, heads)) > 1 else "")
        for tokens, heads, layers in bars
    ]


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _legend(colours: dict[int, Any], peers: list[str]) -> list[Line2D]:
    """What colour, style and marker mean, each by itself: all their combinations would be some twenty entries."""

    def entry(label: str, style: Any = "", marker: str = "", **more: Any) -> Line2D:
        return Line2D([], [], linestyle=style, marker=marker, label=label, **{"color": "black", **more})

    return [
        *(entry(f"H={heads}", "-", color=colour, linewidth=4) for heads, colour in colours.items()),
        *(entry(kind, style, marker) for kind, (style, marker) in KINDS.items()),
        entry(f"filled: {OURS}", marker="s"),
        *(entry(f"hollow: {peer}", marker="s", mfc="white") for peer in peers),
        entry("all ranks (perfect)", "-", color="grey", linewidth=1),
        entry("one device", ":", color="grey", linewidth=1),
    ]
