"""Whether context parallelism is right at full size: every case, against one device and the float64 reference."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import accumulate, pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from cp_time import GENERATED, numbers
from cp_workers import Budget, on_workers
from torch import Tensor

from kcpgen.runtime import build_cp_context
from kcpgen.simulate.call import MEMORIES, Spread, by_token, on_one_rank, together
from kcpgen.simulate.compare import Comparison, Figure, compared, observed_chunks, simulate
from kcpgen.simulate.merges import Entering, entering, observed_merges
from kcpgen.simulate.reference import exact
from kcpgen.simulate.verdict import cuts_on_chunks, judge
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import Inputs
from kcpgen.verify.op import Op, load_op

BOUNDS = {"bfloat16": 5e-3, "float32": 1e-4, "float64": 1e-10}  # o and every gradient, per sequence, to float64
# Each with a decay of its own. A model has as many; and the relative error of few heads of a short sequence is a matter
# of the draw: dg of one number per token is an inner product of matrices that may happen to be nearly orthogonal.
HEADS = 32
FEW_HEADS = 4  # of what is so long that the float64 reference of more would not fit
LONG = 16384
FP32 = 1e-5  # rounding of a state in fp32, over many chunks; bf16 in its place would be 1e-3, tf32 3e-4

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


Row = tuple[int, tuple[int, ...]]


def check(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows for as many ranks as there are; simulated, all rows."""
    budget = Budget(chosen.budget_s)
    done = passed(chosen)
    subjects = [
        (name, size, [row for row in ROWS if _key(_about(chosen, name, size, row)) not in done])
        for name, size in product(chosen.ops.split(","), numbers(chosen.sizes))
    ]
    if chosen.skip:
        left = sum(len(rows) for *_, rows in subjects)
        print(f"--skip: {len(subjects) * len(ROWS) - left} rows are ok already, {left} are left", file=sys.stderr)
    if not chosen.simulated:
        for subject in subjects:
            yield from _on_ranks(chosen, *subject)
    elif chosen.workers > 1:
        tasks = [(chosen, *subject, budget) for subject in subjects if subject[-1]]
        yield from on_workers(simulated_rows, tasks, chosen.workers)
    else:
        for subject in subjects:
            yield from simulated_rows(chosen, *subject, budget)


def numbers_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """What a row's numbers depend on beside what it says itself."""
    return {name: getattr(chosen, name) for name in ("dtype", "backend", "scale", "heads_checked", "reference")}


def _about(chosen: argparse.Namespace, name: str, size: int, row: Row) -> dict[str, Any]:
    where = "simulated_ranks" if chosen.simulated else "real_ranks"
    return {"op": name, "K": size, "memory": chosen.memory, where: row[0], "lengths": list(row[1])}


def _key(figure: dict[str, Any]) -> tuple[str, ...]:
    names = ("op", "K", "memory", "simulated_ranks", "real_ranks", "lengths")
    return tuple(str(figure.get(name)) for name in names)


def passed(chosen: argparse.Namespace) -> set[tuple[str, ...]]:
    """Keys of the rows that are `ok` in the files of `--skip`. Ends the program where these were of other numbers."""
    found: set[tuple[str, ...]] = set()
    for path in chosen.skip:
        report = json.loads(path.read_text(encoding="utf-8"))
        for name, value in numbers_of(chosen).items():
            if report.get(name) != value:
                raise SystemExit(f"--skip: {path} has `{name}` {report.get(name)}, this run {value}")
        found |= {_key(figure) for figure in report["figures"] if figure.get("ok")}
    return found


def simulated_rows(
    chosen: argparse.Namespace, name: str, size: int, rows: list[Row], budget: Budget
) -> Iterator[dict[str, Any]]:
    """These rows of one op and one size; those that there is no time for are named."""
    op = load_op(GENERATED / name)
    for row in rows:
        ranks, lengths = row
        about = _about(chosen, name, size, row)
        if budget.over:
            yield {**about, "left_out": "no time left"}
            continue
        start = time.monotonic()
        try:
            found = _simulated(op, _case(chosen, ranks, lengths, size), Spread(ranks=ranks), chosen)
        except Exception as error:  # a kernel may fail in any way; the other rows still count
            found = {"ok": False, "why": [f"{type(error).__name__}: {str(error)[:300]}"]}
        yield {**about, **found, "seconds": round(time.monotonic() - start, 1)}
        if chosen.device == "cuda":
            torch.cuda.empty_cache()


def _simulated(op: Op, case: Case, spread: Spread, chosen: argparse.Namespace) -> dict[str, Any]:
    inputs = MEMORIES[chosen.memory](op, case, chosen.device)
    with observed_merges() as merged:
        comparison = simulate(op, case, spread, chosen.device, reference=chosen.reference, inputs=inputs)
    states = entering(op, case, inputs, comparison.bounds, merged) if _aligned(comparison) else None
    return checked(comparison, states)


