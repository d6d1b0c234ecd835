"""The generated ops against their peers, in one process on one GPU.

    python benchmarks/speed.py --ops kda,gdn --shapes 1x8192x32 --json benchmarks/results/speed.json --plot speed.png

A configuration is an op, a shape, a kind of gate and a direction. What each implementation returns is compared with the
per-token reference, and the kernels that ran are named, before its time counts; then all are timed in turn. See
docs/benchmarks.md. `--dry-run` says what would be run, `--from FILE` prints and plots what was.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import shapes as sizes
from benchmarks.harness.shapes import Shape

ROOT = Path(__file__).resolve().parent.parent
DIRECTIONS = ("forward", "training")
GATES = ("open", "bounded")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    op: str
    shape: Shape
    gates: str
    direction: str

    @property
    def label(self) -> str:
        return f"{self.op} {self.shape.label} {self.gates} {self.direction}"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Seconds since the start; `budget` 0 is no limit."""

    start: float
    budget: float

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return self.budget - self.elapsed if self.budget else float("inf")


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/speed.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--generated", type=Path, default=ROOT / "generated", metavar="DIR", help="directory of the generated packages")
    add("--ops", type=_names, default=(), metavar="OP,OP", help="default: every package in DIR")
    add("--shapes", type=_shape, nargs="+", default=[], metavar="SHAPE", help=f"{sizes.WANTED}; default: a list")
    add("--directions", type=_among(DIRECTIONS), default=DIRECTIONS, metavar="D,D", help=" and ".join(DIRECTIONS))
    add("--gates", type=_among(GATES), default=GATES, metavar="G,G", help="open: any decay; bounded: with a promise")
    add("--rounds", type=_positive, default=10, help="timed calls of each implementation (default 10)")
    add("--warm-ups", type=_positive, default=3, help="calls before them (default 3)")
    add(
        "--segments",
        type=_positive,
        metavar="N",
        help="cut sequences of ours into N segments, 1: never; default: a model",
    )
    add("--portable", action="store_true", help="ours with portable kernels where others are for this GPU")
    add("--no-peers", action="store_true", help="measure ours alone")
    add("--peers", type=_names, default=(), metavar="PEER,PEER", help="default: all that are installed")
    add("--warm-jobs", type=int, default=0, metavar="N", help="first compile in N processes that share Triton's cache")
    add(
        "--warm-share", type=float, default=0.6, help="of the time left, the most that compiling may take (default 0.6)"
    )
    add("--shards", type=_positive, default=4, help="jobs into which a peer's tuning is cut (default 4)")
    add("--peer-configs", type=_positive, metavar="N", help="tune peers over N configurations a kernel; default: all")
    add("--peer-tuning", type=Path, metavar="FILE", help="take and keep what peers' tuning chose")
    add("--budget-s", type=float, default=0.0, metavar="S", help="start nothing new when this time is nearly up")
    add("--cold", action="store_true", help="also time first calls with an empty Triton cache, ours")
    add("--cold-jobs", type=_positive, default=1, help="cold processes at a time (default 1)")
    add("--json", type=Path, metavar="FILE", help="written after every row")
    add("--plot", type=Path, metavar="FILE.png", help="bar charts of it all")
    add("--kernels", action="store_true", help="print the time of each kernel")
    add("--dry-run", action="store_true", help="list what would be run, on any machine")
    add("--from", dest="source", type=Path, metavar="FILE", help="print (and plot) an earlier run's JSON, run nothing")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _shape(text: str) -> Shape:
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _among(allowed: Sequence[str]) -> Any:
    def chosen(text: str) -> tuple[str, ...]:
        found = _names(text)
        if not found or set(found) - set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(allowed)}")
        return found

    return chosen


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def packages(options: argparse.Namespace) -> list[Path]:
    """Directories of the ops to measure. SystemExit names one that is not there."""
    there = sorted(path.parent for path in options.generated.glob("*/interface.py"))
    names = {path.name: path for path in there}
    missing = [name for name in options.ops if name not in names]
    if missing or not there:
        sys.exit(f"no package {', '.join(missing)} in {options.generated}: there are {', '.join(names) or 'none'}")
    return [names[name] for name in options.ops] if options.ops else there


def configurations(options: argparse.Namespace) -> Iterator[Configuration]:
    """Everything to measure, shape by shape; a default list has grouped heads where a peer is known for them."""
    from benchmarks.harness.calls import FLASH_QLA
    from benchmarks.harness.inputs import gate_kinds
    from kcpgen.verify.op import load_op

    ops = [load_op(directory) for directory in packages(options)]
    chosen = options.shapes or [*sizes.DEFAULT, sizes.GROUPED]
    for shape in chosen:
        for op in ops:
            if not options.shapes and shape.grouped and op.name not in FLASH_QLA.entries:
                continue
            for gates in gate_kinds(op):
                for direction in options.directions:
                    if gates in options.gates:
                        yield Configuration(op=op.name, shape=shape, gates=gates, direction=direction)


def main(arguments: Sequence[str] | None = None) -> int:
    options = arguments_parser().parse_args(arguments)
    if options.plot and find_spec("matplotlib") is None:
        print("error: --plot needs matplotlib: pip install 'kcpgen[bench]'", file=sys.stderr)
        return 2
    if options.source:
        return _show(options)
    wanted = list(configurations(options))
    if options.dry_run:
        print("\n".join(configuration.label for configuration in wanted))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("error: no CUDA device here (--dry-run lists what would be run)", file=sys.stderr)
        return 2
    from benchmarks.harness.session import Session
    from kcpgen.runtime import hopper
    from kcpgen.runtime.split import forced_segments

    session = Session(options, Clock(start=time.monotonic(), budget=options.budget_s))
    try:
        with forced_segments(options.segments), hopper.forced(False if options.portable else None):
            return session.run(wanted)
    finally:
        session.close()


def _show(options: argparse.Namespace) -> int:
    from benchmarks.harness import record, tables

    try:
        found = record.read(options.source)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(tables.table(found.rows))
    if options.kernels:
        print("\n".join(tables.kernel_line(row) for row in found.rows if row.kernels))
    if options.plot:
        tables.plot(found, options.plot)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status) if status == 3 else sys.exit(status)  # 3: the device is lost, tearing it down would hang
