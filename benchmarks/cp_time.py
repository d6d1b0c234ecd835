"""Times of context parallelism: real ranks against one device, and simulated ranks one at a time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import cp_peers
import torch
import torch.distributed as dist
from cp_parts import Clock, default_clock, median_ms, own_parts, set_thread_clock
from torch import Tensor
from torch.nn.functional import normalize, softplus

from kcpgen.runtime import build_cp_context
from kcpgen.runtime.context_parallel.errors import ContextParallelError
from kcpgen.runtime.context_parallel.transport import GroupTransport
from kcpgen.simulate.ranks import SimulatedTransport, run_ranks
from kcpgen.verify.inputs import contracting_signs
from kcpgen.verify.op import Op, load_op

GENERATED = Path(__file__).resolve().parent.parent / "generated"
Figure = dict[str, Any]
Call = Callable[[], Any]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def subjects(chosen: argparse.Namespace) -> Iterator[tuple[Op, str, Callable[..., Any], int, int]]:
    """(op, whose, function, T, H): every op at every size, small ones first, ours and then theirs."""
    sizes = sorted(product(numbers(chosen.tokens), numbers(chosen.heads)), key=lambda size: size[0] * size[1])
    for name, (tokens, heads) in product(chosen.ops.split(","), sizes):
        op = load_op(GENERATED / name)
        yield op, "kcpgen", lambda *x, _op=op, **k: _op.chunk(*x, backend=chosen.backend, **k), tokens, heads
        theirs = cp_peers.available(name) if chosen.peers else None
        if theirs is not None:
            yield op, "fla", theirs, tokens, heads


def draw(op: Op, tokens: int, heads: int, chosen: argparse.Namespace, seed: int) -> dict[str, Tensor]:
    """Token inputs made on the device: unit keys, gates near one, erases that contract."""
    generator = torch.Generator(chosen.device).manual_seed(seed)
    data = getattr(torch, chosen.dtype)
    sizes = {"B": 1, "T": tokens, "H": heads, "HV": heads, "K": chosen.width, "V": chosen.width}
    found: dict[str, Tensor] = {}
    for name, letters in op.signature.inputs.items():
        shape = [sizes[letter] for letter in letters.split()]
        raw = torch.randn(shape, generator=generator, device=chosen.device, dtype=data)
        if name in op.description.log_decays:
            found[name] = (-0.1 * softplus(raw)).to(torch.float64 if data == torch.float64 else torch.float32)
        elif op.is_scalar(name):
            found[name] = raw.sigmoid()
        else:
            found[name] = normalize(raw, dim=-1) if op.is_key(name) else raw
    signs = contracting_signs(op)
    for term in op.description.terms:
        writers = [name for name in term.write if op.is_key(name)]
        for name in (n for n in term.erase if n in signs):
            shared = any(writer in term.erase for writer in writers)
            found[name] = found[name].sigmoid() if shared else signs[name] * found[writers[0]]
    return {name: x.contiguous().requires_grad_() for name, x in found.items()}


def calls_of(function: Callable[..., Any], inputs: dict[str, Tensor], **keywords: Any) -> dict[str, Call]:
    do = torch.ones_like(inputs["v"])

    def forward() -> Tensor:
        o: Tensor = function(*inputs.values(), **keywords)[0]
        return o

    return {
        "forward": forward,
        "forward+backward": lambda: torch.autograd.grad(forward(), list(inputs.values()), do),
    }


def time_ranks(chosen: argparse.Namespace) -> Iterator[Figure]:
    """One device (rank 0, the others wait) and all ranks."""
    fits = _Fits(chosen.device)
    for op, who, function, tokens, heads in subjects(chosen):
        size = tokens * heads
        one = fits.run((op.name, who, "one"), size, lambda: _one(chosen, op, function, tokens, heads))  # noqa: B023
        many = fits.run((op.name, who, "many"), size, lambda: _many(chosen, op, who, function, tokens, heads))  # noqa: B023
        yield _figure(chosen, op, who, tokens, heads, one, many)


def cost(chosen: argparse.Namespace) -> Iterator[Figure]:
    """One device against ranks simulated in turn: what each rank computes, and how long that takes it alone."""
    fits = _Fits(chosen.device)
    for op, who, function, tokens, heads in subjects(chosen):
        one = fits.run((op.name, who, "one"), tokens * heads, lambda: _one(chosen, op, function, tokens, heads))  # noqa: B023
        for ranks in numbers(chosen.ranks):
            many = _simulated(chosen, op, who, function, tokens, heads, ranks)
            yield {**_figure(chosen, op, who, tokens, heads, one, many), "simulated_ranks": ranks}


def _figure(chosen: argparse.Namespace, op: Op, who: str, tokens: int, heads: int, one: Figure, many: Figure) -> Figure:
    found: Figure = {"op": op.name, "who": who, "T": tokens, "H": heads, "K": chosen.width, "one": one, "ranks": many}
    if "ms" in one and "ms" in many:
        found["speedup"] = {k: round(one["ms"][k] / ms, 3) for k, ms in many["ms"].items() if k in one["ms"]}
    return found


class _Fits:
    """Leaves out, on all ranks alike, what will not fit: a rank that runs out of memory takes the group along."""

    def __init__(self, device: str) -> None:
        self._limit = 0.92 * torch.cuda.get_device_properties(0).total_memory if device == "cuda" else float("inf")
        self._per_size: dict[tuple[str, str, str], float] = {}

    def run(self, key: tuple[str, str, str], size: int, measure: Callable[[], Figure]) -> Figure:
        needed = self._per_size.get(key, 0.0) * size
        if needed > self._limit:
            return {"left_out": f"needs about {needed / 2**30:.0f} GiB"}
        found = measure()
        self._per_size[key] = _largest(found.get("peak_bytes", 0) / size)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found


def _largest(number: float) -> float:
    """Over all ranks."""
    if not dist.is_initialized():
        return number
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, number)
    return max(found)


def _one(chosen: argparse.Namespace, op: Op, function: Callable[..., Any], tokens: int, heads: int) -> Figure:
    found: Figure = {}
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = _measured(chosen, calls_of(function, draw(op, tokens, heads, chosen, 0)), lambda: None)
    if dist.is_initialized():
        dist.barrier()
    return found


def _many(
    chosen: argparse.Namespace, op: Op, who: str, function: Callable[..., Any], tokens: int, heads: int
) -> Figure:
    """ms and memory of the slowest rank, parts of every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    offsets = torch.tensor([0, tokens], device=chosen.device)
    if who == "kcpgen":
        context: Any = build_cp_context(offsets, cu_seqlens_cpu=offsets.cpu())
    else:
        context = cp_peers.context(offsets, dist.group.WORLD)
    inputs = draw(op, tokens // ranks, heads, chosen, rank)
    calls = calls_of(function, inputs, cp_context=context)
    found = _measured(chosen, calls, dist.barrier)
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, found)
    if any("ms" not in share for share in shares):
        return {"failed": [share.get("failed", "") for share in shares]}
    parts, sent = _parts_and_bytes(chosen, who, calls)
    all_parts: list[Any] = [None] * ranks
    dist.all_gather_object(all_parts, parts)
    return {
        "ms": {kind: max(share["ms"][kind] for share in shares) for kind in calls},
        "peak_bytes": max(share["peak_bytes"] for share in shares),
        "sent_bytes": sent,
        "parts_ms_by_rank": all_parts,
    }


