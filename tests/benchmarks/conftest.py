"""A device that is not there: every reading faked, everything else of the harness real, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.harness import calls, device, session
from benchmarks.harness.device import Attempt, Timing

SCAN = "scan_kernel"


@pytest.fixture
def faked_device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Set `kernels` (of every call) and `ms` (by implementation); the ops run on their eager backend."""
    faked = SimpleNamespace(kernels={SCAN: 0.5, "void at::native::fill<float>": 0.1}, ms={})

    def interleaved(attempts: dict[str, Attempt], rounds: int) -> dict[str, Timing]:
        return {
            name: Timing(samples=(faked.ms.get(name, 1.0),) * rounds, host_ms=0.1, peak_mib=attempt.peak_mib)
            for name, attempt in attempts.items()
        }

    def ran(value: Any) -> Callable[[Callable[[], Any]], Any]:
        def after(call: Callable[[], Any]) -> Any:
            call()
            return value

        return after

    monkeypatch.setattr(calls, "BACKEND", "eager")
    monkeypatch.setattr(session, "DEVICE", "cpu")
    monkeypatch.setattr(session, "environment", lambda options, rates, absent: {"device": "none", "absent": absent})
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(device, "_host_ms", ran(0.1))
    monkeypatch.setattr(device, "_peak_mib", ran(3.0))
    monkeypatch.setattr(device, "kernels", lambda call: faked.kernels)
    monkeypatch.setattr(device, "triton_names", lambda prefixes: {SCAN})
    monkeypatch.setattr(device, "interleaved", interleaved)
    monkeypatch.setattr(device, "copy_rate", lambda: 4e12)
    monkeypatch.setattr(device, "matmul_rate", lambda: 7e14)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return faked
