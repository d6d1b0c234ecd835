"""Simulation of a package that is already generated; needs torch (and triton) but nothing of the compiler."""

from __future__ import annotations

import sys
from pathlib import Path

from kcpgen.simulate.arguments import parser
from kcpgen.simulate.command import Request, run


def main() -> int:
    options = parser("python -m kcpgen.simulate", str(__doc__))
    options.add_argument("--generated", type=Path, required=True, metavar="DIR", help="package, e.g. generated/my_op")
    chosen = vars(options.parse_args())
    return run(chosen.pop("generated"), Request(**chosen))


if __name__ == "__main__":
    sys.exit(main())
