"""The first call of a process with an empty Triton cache: how long the first forward and the first backward take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def first_calls(directories: Sequence[Path], shape: str, jobs: int, seconds: float) -> Iterator[dict[str, Any]]:
    """One fresh process an op, `jobs` at a time: {op, shape, forward_s, backward_s} or {op, shape, failure}."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda directory: _first_call(directory, shape, seconds), directories)


def _first_call(directory: Path, shape: str, seconds: float) -> dict[str, Any]:
    known = {"op": directory.name, "shape": shape}
    with tempfile.TemporaryDirectory(prefix="cold-") as cache:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": paths}
        command = [sys.executable, "-m", "benchmarks.harness.cold", str(directory), shape]
        try:
            ran = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {**known, "failure": f"not done in {seconds:.0f} s"}
    if ran.returncode:
        return {**known, "failure": (ran.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return {**known, **json.loads(ran.stdout.splitlines()[-1])}


def main(directory: str, shape: str) -> None:
    import torch

    from benchmarks.harness.calls import our_call
    from benchmarks.harness.inputs import draw
    from benchmarks.harness.shapes import parse
    from kcpgen.verify.op import load_op

    op = load_op(Path(directory))
    arguments = draw(op, parse(shape), "open", "cuda")
    call = our_call(op, arguments)
    torch.cuda.synchronize()
    start = time.perf_counter()
    o, _ = call()
    torch.cuda.synchronize()
    forward = time.perf_counter()
    torch.autograd.grad(o, list(arguments.leaves.values()), arguments.d_output)
    torch.cuda.synchronize()
    print(json.dumps({"forward_s": forward - start, "backward_s": time.perf_counter() - forward}))


if __name__ == "__main__":
    main(*sys.argv[1:])
