"""Context parallelism measured: is it right, what does it cost, how does it scale.

    check   every row of docs/context_parallel.md against one device and the float64 reference
    time    one device against W ranks: ms, peak memory, bytes sent, and the share of each part
    cost    the same on one device, ranks simulated in turn: no network in it
    plot    what `time` and `cost` found, as a picture

`check` and `time` run on the ranks that torchrun started (NCCL on GPUs, gloo on CPUs or where ranks share a GPU),
`check --simulated` and `cost` in one process. With --peers, fla-core is measured beside ours where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cp_peers
from cp_check import check, numbers_of
from cp_time import cost, time_ranks

from kcpgen.verify.report import machine


def main() -> int:
    chosen = _arguments()
    if chosen.command == "plot":
        from cp_plot import plot

        return plot(chosen.files, chosen.out)
    on_ranks = chosen.command == "time" or (chosen.command == "check" and not chosen.simulated)
    if on_ranks:
        _join_group(chosen.device)
    figures = []
    for figure in {"check": check, "time": time_ranks, "cost": cost}[chosen.command](chosen):
        figures.append(figure)
        if not on_ranks or dist.get_rank() == 0:
            print(json.dumps(figure), flush=True)
            _write(chosen, figures)  # after each, so that a run cut short still leaves what it found
    if on_ranks:
        dist.barrier()
        dist.destroy_process_group()
    return 0 if all(figure.get("ok", True) for figure in figures) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["check", "time", "cost", "plot"])
    parser.add_argument("files", nargs="*", type=Path, help="plot: JSON files of time and cost")
    parser.add_argument("--ops", default="kda,gdn,dplr,gla")
    parser.add_argument("--sizes", default="128,64", help="check: K = V")
    parser.add_argument("--tokens", default="32768,131072", help="time, cost: T of the whole row")
    parser.add_argument("--heads", default="8,32,64", help="time, cost: H = HV")
    parser.add_argument("--ranks", default="2,4,8", help="cost: how many ranks are simulated")
    parser.add_argument("--width", type=int, default=128, help="time, cost: K = V")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float64"], help="bfloat16 on cuda, else float64")
    parser.add_argument("--backend", choices=["triton", "eager"], help="triton on cuda, else eager")
    parser.add_argument("--scale", type=int, default=1, help="check: divide the lengths, for a machine without a GPU")
    parser.add_argument("--reference", choices=["naive", "eager"], default="eager", help="check: of float64")
    parser.add_argument(
        "--memory", choices=["ordinary", "long"], default="ordinary", help="check: how long inputs remember; see docs"
    )
    parser.add_argument("--workers", type=int, default=1, help="check --simulated: processes, one for op and size")
    parser.add_argument("--warm-jobs", type=int, default=0, help="time, cost: first compile in so many processes")
    parser.add_argument("--peer-configs", type=int, default=8, help="peers' tuning: configurations tried per kernel")
    parser.add_argument("--peer-tuning", type=Path, help="time, cost: take what an earlier tuning of peers chose")
    parser.add_argument("--heads-checked", type=int, default=0, metavar="H", help="check: heads; default by length")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin nothing new after so many seconds")
    parser.add_argument("--simulated", action="store_true", help="check: all ranks in this process")
    parser.add_argument(
        "--layers", type=int, default=1, help="time: forwards before as many backwards; figures are of one"
    )
    parser.add_argument(
        "--rank-layers", type=int, metavar="N", help="time: of ranks, of which W hold W times as many; else as --layers"
    )
    parser.add_argument(
        "--skip", nargs="+", type=Path, default=[], metavar="FILE", help="check: not what is ok in these"
    )
    parser.add_argument(
        "--graphs", action="store_true", help="time: calls captured in CUDA graphs, so that the host does not count"
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--peers-first", action="store_true", help="time, cost: peers before ours")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    on_cuda = chosen.device == "cuda"
    chosen.backend = chosen.backend or ("triton" if on_cuda else "eager")
    chosen.dtype = chosen.dtype or ("bfloat16" if on_cuda else "float64")
    chosen.rank_layers = chosen.layers if chosen.rank_layers is None else chosen.rank_layers
    wrong = _contradictions(chosen)
    if wrong:
        parser.error(wrong[0])
    return chosen


def _contradictions(chosen: argparse.Namespace) -> list[str]:
    found = {
        "--layers: allowed: an integer of at least 1": chosen.layers < 1,
        "--rank-layers: allowed: an integer of at least 1": chosen.rank_layers < 1,
        "--layers is of `time` alone": chosen.layers > 1 and chosen.command != "time",
        "--rank-layers is of `time` alone": chosen.rank_layers > 1 and chosen.command != "time",
        "--graphs is of `time` alone": chosen.graphs and chosen.command != "time",
        f"--graphs: allowed: with --device cuda, not {chosen.device}": chosen.graphs and chosen.device != "cuda",
        "--graphs is of ours alone: without --peers": chosen.graphs and chosen.peers,
        "--peers-first needs --peers": chosen.peers_first and not chosen.peers,
        "--skip is of `check` alone": bool(chosen.skip) and chosen.command != "check",
        f"--out is {chosen.out}, which --skip reads: its rows would be lost": chosen.out.resolve()
        in [path.resolve() for path in chosen.skip],
    }
    return [text for text, wrong in found.items() if wrong]


def _join_group(device: str) -> None:
    """NCCL wants a device for every rank; ranks that share one meet over gloo."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29507"}.items():
        os.environ.setdefault(name, value)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    backend, options = "gloo", None
    if device == "cuda":
        devices = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % devices)
        if devices >= ranks:  # as docs/context_parallel.md says: a gather is placed before kernels that began earlier
            backend, options = "nccl", dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.config.max_ctas = 8
    dist.init_process_group(backend, rank=rank, world_size=ranks, pg_options=options)


def _left_out(figure: dict[str, Any]) -> bool:
    return "left_out" in figure or any("left_out" in figure.get(part, {}) for part in ("one", "ranks"))


def _write(chosen: argparse.Namespace, figures: Sequence[dict[str, Any]]) -> None:
    about = {
        "arguments": " ".join(sys.argv[1 : sys.argv.index("--out")] if "--out" in sys.argv else sys.argv[1:]),
        "machine": {**machine(chosen.device), "fla": cp_peers.version()},
        "ranks": dist.get_world_size() if dist.is_initialized() else "simulated",
        "transport": dist.get_backend() if dist.is_initialized() else "none",
        "dtype": chosen.dtype,
        "backend": chosen.backend,
        **(numbers_of(chosen) if chosen.command == "check" else {}),
        "left_out": sum(_left_out(figure) for figure in figures),
    }
    lines = ",\n".join("  " + json.dumps(figure) for figure in figures)
    head = json.dumps(about, indent=1).removesuffix("\n}")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(f'{head},\n "figures": [\n{lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