def _measured(chosen: argparse.Namespace, calls: dict[str, Call], barrier: Call) -> Figure:
    """Medians in ms, and peak memory."""
    on_cuda = chosen.device == "cuda"
    clock = Clock(chosen.device)
    try:
        calls["forward"]()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        found: Figure = {
            "ms": {kind: round(median_ms(call, clock, chosen.repeats, barrier), 4) for kind, call in calls.items()}
        }
    except ContextParallelError:
        raise
    except Exception as error:  # a peer may refuse a device or a version in any way
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**found, "peak_bytes": torch.cuda.max_memory_allocated() if on_cuda else 0}


def _parts_and_bytes(
    chosen: argparse.Namespace, who: str, calls: dict[str, Call]
) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Mean ms of each part of a call, from calls of their own, and the bytes that one sends."""
    clock, sent = Clock(chosen.device), _Sent()
    parts: dict[str, dict[str, float]] = {}
    bytes_: dict[str, int] = {}
    with own_parts(chosen.device) if who == "kcpgen" else cp_peers.parts(), default_clock(clock), sent.counted(who):
        for kind, call in calls.items():
            sent.total = 0
            for _ in range(chosen.repeats):
                dist.barrier()
                call()
            parts[kind] = {part: round(ms / chosen.repeats, 4) for part, ms in clock.totals().items()}
            bytes_[kind] = sent.total // chosen.repeats
    return parts, bytes_


class _Sent:
    """Bytes that this rank puts into all-gathers."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, payload: Tensor) -> None:
        self.total += payload.numel() * payload.element_size()

    @contextmanager
    def counted(self, who: str) -> Iterator[None]:
        gather = GroupTransport.all_gather

        def counting(transport: GroupTransport, payload: Tensor, timeout: float) -> Any:
            self.add(payload)
            return gather(transport, payload, timeout)

        ours = mock.patch.object(GroupTransport, "all_gather", counting)
        with ours if who == "kcpgen" else cp_peers.counting(self.add):
            yield


