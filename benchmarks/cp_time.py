"""Times of context parallelism: real ranks against one device, and simulated ranks one at a time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import cp_peers
import cp_warm
import torch
import torch.distributed as dist
from cp_graph import Meeting, NotReplayedError, heard_over_store, replays
from cp_loop import Steady, steady
from cp_parts import Clock, default_clock, own_parts, set_thread_clock
from cp_workers import Budget
from torch import Tensor
from torch.nn.functional import normalize, softplus

from benchmarks.harness.tuning import autotuner_kept
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


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One op at one size, ours or a peer's."""

    op: Op
    who: str
    function: Callable[..., Any]
    tokens: int
    heads: int

    @property
    def size(self) -> int:
        return self.tokens * self.heads

    @property
    def about(self) -> Figure:
        return {"op": self.op.name, "who": self.who, "T": self.tokens, "H": self.heads}


def subjects(chosen: argparse.Namespace, who: str) -> Iterator[Subject]:
    """Small sizes first: of each every op."""
    sizes = sorted(product(numbers(chosen.tokens), numbers(chosen.heads)), key=lambda size: size[0] * size[1])
    for (tokens, heads), name in product(sizes, chosen.ops.split(",")):
        if who in implementations(chosen, name):
            yield subject(chosen, name, who, tokens, heads)


def implementations(chosen: argparse.Namespace, name: str) -> list[str]:
    return ["kcpgen", *(["fla"] if chosen.peers and cp_peers.available(name) else [])]


def subject(chosen: argparse.Namespace, name: str, who: str, tokens: int, heads: int) -> Subject:
    op = load_op(GENERATED / name)
    function = cp_peers.available(name) if who == "fla" else partial(op.chunk, backend=chosen.backend)
    assert function is not None
    return Subject(op=op, who=who, function=function, tokens=tokens, heads=heads)


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


# (op, who) -> kind of call -> why a peer refuses it on one device: found before anything is timed, then left out.
REFUSED: dict[tuple[str, str], dict[str, str]] = {}


def calls_of(it: Subject, inputs: dict[str, Tensor], *, layers: int = 1, **keywords: Any) -> dict[str, Call]:
    """layers: how many a training call has, each with a graph of its own over the same inputs: all forwards come before
    all backwards, which go the other way."""
    do = torch.ones_like(inputs["v"])

    def forward() -> Tensor:
        o: Tensor = it.function(*inputs.values(), **keywords)[0]
        return o

    def training() -> Any:
        outputs = [forward() for _ in range(layers)]
        while outputs:
            gradients: Any = None  # those of the layer behind are taken up by now
            gradients = torch.autograd.grad(outputs.pop(), list(inputs.values()), do)
        return gradients

    calls: dict[str, Call] = {"forward": forward, "forward+backward": training}
    refused = REFUSED.get((it.op.name, it.who), {})
    return {kind: call for kind, call in calls.items() if kind not in refused}


def time_ranks(chosen: argparse.Namespace) -> Iterator[Figure]:
    """One device (rank 0, the others wait) and all ranks."""
    yield from _figures(chosen, Budget(chosen.budget_s), [(dist.get_world_size(), _many)])


def cost(chosen: argparse.Namespace) -> Iterator[Figure]:
    """One device against ranks simulated in turn: what each rank computes, and how long that takes it alone."""
    yield from _figures(chosen, Budget(chosen.budget_s), [(ranks, _simulated) for ranks in numbers(chosen.ranks)])


def _figures(
    chosen: argparse.Namespace, budget: Budget, spreads: Sequence[tuple[int, Callable[..., Figure]]]
) -> Iterator[Figure]:
    """All of ours before any of theirs, whose tuning may take what time there is; `--peers-first` the other way."""
    order = ("kcpgen", "fla") if chosen.peers else ("kcpgen",)
    for who in reversed(order) if chosen.peers_first else order:
        with autotuner_kept():
            yield from _figures_of(chosen, budget, spreads, who)


