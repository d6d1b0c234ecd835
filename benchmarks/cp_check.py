"""Whether context parallelism is right at full size: every case, against one device and the float64 reference."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import accumulate, pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from cp_time import GENERATED, numbers
from torch import Tensor

from kcpgen.runtime import build_cp_context
from kcpgen.simulate.call import Spread, by_token, long_memory, on_one_rank, together
from kcpgen.simulate.compare import Comparison, compared, observed_chunks, simulate
from kcpgen.simulate.verdict import judge
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import Inputs, in_float64
from kcpgen.verify.op import Op, load_op

BOUND = 5e-3

# (ranks, lengths of the sequences)
ROWS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (2, (3000, 4000, 3240)),
    (2, (5120, 5120)),
    (4, (7000, 3240)),
    (4, (10240,)),
    (8, (65536,)),
    (2, (1000, 1500, 2000, 2500, 1240, 1000, 1000)),
    (2, (400, 624)),
    (4, (700, 324)),
    (4, (257, 1, 253, 257, 1, 253, 2)),
    (2, (37, 51, 40)),
    (4, (1024,)),
    (2, (10240,)),
    (4, (0, 3000, 0, 0, 4000, 3240, 0)),
    (2, (0, 0, 700, 0, 324)),
)


def check(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows for as many ranks as there are; simulated, all rows."""
    for name, size, (ranks, lengths) in product(chosen.ops.split(","), numbers(chosen.sizes), ROWS):
        if not chosen.simulated and ranks != dist.get_world_size():
            continue
        op, case, spread = load_op(GENERATED / name), _case(chosen, ranks, lengths, size), Spread(ranks=ranks)
        if chosen.simulated:
            yield _checked(simulate(op, case, spread, chosen.device, reference=chosen.reference))
        else:
            comparison = _on_group(op, case, spread, chosen)
            if comparison is not None:
                yield _checked(comparison)
        if chosen.device == "cuda":
            torch.cuda.empty_cache()


def _case(chosen: argparse.Namespace, ranks: int, lengths: tuple[int, ...], size: int) -> Case:
    """Lengths divided by `--scale`, then made to divide into equal shards again."""
    scaled = [max(length // chosen.scale, min(length, 1)) for length in lengths]
    longest = scaled.index(max(scaled))
    scaled[longest] += -sum(scaled) % ranks
    offsets = (0, *accumulate(scaled))
    return Case(
        label=f"{ranks} ranks, {lengths}",
        backend=chosen.backend,
        dtype=chosen.dtype,
        tokens=offsets[-1],
        offsets=offsets,
        key_width=size,
        value_width=size,
        segments=1,  # one device is the witness: it must not be cut as ranks are
    )


def _on_group(op: Op, case: Case, spread: Spread, chosen: argparse.Namespace) -> Comparison | None:
    """Of rank 0; the others only take part."""
    inputs = long_memory(op, case, chosen.device)
    with observed_chunks() as chunks:
        cp = build_cp_context(torch.tensor(case.offsets))
        mine = on_one_rank(op, case, inputs, cp)
        shares = [{name: torch.empty_like(x) for name, x in mine.items()} for _ in range(spread.ranks)]
        for name, x in mine.items():
            dist.all_gather([share[name] for share in shares], x.contiguous())
        if cp.rank:
            return None
        one = evaluate(op.chunk, inputs, case, backend=case.backend)
    cp_tensors = together(shares, by_token(op))
    return compared(op, case, spread, cp=cp_tensors, one=one, naive=_exact(op, case, inputs, chosen), chunks=chunks)


def _exact(op: Op, case: Case, inputs: Inputs, chosen: argparse.Namespace) -> dict[str, Tensor]:
    exact = in_float64(inputs)
    if chosen.reference == "naive":
        return evaluate(op.naive, exact, case)
    return evaluate(op.chunk, exact, case, backend="eager")


def _checked(comparison: Comparison) -> dict[str, Any]:
    """worst: each tensor's worst sequence: [CP to the reference, CP to one device, one device to reference]."""
    verdict = judge(comparison)
    worst: dict[str, tuple[float, float, float]] = {}
    for f in comparison.figures:
        found = (f.cp_to_naive, f.cp_to_one, f.one_to_naive)
        worst[f.tensor] = max(worst.get(f.tensor, found), found)
    return {
        "op": comparison.op.name,
        "K": comparison.case.key_width,
        "simulated_ranks" if not dist.is_initialized() else "real_ranks": comparison.spread.ranks,
        "lengths": [b - a for a, b in pairwise(comparison.case.offsets)],
        "ok": verdict.ok,
        "below_5e-3": all(f.cp_to_naive < BOUND for f in comparison.figures),
        "bit_identical": all(f.equal for f in comparison.figures if f.worst_token is not None),
        "chunk": comparison.chunk,
        "verdict": f"{verdict.kind}: {verdict.text}",
        "worst": {name: [float(f"{x:.2e}") for x in found] for name, found in worst.items()},
    }
