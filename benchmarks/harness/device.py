"""What a GPU says of a call: its time, its peak memory, its kernels; and the two rates that bound it."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PLAIN = re.compile(r"\w+")  # a kernel made by a DSL; those of torch and CUDA libraries have mangled names
LIBRARY = re.compile(r"nvjet|cutlass|sm\d+_|ampere_|hopper_")
CALL = re.compile(r"cu(da)?[A-Z]")  # the host's calls, which a profile lists too
CYCLES = 1.8e6  # of the GPU's clock in a millisecond, about


class DeviceLostError(RuntimeError):
    """A kernel faulted: nothing in this process can use the device any more."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """samples: device ms of each round. host_ms: what one call keeps the host for. peak_mib: above what was there."""

    samples: tuple[float, ...]
    host_ms: float
    peak_mib: float

    @property
    def ms(self) -> float:
        return statistics.median(self.samples)


@dataclass(kw_only=True)
class Attempt:
    """A call that has been warmed up; `failure` says why it is not to be timed."""

    call: Callable[[], Any]
    result: Any = None
    failure: str = ""
    host_ms: float = 0.0
    peak_mib: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)


def warm_up(call: Callable[[], Any], times: int) -> Attempt:
    """Compile, tune, and run a few times. What the call raises is the attempt's failure."""
    attempt = Attempt(call=call)
    try:
        attempt.result = call()
        synchronize()
        for _ in range(times):
            attempt.host_ms = _host_ms(call)
        attempt.peak_mib = _peak_mib(call)
        attempt.kernels = kernels(call)
    except Exception as error:
        attempt.result, attempt.failure = None, first_line(error)
        synchronize()  # an error of the device shows again here, one of the call does not
    return attempt


def synchronize() -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLostError(first_line(error)) from error


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _host_ms(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    kept = call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    del kept
    return 1e3 * spent


def _peak_mib(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return float(peak) / 2**20


def interleaved(attempts: Mapping[str, Attempt], rounds: int) -> dict[str, Timing]:
    """Time all calls in turn, `rounds` times. The device waits until the host has launched a call: no gaps."""
    spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in attempts}
    for _ in range(rounds):
        for name, attempt in attempts.items():
            spans[name].append(_span(attempt))
        synchronize()
    return {
        name: Timing(
            samples=tuple(start.elapsed_time(end) for start, end in spans[name]),
            host_ms=attempt.host_ms,
            peak_mib=attempt.peak_mib,
        )
        for name, attempt in attempts.items()
    }


def _span(attempt: Attempt) -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(CYCLES * (0.2 + 1.5 * min(attempt.host_ms, 20.0))))
    start.record()
    kept = attempt.call()
    end.record()
    del kept
    return start, end


def kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Kernel name -> device ms within one call."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        kept = call()
        torch.cuda.synchronize()
    del kept
    return {
        event.key: event.device_time_total / 1e3
        for event in profiler.key_averages()
        if event.device_time_total and not CALL.match(event.key)
    }


def triton_names(prefixes: Iterable[str]) -> set[str]:
    """Names of all Triton kernels in modules imported under one of the prefixes."""
    from triton.runtime.jit import JITFunction

    names = set()
    for module, loaded in list(sys.modules.items()):
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes):
            for value in list(vars(loaded).values()):
                found = value
                while not isinstance(found, JITFunction) and hasattr(found, "fn"):  # tuners and heuristics wrap it
                    found = found.fn
                if isinstance(found, JITFunction):
                    names.add(found.__name__)
    return names


def foreign_kernels(found: Mapping[str, float], own: set[str]) -> str:
    """What is wrong with the kernels of a call that should run `own` and what torch brings, "" if nothing."""
    if not set(found) & own:
        return f"none of its Triton kernels ran, but {', '.join(sorted(found)) or 'nothing'}"
    strangers = sorted(name for name in found if PLAIN.fullmatch(name) and not LIBRARY.match(name) and name not in own)
    return f"other kernels ran: {', '.join(strangers)}" if strangers else ""


def copy_rate() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _seconds(lambda: target.copy_(source))


def matmul_rate() -> float:
    """FLOP per second of a bfloat16 product of two random 8192 x 8192 matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _seconds(lambda: a @ b)


def _seconds(call: Callable[[], Any]) -> float:
    attempt = Attempt(call=call)
    call()
    return interleaved({"": attempt}, 10)[""].ms / 1e3
