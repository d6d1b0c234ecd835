"""What a reader must know to compare two runs: the device, the versions, how it was measured."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

import torch

from benchmarks.harness.calls import PEERS, installed
from benchmarks.harness.floor import Rates
from benchmarks.harness.inputs import BOUND
from kcpgen import __version__


def environment(options: argparse.Namespace, rates: Rates, absent: dict[str, str]) -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kcpgen": __version__,
        "peers": {peer.name: installed(peer.distribution) for peer in PEERS},
        "absent": absent,
        "peer_environment": {key: os.environ.get(key) for peer in PEERS for key in peer.environment},
        "peer_tuning": "all configurations" if options.peer_configs is None else f"{options.peer_configs} a kernel",
        "copy_bytes_per_s": rates.copy,
        "matmul_flop_per_s": rates.matmul,
        "rounds": options.rounds,
        "warm_ups": options.warm_ups,
        "segments": options.segments,
        "portable": options.portable,
        "inputs": "bfloat16 data, float32 log decays and parameters, unit keys; no states, no norm in the call",
        "bounded": f"gate computed in the kernel by ours and the peer, log decay promised in [{BOUND:g}, 0]",
    }
