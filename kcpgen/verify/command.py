"""`kcpgen verify` on a generated package: choose the cases, run them, print the table, return the exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import torch

from kcpgen.verify.cases import Case, exact_cases, gpu_cases, interpreted_cases
from kcpgen.verify.compare import Comparison, compare
from kcpgen.verify.op import Op, load_op
from kcpgen.verify.report import as_json, heading, row, say, summary, unwritable

INTERPRETER = "TRITON_INTERPRET"


def run(
    directory: Path, *, device: str | None, quick: bool, json_path: Path | None, jobs: int = 1, only: Sequence[str] = ()
) -> int:
    """Compare the op in `directory` with its reference, table to stdout (or JSON, for "-"); 0 if every bound is met.

    only: texts, one of which a case's label must contain; none: all cases.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        say("error: no CUDA device here; use --device cpu")
        return 1
    if fault := unwritable(json_path):
        say(f"error: {fault}")
        return 1
    try:
        op = load_op(directory)
    except FileNotFoundError as error:
        say(f"error: {error}")
        return 1
    silent = json_path == Path("-")
    comparisons = []
    chosen = [
        (title, tuple(c for c in cases if _is_asked_for(c, only))) for title, cases in sections(op, device, quick)
    ]
    if not any(cases for _, cases in chosen):
        say(f"error: no case of {op.name} has a label with {' or '.join(map(repr, only))} in it")
        return 1
    for title, cases in chosen:
        comparisons += _section(op, title, cases, device, jobs, (lambda _: None) if silent else say)
    if json_path is not None:
        _write_json(json_path, as_json(op, device, comparisons))
    if not silent:
        say(f"\n{op.name}: {summary(comparisons)}")
        if not any(comparison.case.backend == "triton" for comparison in comparisons):
            say(f"no Triton kernel was run: that takes a GPU, or {INTERPRETER}=1 for Triton's interpreter")
    return 0 if all(comparison.ok for comparison in comparisons) else 1


def _is_asked_for(case: Case, only: Sequence[str]) -> bool:
    return not only or any(text in case.label for text in only)


def sections(op: Op, device: str, quick: bool) -> Iterator[tuple[str, tuple[Case, ...]]]:
    """What is compared on this device: float64 always, Triton where it can run."""
    yield "eager chunked float64 against the per-token reference", exact_cases(op, quick)
    if device == "cuda":
        yield f"Triton on {torch.cuda.get_device_name()} against the float64 per-token reference", gpu_cases(op, quick)
    elif os.environ.get(INTERPRETER) == "1":
        yield "Triton's interpreter against the float64 per-token reference", interpreted_cases(op, quick)


def _section(
    op: Op, title: str, cases: tuple[Case, ...], device: str, jobs: int, tell: Callable[[str], None]
) -> list[Comparison]:
    tensors = _tensors(op)
    tell(f"\n{op.name}: {title}, relative RMS error\n{heading(tensors)}")
    comparisons = []
    for comparison in run_cases(op, cases, device, jobs):
        tell(row(comparison, tensors))
        comparisons.append(comparison)
    return comparisons


def _tensors(op: Op) -> list[str]:
    gradients = [f"d{name}" for name in (*op.signature.inputs, *op.signature.params, "initial_state")]
    return ["o", "final_state", *gradients]


def run_cases(op: Op, cases: Sequence[Case], device: str, jobs: int) -> Iterator[Comparison]:
    """Comparisons in the order of the cases. Jobs share the device: compiling kernels is what takes the time."""
    if jobs == 1:
        yield from (compare(op, case, device) for case in cases)
        return
    groups = [tuple(group) for _, group in groupby(cases, key=lambda case: repr(case.compiled_for))]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for comparisons in pool.map(partial(_worker, op.directory, device), groups):
            yield from comparisons


def _worker(directory: Path, device: str, cases: tuple[Case, ...]) -> list[Comparison]:
    op = load_op(directory)
    return [compare(op, case, device) for case in cases]


def _write_json(path: Path, text: str) -> None:
    if path == Path("-"):
        say(text.rstrip())
    else:
        path.write_text(text, encoding="utf-8")
