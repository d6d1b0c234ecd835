"""Verification of a package that is already generated; needs torch (and triton) but nothing of the compiler."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kcpgen.verify.command import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kcpgen.verify", description=__doc__)
    parser.add_argument("--generated", type=Path, required=True, metavar="DIR", help="package, e.g. generated/my_op")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    parser.add_argument("--quick", action="store_true", help="a few small cases of each kind")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share the device and compile kernels side by side"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases whose label has TEXT in it; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE ('-': stdout)")
    chosen = parser.parse_args()
    return run(
        chosen.generated,
        device=chosen.device,
        quick=chosen.quick,
        json_path=chosen.json,
        jobs=chosen.jobs,
        only=tuple(chosen.only),
    )


if __name__ == "__main__":
    sys.exit(main())