def _simulated(
    chosen: argparse.Namespace, op: Op, who: str, function: Callable[..., Any], tokens: int, heads: int, ranks: int
) -> Figure:
    """ms from the first rank's start to the last one's end on a network that takes no time; parts of every rank."""
    offsets = torch.tensor([0, tokens], device=chosen.device)
    whole = draw(op, tokens, heads, chosen, 0)
    share = tokens // ranks

    def body(transport: SimulatedTransport) -> dict[str, tuple[dict[str, float], list[float]]]:
        span = slice(transport.rank * share, (transport.rank + 1) * share)
        inputs = {n: x.detach()[:, span].contiguous().requires_grad_() for n, x in whole.items()}
        if who == "kcpgen":
            context: Any = build_cp_context(offsets, transport, cu_seqlens_cpu=offsets.cpu())
        else:
            context = cp_peers.simulated_context(offsets, transport)
        calls = calls_of(function, inputs, cp_context=context)
        return {kind: _rank_alone(call, chosen, transport) for kind, call in calls.items()}

    try:
        with own_parts(chosen.device) if who == "kcpgen" else cp_peers.simulated():
            found = run_ranks(ranks, body)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return {
        "ms": {kind: round(last_end([rank[kind][1] for rank in found]), 4) for kind in found[0]},
        "parts_ms_by_rank": [{kind: parts for kind, (parts, _) in rank.items()} for rank in found],
    }


def last_end(stretches: list[list[float]]) -> float:
    """When the last rank ends, if all begin at once.

    stretches: of each rank, how long it computes up to sending, from there to waiting, from there to sending again,
    and so on; a wait ends when all have sent.
    """
    clocks = [0.0] * len(stretches)
    for exchange in range(len(stretches[0]) // 2):
        sent = [clock + rank[2 * exchange] for clock, rank in zip(clocks, stretches, strict=True)]
        ready = [clock + rank[2 * exchange + 1] for clock, rank in zip(sent, stretches, strict=True)]
        clocks = [max(clock, *sent) for clock in ready]
    return max(clock + rank[-1] for clock, rank in zip(clocks, stretches, strict=True))


def _rank_alone(
    call: Call, chosen: argparse.Namespace, transport: SimulatedTransport
) -> tuple[dict[str, float], list[float]]:
    """Mean ms of each part of a rank's call and of its stretches; the first two calls are left out."""
    clock = Clock(chosen.device)
    set_thread_clock(clock)
    marks: list[Any] = []
    gather, collect = transport.all_gather, transport.collect

    def sending(payload: Tensor, timeout: float) -> Any:
        marks.append(clock.now())
        return gather(payload, timeout)

    def waiting(number: int) -> Tensor:
        marks.append(clock.now())
        gathered = collect(number)
        marks.append(clock.now())
        return gathered

    runs: list[list[Any]] = []
    with mock.patch.object(transport, "all_gather", sending), mock.patch.object(transport, "collect", waiting):
        for repeat in range(chosen.repeats + 2):
            if repeat == 2:
                clock.totals()
            marks[:] = [clock.now()]
            call()
            runs.append([*marks, clock.now()])
    parts = {part: round(ms / chosen.repeats, 4) for part, ms in clock.totals().items() if part != "gather"}
    return parts, _stretches(clock, runs[2:])


def _stretches(clock: Clock, runs: list[list[Any]]) -> list[float]:
    """Marks are start, sent, waits, goes on, sent, ..., end: every third span is a wait."""
    spans = [[clock.between(a, b) for a, b in pairwise(run)] for run in runs]
    means = [sum(column) / len(runs) for column in zip(*spans, strict=True)]
    return [mean for index, mean in enumerate(means) if index % 3 != 2]
