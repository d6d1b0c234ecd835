"""A run as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.calls import OURS
from benchmarks.harness.record import Record, Row

HEAD = (
    f"{'op':10} {'shape':>24} {'gates':7} {'direction':8} {'implementation':10} "
    f"{'ms':>8} {'x ours':>7} {'x floor':>7} {'MiB':>8} {'host ms':>7} {'error':>8}  note"
)


def line(row: Row, ours: Row | None) -> str:
    """`x ours`: how many times as long as ours it takes; `error`: the largest, of any tensor."""
    worst = max(row.errors.values(), default=None, key=lambda e: (e != e, e))
    note = f"{row.status}: {row.message}"
    return (
        f"{row.op:10} {row.shape:>24} {row.gates:7} {row.direction:8} {row.implementation:10} "
        f"{_number(row.ms, '8.3f')} {_number(ratio(row, ours), '7.2f')} {_number(over_floor(row), '7.1f')} "
        f"{_number(row.peak_mib, '8.0f')} {_number(row.host_ms, '7.2f')} {_number(worst, '8.1e')}  "
        f"{'' if row.status == 'ok' else note}"
    ).rstrip()


def ratio(row: Row, ours: Row | None) -> float | None:
    if ours is None or row.status != "ok" or ours.status != "ok" or row.ms is None or not ours.ms:
        return None
    return row.ms / ours.ms


def over_floor(row: Row) -> float | None:
    return row.ms / row.floor_ms if row.ms and row.floor_ms else None


def table(rows: Sequence[Row]) -> str:
    lines = [HEAD]
    for group in configurations(rows):
        ours = our_row(group)
        lines += [line(row, ours) for row in group]
    return "\n".join(lines)


def configurations(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for _, group in groupby(rows, key=lambda row: row.configuration):
        yield list(group)


def our_row(group: Sequence[Row]) -> Row | None:
    return next((row for row in group if row.implementation == OURS), None)


def kernel_line(row: Row) -> str:
    """The kernels of one call, longest first."""
    shares = sorted(row.kernels.items(), key=lambda item: -item[1])[:8]
    return f"    {row.implementation}: " + ", ".join(f"{name[:48]} {ms:.3f}" for name, ms in shares)


def plot(record: Record, path: Path) -> None:
    """Three bar charts over the configurations: ms, times of peers over ours, times over the floor.

    Configurations of one shape stand together under its name, every second shape on a grey band. The scales are
    logarithmic. What counts times starts at 1, so that a bar to the left of it is faster than ours; ours over ours is
    that line, not a bar.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counted = [row for row in record.rows if row.status == "ok"]
    names = list(dict.fromkeys(row.implementation for row in counted))
    headings, placed, end = _places(list(configurations(counted)))
    height = 0.8 / max(1, len(names))
    charts: tuple[tuple[str, float, Callable[[Row, Row | None], float | None]], ...] = (
        ("ms, median", 0, lambda row, ours: row.ms),
        ("times ours", 1, lambda row, ours: None if row is ours else ratio(row, ours)),
        ("times the floor", 1, lambda row, ours: over_floor(row)),
    )
    size = (12.5, 1.5 + (0.06 + 0.06 * len(names)) * end)
    figure, axes = pyplot.subplots(1, 3, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, (title, start, value) in zip(axes[0], charts, strict=True):
        for index, name in enumerate(names):
            bars = [
                (at + (index + 0.5) * height - 0.4, number)
                for at, group in placed
                for row in group
                if row.implementation == name and (number := value(row, our_row(group))) is not None
            ]
            lengths = [number - start for _, number in bars]
            drawn = axis.barh([at for at, _ in bars], lengths, height, left=start, label=name)
            if title == "times ours":
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the line at 2
                axis.bar_label(drawn, [f"{number:.2f}" for _, number in bars], padding=3, fontsize=7, bbox=box)
        axis.set_title(title)
        _log_scale(axis)
        for (top, _), (bottom, _) in list(pairwise([*headings, (end, "")]))[::2]:
            axis.axhspan(top, bottom, color="black", alpha=0.06, linewidth=0, zorder=0)
    for times, style in ((1, "-"), (2, "--")):
        axes[0][1].axvline(times, color="black", linestyle=style, linewidth=0.8)
    first = axes[0][0]
    for top, shape in headings:
        where = (0.01, top + 0.5)
        first.annotate(shape, where, xycoords=("axes fraction", "data"), va="center", fontsize=8, weight="bold")
    labels = [f"{row.op} {row.gates} {row.direction}".replace(" open ", " ") for _, (row, *_) in placed]
    first.set_yticks([at for at, _ in placed], labels, fontsize=8)
    first.set_ylim(max(end, 1), 0)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=max(1, len(names)))
    environment = record.environment
    figure.suptitle(
        f"{environment.get('device', '')}, torch {environment.get('torch', '')}, Triton {environment.get('triton', '')}"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _places(groups: Sequence[list[Row]]) -> tuple[list[tuple[float, str]], list[tuple[float, list[Row]]], float]:
    """Where things stand from the top down, a line each: the names of the shapes (their upper edges), under each the
    configurations of it (their middles), and the end. A run that came back to a shape shows it once."""
    headings: list[tuple[float, str]] = []
    placed: list[tuple[float, list[Row]]] = []
    end = 0.0
    for shape in dict.fromkeys(group[0].shape for group in groups):
        headings.append((end, shape))
        own = [group for group in groups if group[0].shape == shape]
        placed += [(end + 1.5 + at, group) for at, group in enumerate(own)]
        end += 1.25 + len(own)
    return headings, placed, end


def _log_scale(axis: Any) -> None:
    """A logarithmic axis, above and below, with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(axis="x", top=True, labeltop=True)
    axis.margins(x=0.1)
    axis.grid(axis="x", alpha=0.3)


def _number(value: float | None, form: str) -> str:
    width = int(form.split(".")[0])
    return " " * width if value is None else f"{value:{form}}"
