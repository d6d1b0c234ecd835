"""`kcpgen simulate` on a generated package: run, print the table and the verdict, return the exit code."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from kcpgen.runtime.context_parallel.merge import Method
from kcpgen.simulate.arguments import DTYPES
from kcpgen.simulate.call import Spread
from kcpgen.simulate.compare import Comparison, Figure, simulate
from kcpgen.simulate.faults import injected
from kcpgen.simulate.verdict import Verdict, judge
from kcpgen.verify.cases import Case
from kcpgen.verify.op import load_op
from kcpgen.verify.report import digest, machine, say, unwritable

HEADING = (
    f"{'tensor':<15}{'sequence':>9}{'CP - one':>11}{'one - naive':>13}{'CP - naive':>12}{'worst token':>13}{'rank':>6}"
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to simulate. dtype, backend and reference: None for what suits the device."""

    ranks: int
    lengths: tuple[int, ...]
    layout: str = "contiguous"
    merge: Method = "fold"
    device: str | None = None
    dtype: str | None = None
    backend: str | None = None
    reference: str | None = None
    heads: int = 2
    value_heads: int | None = None
    key_width: int = 64
    value_width: int = 64
    inject: str | None = None
    json_path: Path | None = None


def run(directory: Path, request: Request) -> int:
    """Simulate the op in `directory`; 0 if ranks agree with one device and with the reference."""
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        say("error: no CUDA device here; use --device cpu")
        return 1
    if request.value_heads is not None and request.value_heads % request.heads:
        say(f"error: --value-heads is {request.value_heads}; allowed: a multiple of --heads, {request.heads}")
        return 1
    if fault := unwritable(request.json_path):
        say(f"error: {fault}")
        return 1
    try:
        op = load_op(directory)
    except FileNotFoundError as error:
        say(f"error: {error}")
        return 1
    case = case_of(request, device)
    spread = Spread(ranks=request.ranks, layout=request.layout, merge=request.merge)
    reference = request.reference or ("naive" if case.tokens <= 16384 else "eager")
    try:
        with injected(request.inject):
            comparison = simulate(op, case, spread, device, reference=reference)
    except (ValueError, RuntimeError) as error:
        say(f"error: {error}")
        return 1
    verdict = judge(comparison)
    if request.json_path != Path("-"):
        say(table(comparison, device))
        say(f"\nverdict: {verdict.kind}: {verdict.text}")
    if request.json_path is not None:
        _write(request.json_path, as_json(comparison, verdict, device, request))
    return 0 if verdict.ok else 1


def case_of(request: Request, device: str) -> Case:
    dtype = DTYPES.get(request.dtype or "", request.dtype) or ("bfloat16" if device == "cuda" else "float64")
    offsets = (0, *accumulate(request.lengths))
    return Case(
        label=f"{request.ranks} ranks, {','.join(map(str, request.lengths))}",
        backend=request.backend or _backend(device, dtype),
        dtype=dtype,
        tokens=offsets[-1],
        offsets=offsets,
        heads=request.heads,
        value_heads=request.value_heads or request.heads,
        key_width=request.key_width,
        value_width=request.value_width,
    )


def _backend(device: str, dtype: str) -> str:
    kernels = dtype != "float64" and (device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
    return "triton" if kernels else "eager"


def table(comparison: Comparison, device: str) -> str:
    case, spread = comparison.case, comparison.spread
    cuts = ", ".join(map(str, comparison.bounds[1:-1]))
    lines = [
        f"{comparison.op.name} on {spread.ranks} simulated ranks, {case.backend} {case.dtype}, {_device(device)}, "
        f"H={case.heads} HV={case.value_heads} K={case.key_width} V={case.value_width}",
        f"sequences of {', '.join(str(b - a) for a, b in pairwise(case.offsets))} tokens, "
        f"cut at {cuts}; relative RMS differences",
        "",
        HEADING,
    ]
    return "\n".join([*lines, *map(_row, comparison.figures)])


def _row(figure: Figure) -> str:
    sequence = "" if figure.sequence is None else str(figure.sequence)
    near = "equal" if figure.equal else f"{figure.cp_to_one:.1e}"
    missed = "" if figure.cp_to_naive <= figure.bound else "!"
    numbers = f"{near:>11}{figure.one_to_naive:>13.1e}{f'{figure.cp_to_naive:.1e}{missed}':>12}"
    worst = f"{figure.worst_token:>13}{figure.worst_rank:>6}" if figure.worst_token is not None else ""
    return f"{figure.tensor:<15}{sequence:>9}{numbers}{worst}"


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def as_json(comparison: Comparison, verdict: Verdict, device: str, request: Request) -> str:
    report = {
        "op": comparison.op.name,
        "generated_sha256": digest(comparison.op.directory),
        "machine": machine(device),
        "ranks": comparison.spread.ranks,
        "lengths": list(request.lengths),
        "bounds": list(comparison.bounds),
        "dtype": comparison.case.dtype,
        "backend": comparison.case.backend,
        "injected": request.inject,
        "verdict": verdict.kind,
        "text": verdict.text,
        "figures": [_figure(figure) for figure in comparison.figures],
    }
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def _figure(figure: Figure) -> dict[str, object]:
    numbers = {"cp_to_one": figure.cp_to_one, "one_to_naive": figure.one_to_naive, "cp_to_naive": figure.cp_to_naive}
    return {
        "tensor": figure.tensor,
        "sequence": figure.sequence,
        **{name: float(f"{x:.2e}") if math.isfinite(x) else str(x) for name, x in numbers.items()},
        "equal": figure.equal,
        "bound": figure.bound,
        "worst_token": figure.worst_token,
        "worst_rank": figure.worst_rank,
    }


def _write(path: Path, text: str) -> None:
    if path == Path("-"):
        say(text.rstrip())
    else:
        path.write_text(text, encoding="utf-8")
