"""The command line of a simulation, for a spec or for a package that is already generated. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
MAX_WIDTH = 256  # of keys and values, as the runtime has it, which is not imported here
FAULT_NAMES = ("state-lost", "transition-bf16", "wrong-window", "head-offset", "summary-drift")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """All options but the source of the op."""
    made = _Parser(prog=prog, description=description)
    made.add_argument("--ranks", type=natural, required=True, help="how many ranks share the row")
    made.add_argument("--lengths", type=lengths, required=True, help="tokens of each sequence, e.g. 700,324")
    made.add_argument(
        "--layout",
        choices=["contiguous", "uneven"],
        default="contiguous",
        help="what ranks do with a remainder: refuse it (default), or share it",
    )
    made.add_argument(
        "--merge", choices=["fold", "scan"], default="fold", help="how summaries are put together (default: fold)"
    )
    made.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda if there is one")
    made.add_argument("--dtype", choices=list(DTYPES), help="of the inputs: by default bf16 on cuda, fp64 on a CPU")
    made.add_argument(
        "--backend",
        choices=["triton", "eager", "naive"],
        help="by default triton on cuda and in its interpreter, else eager",
    )
    made.add_argument("--reference", choices=["naive", "eager"], help="of float64; by default naive up to 16384 tokens")
    made.add_argument("--heads", type=natural, default=2, help="H, heads that read and write (default: 2)")
    made.add_argument("--value-heads", type=natural, help="HV, by default H")
    made.add_argument("--key-width", type=width, default=64, help="K (default: 64)")
    made.add_argument("--value-width", type=width, default=64, help="V (default: 64)")
    made.add_argument("--inject", choices=FAULT_NAMES, help="plant a fault, to see it found")
    made.add_argument("--json", type=Path, dest="json_path", metavar="FILE", help="figures to FILE ('-': stdout)")
    return made


def natural(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: an integer of at least 1")
    return int(text)


def width(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MAX_WIDTH):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: an integer from 1 to {MAX_WIDTH}")
    return int(text)


def lengths(text: str) -> tuple[int, ...]:
    """ "700,324" as numbers."""
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sequence lengths such as 700,324")
    return tuple(int(part) for part in parts)