def _figures_of(
    chosen: argparse.Namespace, budget: Budget, spreads: Sequence[tuple[int, Callable[..., Figure]]], who: str
) -> Iterator[Figure]:
    agreements = cp_warm.prepare(chosen, budget, who)
    fits = _Fits(chosen, budget)
    for it in subjects(chosen, who):
        agreement = agreements.get((it.op.name, who))
        refused = {"left_out": agreement} if isinstance(agreement, str) else None
        one = refused or fits.run(it, "one device", chosen.layers, lambda: _one(chosen, it))  # noqa: B023
        for ranks, measure in spreads:
            many = refused or fits.run(
                it,
                f"{ranks} ranks",
                chosen.rank_layers,
                lambda: measure(chosen, it, ranks),  # noqa: B023
            )
            figure = _figure(chosen, it, one, many)
            kind = f"{'real' if dist.is_initialized() else 'simulated'}_ranks"
            refusals = REFUSED.get((it.op.name, who))
            yield {**figure, kind: ranks, "o_to_one": agreement, **({"refused": refusals} if refusals else {})}


def _figure(chosen: argparse.Namespace, it: Subject, one: Figure, many: Figure) -> Figure:
    """speedup: one device's time by that of all ranks; work: what ranks compute in all, by what one device does."""
    found: Figure = {**it.about, "K": chosen.width, "layers": chosen.layers, "one": one, "ranks": many}
    if chosen.graphs:
        found["graphs"] = True
    if chosen.rank_layers != chosen.layers:
        found["rank_layers"] = chosen.rank_layers
    if "ms" in one and "ms" in many:
        found["speedup"] = {k: round(one["ms"][k] / ms, 3) for k, ms in many["ms"].items() if k in one["ms"]}
    if "ms" in one and "computes_ms" in many:
        found["work"] = {k: round(ms / one["ms"][k], 3) for k, ms in many["computes_ms"].items()}
    return found


