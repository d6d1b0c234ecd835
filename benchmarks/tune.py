"""Tiles for the GPU that is here: candidates compiled, checked, timed kernel by kernel, the best put into a table.

    python benchmarks/tune.py --ops gdn,kda --shape 1x8192x32 --kernels gradients,prepare --budget-s 60 --out tuned.json

No candidate is timed before its output and all its gradients agree with the float64 per-token reference. Without --out
the table is the one that ships with the package; see docs/benchmarks.md. `--dry-run` lists the candidates.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import speed
from benchmarks.harness import shapes as sizes

SM90 = (9, 0)


def arguments_parser() -> argparse.ArgumentParser:
    from benchmarks.harness.candidates import PARTS
    from kcpgen.runtime.tuned import SHIPPED

    parser = argparse.ArgumentParser(
        prog="benchmarks/tune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--generated", type=Path, default=speed.ROOT / "generated", metavar="DIR", help="of the generated packages")
    add("--ops", type=speed._names, default=(), metavar="OP,OP", help="default: every package in DIR")
    add("--shape", type=speed._shape, default=sizes.parse("1x8192x32"), help=f"{sizes.WANTED}; default 1x8192x32")
    add("--kernels", type=speed._among(tuple(PARTS)), default=(), metavar="K,K", help=f"of {', '.join(PARTS)}; all")
    add(
        "--without",
        action="append",
        default=[],
        metavar="TEXT",
        help="leave candidates with TEXT in their names out",
    )
    add("--budget-s", type=float, default=0.0, metavar="S", help="end in that time with what was tried; 0: no limit")
    add("--jobs", type=speed._positive, default=max(1, len(os.sched_getaffinity(0)) - 1), help="processes that compile")
    add("--rounds", type=speed._positive, default=5, help="calls that a candidate's time is the mean of (default 5)")
    add("--out", type=Path, default=SHIPPED, metavar="FILE", help="table to put winners into; default: the package's")
    add("--dry-run", action="store_true", help="list the candidates, on any machine")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = arguments_parser().parse_args(arguments)
    clock = speed.Clock(start=time.monotonic(), budget=options.budget_s)
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("error: no CUDA device here (--dry-run lists the candidates)", file=sys.stderr)
        return 2
    from benchmarks.harness.tuner import Tuner, groups_of, wanted

    groups = groups_of(speed.packages(options), options.shape)
    if options.dry_run:
        for group in groups:
            for _, tried in wanted(group, options):
                print("\n".join(f"{group.label} {candidate.label}" for candidate in tried))
        return 0
    if torch.cuda.get_device_capability() != SM90:
        print(f"error: candidates are compiled for sm_90, not for {torch.cuda.get_device_name()}", file=sys.stderr)
        return 2
    return Tuner(options, clock, groups, torch.cuda.get_device_name()).run()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status) if status == 3 else sys.exit(status)  # 3: the device is lost, tearing it down would hang
