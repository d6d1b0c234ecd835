"""Generated ops and rows for the tests of context parallelism."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from pathlib import Path

import torch

from kcpgen.simulate.call import Spread, long_memory, on_ranks
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.op import Op, load_op

ROOT = Path(__file__).resolve().parent.parent.parent
OPS = sorted(path.stem for path in (ROOT / "specs").glob("*.kcp"))

# (ranks, lengths of the sequences): the cases that context parallelism has to pass, at a hundredth of their size.
ROWS = (
    (2, (30, 40, 32)),
    (2, (52, 52)),
    (4, (70, 34)),
    (4, (104,)),
    (8, (128,)),
    (2, (10, 15, 20, 25, 13, 10, 11)),
    (2, (20, 32)),
    (4, (35, 17)),
    (4, (26, 1, 25, 26, 1, 24, 1)),
    (2, (37, 51, 40)),
    (4, (52,)),
    (4, (0, 26, 0, 0, 50, 28, 0)),
    (3, (0, 0, 63, 0)),
)


@cache
def op(name: str) -> Op:
    return load_op(ROOT / "generated" / name)


def row(lengths: tuple[int, ...], **changes: object) -> Case:
    """A packed row of small heads in float64."""
    offsets = (0, *accumulate(lengths))
    settings = {"backend": "eager", "dtype": "float64", "key_width": 8, "value_width": 6, **changes}
    return Case(label=f"{lengths}", tokens=offsets[-1], offsets=offsets, **settings)  # type: ignore[arg-type]


def differences(name: str, case: Case, spread: Spread) -> dict[str, float]:
    """Relative RMS difference between ranks and one device, tensor by tensor."""
    inputs = long_memory(op(name), case, "cpu")
    one = evaluate(op(name).chunk, inputs, case, backend=case.backend)
    return relative(on_ranks(op(name), case, inputs, spread), one)


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    return {n: float((found[n] - x).norm() / x.norm().clamp(min=1e-30)) for n, x in expected.items()}