def repeats_of(chosen: argparse.Namespace, it: Subject) -> int:
    """Fewer of what takes long anyway."""
    return max(min(3, chosen.repeats), min(chosen.repeats, chosen.repeats * 2**22 // it.size))


def loops_of(chosen: argparse.Namespace, it: Subject, kind: str, deep: int) -> tuple[int, int]:
    """How many calls of a kind make a loop, and how many layers each of them has, `deep` where gradients follow: about
    `repeats_of` layers in all."""
    layers = deep if kind == "forward+backward" else 1
    return -(-repeats_of(chosen, it) // layers), layers


class _Fits:
    """Leaves out, on all ranks alike, what memory or time will not do for, going by smaller sizes.

    A rank that runs out of memory takes the group along.
    """

    def __init__(self, chosen: argparse.Namespace, budget: Budget) -> None:
        on_cuda = chosen.device == "cuda"
        self._limit = 0.92 * torch.cuda.get_device_properties(0).total_memory if on_cuda else float("inf")
        self._chosen = chosen
        self._budget = budget
        self._bytes: dict[tuple[str, str, str], float] = {}
        self._seconds: dict[tuple[str, str, str], float] = {}

    def run(self, it: Subject, where: str, deep: int, measure: Callable[[], Figure]) -> Figure:
        repeats, layers = loops_of(self._chosen, it, "forward+backward", deep)
        key, work = (it.op.name, it.who, where), it.size * repeats * layers
        reason = _of_rank_0(self._reason(key, it.size, work))
        if reason:
            return {"left_out": reason}
        start = time.monotonic()
        found = measure()
        seconds = (time.monotonic() - start) / work
        self._seconds[key] = min(seconds, self._seconds.get(key, seconds))  # what compiled says nothing of the next
        self._bytes[key] = _largest(found.get("peak_bytes", 0) / it.size)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found

    def _reason(self, key: tuple[str, str, str], size: int, work: int) -> str:
        needed, seconds = self._bytes.get(key, 0.0) * size, self._seconds.get(key, 0.0) * work
        if needed > self._limit:
            return f"needs about {needed / 2**30:.0f} GiB"
        if seconds > self._budget.left or self._budget.left < 5.0:
            return f"no time left: {max(0.0, self._budget.left):.0f} s, takes about {seconds:.0f} s"
        return ""


def _of_rank_0(text: str) -> str:
    if not dist.is_initialized():
        return text
    found = [text]
    dist.broadcast_object_list(found)
    return found[0]


def _largest(number: float) -> float:
    """Over all ranks."""
    if not dist.is_initialized():
        return number
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, number)
    return max(found)


def _one(chosen: argparse.Namespace, it: Subject) -> Figure:
    found: Figure = {}
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = _measured(
            chosen,
            it,
            lambda: calls_of(it, draw(it.op, it.tokens, it.heads, chosen, 0), layers=chosen.layers),
            Meeting(),
            chosen.layers,
        )
    if dist.is_initialized():
        dist.barrier()
    return found


def _many(chosen: argparse.Namespace, it: Subject, ranks: int) -> Figure:
    """ms and memory of the slowest rank, parts of every rank."""
    rank = dist.get_rank()
    offsets = torch.tensor([0, it.tokens], device=chosen.device)
    if it.who == "kcpgen":
        context: Any = build_cp_context(offsets, cu_seqlens_cpu=offsets.cpu())
    else:
        context = cp_peers.context(offsets, dist.group.WORLD)
    inputs = draw(it.op, it.tokens // ranks, it.heads, chosen, rank)
    calls = calls_of(it, inputs, layers=chosen.rank_layers, cp_context=context)
    settle = getattr(context, "settle", torch.cuda.synchronize)
    meeting = Meeting(together=dist.barrier, settle=settle, heard=heard_over_store)
    found = _measured(chosen, it, lambda: calls, meeting, chosen.rank_layers)
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, found)
    if any("ms" not in share for share in shares):
        return {"failed": [share.get("failed", "") for share in shares]}
    parts, sent = _parts_and_bytes(chosen, it, calls)
    all_parts: list[Any] = [None] * ranks
    dist.all_gather_object(all_parts, parts)
    return {
        **{of: {kind: max(share[of][kind] for share in shares) for kind in calls} for of in ("ms", "host_ms")},
        "peak_bytes": max(share["peak_bytes"] for share in shares),
        "sent_bytes": sent,
        "parts_ms_by_rank": all_parts,
    }


def _measured(
    chosen: argparse.Namespace, it: Subject, make_calls: Callable[[], dict[str, Call]], meeting: Meeting, deep: int
) -> Figure:
    """ms of each call in a steady loop, a layer's share of it, and the host's part (see `steady`); peak memory, of all
    layers. With --graphs, of replays."""
    on_cuda = chosen.device == "cuda"
    try:
        calls = make_calls()
        calls["forward"]()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        times: dict[str, Steady] = {}
        peak = 0
        for kind, call in calls.items():
            repeats, layers = loops_of(chosen, it, kind, deep)
            if chosen.graphs:
                found = replays(call, chosen.device, repeats, meeting, layers=layers)
                times[kind], peak = found.times, max(peak, found.peak_bytes)
            else:
                times[kind] = steady(call, chosen.device, repeats, meeting.together, layers=layers)
                peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    except ContextParallelError:
        raise
    except NotReplayedError as error:
        return {"failed": f"in a CUDA graph, {error}"}
    except Exception as error:  # a peer may refuse a device or a version in any way
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return {
        "ms": {kind: round(each.ms, 4) for kind, each in times.items()},
        "host_ms": {kind: round(each.host_ms, 4) for kind, each in times.items()},
        "peak_bytes": peak,
    }


def _parts_and_bytes(
    chosen: argparse.Namespace, it: Subject, calls: dict[str, Call]
) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Mean ms of each part of a layer, and the bytes that one sends; from calls of their own, in a loop as those timed.

    A part is a stretch of the stream: where the host is behind the device, what it launches late is in it.
    """
    clock, sent = Clock(chosen.device), _Sent()
    parts: dict[str, dict[str, float]] = {}
    bytes_: dict[str, int] = {}
    own = it.who == "kcpgen"
    with own_parts(chosen.device) if own else cp_peers.parts(), default_clock(clock), sent.counted(it.who):
        for kind, call in calls.items():
            sent.total = 0
            repeats, layers = loops_of(chosen, it, kind, chosen.rank_layers)
            dist.barrier()
            for _ in range(repeats):
                call()
            parts[kind] = {part: round(ms / (repeats * layers), 4) for part, ms in clock.totals().items()}
            bytes_[kind] = sent.total // (repeats * layers)
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


def _simulated(chosen: argparse.Namespace, it: Subject, ranks: int) -> Figure:
    """ms from the first rank's start to the last one's end on a network that takes no time; parts of every rank.

    computes_ms: of all ranks together, without waits; share: how it divides into pre-process, merge and the rest.
    """
    repeats = repeats_of(chosen, it)
    try:
        whole = draw(it.op, it.tokens, it.heads, chosen, 0)
        found = on_simulated_ranks(
            chosen, it, whole, ranks, lambda call, transport: _rank_alone(call, chosen, transport, repeats)
        )
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    kinds = found[0]
    computes = {kind: sum(sum(rank[kind][1]) for rank in found) for kind in kinds}
    return {
        "ms": {kind: round(last_end([rank[kind][1] for rank in found]), 4) for kind in kinds},
        "computes_ms": {kind: round(ms, 4) for kind, ms in computes.items()},
        "share": {kind: _share([rank[kind][0] for rank in found], ms) for kind, ms in computes.items()},
        "parts_ms_by_rank": [{kind: parts for kind, (parts, _) in rank.items()} for rank in found],
    }


def on_simulated_ranks(
    chosen: argparse.Namespace,
    it: Subject,
    whole: dict[str, Tensor],
    ranks: int,
    measure: Callable[[Call, SimulatedTransport], Any],
) -> list[dict[str, Any]]:
    """`measure(call, transport)` of every rank's forward and training call; each holds its part of `whole`."""
    offsets = torch.tensor([0, it.tokens], device=chosen.device)
    share = it.tokens // ranks

    def body(transport: SimulatedTransport) -> dict[str, Any]:
        span = slice(transport.rank * share, (transport.rank + 1) * share)
        inputs = {n: x.detach()[:, span].contiguous().requires_grad_() for n, x in whole.items()}
        if it.who == "kcpgen":
            context: Any = build_cp_context(offsets, transport, cu_seqlens_cpu=offsets.cpu())
        else:
            context = cp_peers.simulated_context(offsets, transport)
        calls = calls_of(it, inputs, cp_context=context)
        return {kind: measure(call, transport) for kind, call in calls.items()}

    with own_parts(chosen.device) if it.who == "kcpgen" else cp_peers.simulated():
        return run_ranks(ranks, body)


def _share(parts: Sequence[dict[str, float]], computes: float) -> dict[str, float]:
    """Main: whatever is neither pre-process nor merge, launches and all; so it is counted alike for every op."""
    extra = {part: sum(rank.get(part, 0.0) for rank in parts) / computes for part in ("pre-process", "merge")}
    return {**{part: round(x, 4) for part, x in extra.items()}, "main": round(1 - sum(extra.values()), 4)}


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
    call: Call, chosen: argparse.Namespace, transport: SimulatedTransport, repeats: int
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
        for repeat in range(repeats + 2):
            if repeat == 2:
                clock.totals()
            marks[:] = [clock.now()]
            call()
            runs.append([*marks, clock.now()])
    parts = {part: round(ms / repeats, 4) for part, ms in clock.totals().items() if part != "gather"}
    return parts, _stretches(clock, runs[2:])


def _stretches(clock: Clock, runs: list[list[Any]]) -> list[float]:
    """Marks are start, sent, waits, goes on, sent, ..., end: every third span is a wait."""
    spans = [[clock.between(a, b) for a, b in pairwise(run)] for run in runs]
    means = [sum(column) / len(runs) for column in zip(*spans, strict=True)]
    return [mean for index, mean in enumerate(means) if index % 3 != 2]
