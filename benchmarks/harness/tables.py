"""A run as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

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
    """Three bar charts over the configurations: ms, times of peers over ours, times over the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counted = [row for row in record.rows if row.status == "ok"]
    groups = list(configurations(counted))
    labels = [" ".join(part for part in group[0].configuration if part != "open") for group in groups]
    names = list(dict.fromkeys(row.implementation for row in counted))
    charts = (
        ("ms, median", lambda row, ours: row.ms),
        ("times ours", ratio),
        ("times the floor", lambda row, ours: over_floor(row)),
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(18, 1.5 + 0.3 * max(1, len(groups))), sharey=True, squeeze=False)
    for axis, (title, value) in zip(axes[0], charts, strict=True):
        for index, name in enumerate(names):
            bars = [
                (at, value(row, our_row(group)))
                for at, group in enumerate(groups)
                for row in group
                if row.implementation == name
            ]
            shown = [(at, number) for at, number in bars if number is not None]
            height = 0.8 / len(names)
            axis.barh([at + index * height for at, _ in shown], [number for _, number in shown], height, label=name)
        axis.set_title(title)
        axis.set_xscale("log")
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks([at + 0.4 for at in range(len(labels))], labels, fontsize=7)
    axes[0][0].invert_yaxis()
    axes[0][-1].legend() if names else None
    environment = record.environment
    figure.suptitle(
        f"{environment.get('device', '')}, torch {environment.get('torch', '')}, Triton {environment.get('triton', '')}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _number(value: float | None, form: str) -> str:
    width = int(form.split(".")[0])
    return " " * width if value is None else f"{value:{form}}"
