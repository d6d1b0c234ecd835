"""What calls keep the host for: all of it, and with launches left out, which is Python's and torch's share.

Each op on one device, and on a rank that hears only itself: all that a rank of context parallelism does, without the
collective. With torchrun, on real ranks. Where there is no GPU only the second figure can be had.

    python benchmarks/host.py --ops kda,gdn
    torchrun --nproc-per-node 2 benchmarks/host.py --ops kda --segments 4 --profile
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cp_time import GENERATED, Subject, calls_of, draw

from kcpgen.runtime import build_cp_context
from kcpgen.runtime.split import forced_segments
from kcpgen.verify.op import Op, load_op

Call = Callable[[], Any]
ROUNDS = 7


class Alone:
    """The way to others of a rank without any: what it sends is what all of them sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.attempt = 0
        self._call = 0

    def meet(self, context: object, about: object, timeout: float, *, alone: bool) -> None:
        """Nobody to meet."""

    def next_attempt(self) -> None:
        self.attempt += 1

    def next_call(self) -> int:
        self._call += 1
        return self._call

    def agree(self, sizes: object, about: object, timeout: float) -> None:
        """Nobody to agree with."""

    def report(self, error: BaseException, *, ahead: int) -> None:
        """Nobody to tell."""

    def raise_reported(self) -> None:
        """Nobody has said anything."""

    def all_gather(self, payload: Tensor, timeout: float) -> Any:
        gathered = payload.expand(self.size, -1).contiguous()
        return SimpleNamespace(wait=lambda: gathered)


def main() -> None:
    chosen = _arguments()
    if "RANK" in os.environ:
        if chosen.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if chosen.device == "cuda" else "gloo")
    torch.set_num_threads(1)
    print(f"{'us a call':<26}{'forward':>10}{'backward':>10}{'without launches':>20}{'backward':>10}")
    for name in chosen.ops.split(","):
        op = load_op(GENERATED / name)
        import_module(f"{op.chunk.__module__.rpartition('.')[0]}.autograd")  # before the variable below is set
        with _accepting(chosen.device), forced_segments(chosen.segments):
            for where, context in _places(chosen):
                _tell(chosen, op, where, context)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _places(chosen: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    yield "one device", None
    real = dist.is_initialized()
    for size, rank in [(dist.get_world_size(), dist.get_rank())] if real else [(2, 0), (2, 1), (3, 1)]:
        offsets = torch.tensor([0, size * chosen.tokens])
        group: Any = dist.group.WORLD if real else Alone(rank, size)
        context = build_cp_context(offsets.to(chosen.device), group, cu_seqlens_cpu=offsets)
        yield f"rank {rank} of {size}", context


def _tell(chosen: argparse.Namespace, op: Op, where: str, context: Any) -> None:
    keywords = {} if context is None else {"cp_context": context}
    inputs = draw(op, chosen.tokens, chosen.heads, chosen, 0)
    function = partial(op.chunk, backend="triton")
    subject = Subject(op=op, who="kcpgen", function=function, tokens=chosen.tokens, heads=chosen.heads)
    calls = calls_of(subject, inputs, **keywords)
    # so that a backward runs where it is called: it can be profiled then, and threads do not count
    with torch.autograd.set_multithreading_enabled(False):
        whole = _microseconds(chosen, calls) if chosen.device == "cuda" else ("-", "-")
        with _launches_left_out():
            rest = _microseconds(chosen, calls)
        print(f"{op.name + ', ' + where:<26}{whole[0]:>10}{whole[1]:>10}{rest[0]:>20}{rest[1]:>10}", flush=True)
        if chosen.profile:
            with nullcontext() if chosen.device == "cuda" else _launches_left_out():
                _profile(chosen, calls["forward+backward"])


def _microseconds(chosen: argparse.Namespace, calls: dict[str, Call]) -> tuple[str, str]:
    """Of the forward, and of the backward that follows it; in the fastest of some rounds, which nothing disturbed."""
    forward, both = (min(_round(chosen, call) for _ in range(ROUNDS)) for call in calls.values())
    return f"{forward:.0f}", f"{both - forward:.0f}"


def _round(chosen: argparse.Namespace, call: Call) -> float:
    call()
    if chosen.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(chosen.calls):
        call()
    return 1e6 * (time.perf_counter() - start) / chosen.calls


def _profile(chosen: argparse.Namespace, call: Call) -> None:
    profile = cProfile.Profile()
    profile.runcall(lambda: [call() for _ in range(chosen.calls)])
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def _launches_left_out() -> Any:
    return mock.patch.object(JITFunction, "run", _nothing)


def _nothing(kernel: object, *args: object, **keywords: object) -> None:
    """In place of a launch; a Mock takes longer than what is measured."""


@contextmanager
def _accepting(device: str) -> Iterator[None]:
    """Inside, ops accept CPU tensors. Triton reads the variable when kernels are defined, and does not interpret."""
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if device == "cpu" else {}):
        yield


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="kda,gdn")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--width", type=int, default=64, help="K = V")
    parser.add_argument("--segments", type=int, help="cut every sequence into so many, 1: into none")
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument(
        "--profile", action="store_true", help="the functions that take longest, of all that a call does"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    chosen.dtype = "bfloat16"
    return chosen


if __name__ == "__main__":
    main()