def _on_ranks(chosen: argparse.Namespace, name: str, size: int, rows: list[Row]) -> Iterator[dict[str, Any]]:
    op = load_op(GENERATED / name)
    for row in rows:
        ranks, lengths = row
        if ranks != dist.get_world_size():
            continue
        comparison = _on_group(op, _case(chosen, ranks, lengths, size), Spread(ranks=ranks), chosen)
        if comparison is not None:
            yield {**_about(chosen, name, size, row), **checked(comparison, None)}


def _case(chosen: argparse.Namespace, ranks: int, lengths: tuple[int, ...], size: int) -> Case:
    """Lengths divided by `--scale`, then made to divide into equal shards again."""
    scaled = [max(length // chosen.scale, min(length, 1)) for length in lengths]
    longest = scaled.index(max(scaled))
    scaled[longest] += -sum(scaled) % ranks
    offsets = (0, *accumulate(scaled))
    heads = chosen.heads_checked or (HEADS if sum(lengths) <= LONG else FEW_HEADS)
    return Case(
        label=f"{ranks} ranks, {lengths}",
        backend=chosen.backend,
        dtype=chosen.dtype,
        tokens=offsets[-1],
        offsets=offsets,
        heads=heads,
        value_heads=heads,
        key_width=size,
        value_width=size,
        segments=1,  # one device is the witness: it must not be cut as ranks are
    )


def _on_group(op: Op, case: Case, spread: Spread, chosen: argparse.Namespace) -> Comparison | None:
    """Of rank 0; the others only take part."""
    inputs: Inputs = MEMORIES[chosen.memory](op, case, chosen.device)
    with observed_chunks() as chunks:
        cp = build_cp_context(torch.tensor(case.offsets))
        mine = on_one_rank(op, case, inputs, cp)
        shares = [{name: torch.empty_like(x) for name, x in mine.items()} for _ in range(spread.ranks)]
        for name, x in mine.items():
            dist.all_gather([share[name] for share in shares], x.contiguous())
        if cp.rank:
            return None
        one = evaluate(op.chunk, inputs, case, backend=case.backend)
    naive: dict[str, Tensor] = exact(op, case, inputs, chosen.reference)
    return compared(op, case, spread, cp=together(shares, by_token(op)), one=one, naive=naive, chunks=chunks)


def _aligned(comparison: Comparison) -> bool:
    return comparison.chunk is not None and cuts_on_chunks(comparison, comparison.chunk)


def checked(comparison: Comparison, states: Entering | None) -> dict[str, Any]:
    """A row of the report, see docs/context_parallel.md. errors: of each tensor's worst sequence, to float64 and to
    one device."""
    aligned, ranks = _aligned(comparison), comparison.spread.ranks
    identical = all(f.equal for f in comparison.figures) if aligned else None
    why = _why(comparison, states, must_be_identical=aligned and ranks == 2)
    errors: dict[str, dict[str, float]] = {}
    for f in comparison.figures:
        found = {"cp": f.cp_to_naive, "one": f.one_to_naive, "cp_to_one": f.cp_to_one}
        before = errors.get(f.tensor, found)
        errors[f.tensor] = {key: _worse(x, before[key]) for key, x in found.items()}
    verdict = judge(comparison)
    row: dict[str, Any] = {
        "ok": not why,
        "why": why,
        "verdict": f"{verdict.kind}: {verdict.text}",
        "tokens": comparison.case.tokens,
        "sequences": [b - a for a, b in pairwise(comparison.case.offsets)],
        "chunk": comparison.chunk,
        "aligned": aligned,
        "bit_identical": identical,
        "errors": {name: {key: _short(x) for key, x in found.items()} for name, found in errors.items()},
    }
    if states is not None:
        forward, backward = states.from_one
        row["entering_states"] = {
            "transition": states.kind,
            "to_float64_fold": _short(states.from_fold),
            "to_one_device": {"forward": _short(forward), "backward": _short(backward)},
        }
    return row


def _why(comparison: Comparison, states: Entering | None, *, must_be_identical: bool) -> list[str]:
    """What a row fails by; written so that NaN fails."""
    bound = BOUNDS[comparison.case.dtype]
    far = [f for f in comparison.figures if not f.cp_to_naive < bound]
    why = [f"{f.tensor} of sequence {f.sequence}: {_apart(f)}" for f in far]
    different = [f.tensor for f in comparison.figures if not f.equal]
    if must_be_identical and different:
        why.append(f"cut on a chunk border, but not bit-identical: {', '.join(dict.fromkeys(different))}")
    if states is not None and not states.from_fold <= FP32:
        why.append(f"merged states {states.from_fold:.1e} from the float64 fold of what was gathered")
    if states is not None and states.kind != "dense" and not max(states.from_one) <= FP32:
        why.append(f"nothing is erased, but states {max(states.from_one):.1e} from those of one device")
    return why


def _apart(figure: Figure) -> str:
    return f"{figure.cp_to_naive:.2e} from float64, one device {figure.one_to_naive:.2e}"


def _worse(a: float, b: float) -> float:
    """NaN is worst of all."""
    return a if a != a or a > b else b


def _short(x: float) -> float | str:
    return float(f"{x:.2e}") if x == x else "nan"
