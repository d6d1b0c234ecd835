"""Real ranks for the tests: processes that meet over gloo, each of which runs one function of this module."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cp_rows import OPS, op, relative, row

from kcpgen.runtime import build_cp_context
from kcpgen.runtime.awaited import Awaited
from kcpgen.runtime.context_parallel import torch_op, transport
from kcpgen.simulate.call import by_token, long_memory, on_one_rank
from kcpgen.verify.compare import evaluate


def run(ranks: int, body: Callable[..., Any], *arguments: Any, within: float = 120.0) -> list[Any]:
    """What `body(rank, *arguments)` returned, or the exception's type and text, for every rank."""
    context = get_context("spawn")
    results, end = context.SimpleQueue(), context.Barrier(ranks)
    port = free_port()
    processes = [
        context.Process(target=_process, args=(rank, ranks, port, results, end, body, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + within
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hung, f"ranks {hung} hang"
    found = {}
    while not results.empty():
        rank, result = results.get()
        found[rank] = result
    return [found.get(rank) for rank in range(ranks)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _process(
    rank: int, ranks: int, port: int, results: Any, end: Any, body: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        results.put((rank, body(rank, *arguments)))
    except Exception as error:
        traceback.print_exc()
        results.put((rank, (type(error).__name__, str(error))))
    with suppress(BrokenBarrierError):
        end.wait(60.0)  # rank 0 holds the store that the others may still read
    sys.stdout.flush()
    os._exit(0)  # a group that failed must not hold up the end of its processes


def every_op(rank: int, lengths: tuple[int, ...], layout: str) -> dict[str, float]:
    """Worst difference between the ranks together and one device, op by op, with checkpointing off and on."""
    return every_op_of(OPS, lengths, layout)


def every_op_of(names: Sequence[str], lengths: tuple[int, ...], layout: str = "contiguous") -> dict[str, float]:
    worst = {}
    for name in names:
        case = row(lengths)
        inputs = long_memory(op(name), case, "cpu")
        one = evaluate(op(name).chunk, inputs, case, backend="eager")
        cp = build_cp_context(torch.tensor(case.offsets), layout=layout)
        for checkpointed in (False, True):
            mine = on_one_rank(op(name), case, inputs, cp, checkpointed=checkpointed)
            found = {n: _whole(x, n in by_token(op(name)), cp.tokens) for n, x in mine.items()}
            worst[f"{name} {checkpointed}"] = max(relative(found, one).values())
    return worst


def _whole(share: torch.Tensor, tokens: bool, count: int) -> torch.Tensor:
    """Every rank's share put together."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([count]))
    if not tokens:
        total = share.clone()
        dist.all_reduce(total)
        return total
    parts = [share.new_empty(share.shape[0], int(n), *share.shape[2:]) for n in counts]
    for source, part in enumerate(parts):
        if source == dist.get_rank():
            part.copy_(share)
        dist.broadcast(part, source)
    return torch.cat(parts, dim=1)


# On three ranks of 12 tokens: with sequences across ranks, and without; one that begins on rank 1 and ends on rank 2.
CROSSING, APART, BEGUN = (30, 6), (12, 12, 12), (12, 24)
PATIENCE = 30.0  # seconds a rank would wait in a scenario where it should hear of trouble well before
SHORT = 1.0


def troubles(rank: int) -> dict[str, Any]:
    """What each kind of trouble made of this rank's call, every one in a group of its own."""
    transport.ANSWER_WITHIN = 1.0
    return {
        "sizes": _outcome(rank, other={"width": 4}),
        "sizes later": _outcome(rank, other={"width": 4}, before=True),
        "cu_seqlens": _outcome(rank, other={"lengths": (20, 16)}),
        "op": _outcome(rank, other={"name": "gla"}),
        "cu_seqlens later": _outcome(rank, other={"lengths": (29, 7)}, before=True),
        "shards later": _outcome(rank, other={"layout": (11, 13, 12)}, before=True),
        "crosses nothing": _outcome(rank, other={"lengths": APART}),
        "crosses nothing later": _outcome(rank, other={"lengths": APART}, before=True),
        "crosses alone": _outcome(rank, {"lengths": APART}, other={"lengths": CROSSING}),
        "crosses alone later": _outcome(rank, {"lengths": APART}, other={"lengths": CROSSING}, before=True),
        "stale context": stale_context(rank),
        "gradients": _outcome(rank, other={"gradients": False}),
        "gradients later": _outcome(rank, other={"gradients": False}, before=True),
        "arguments": _outcome(rank, other={"keywords": {"scale": "big"}}),
        "arguments, apart": _outcome(rank, {"lengths": APART}, other={"lengths": APART, "keywords": {"scale": "big"}}),
        "retry of one": _outcome(rank, other={"retry": True}),
        "retry of all": _outcome(rank, {"retry": True, "pause": 0.5 * rank}, other={"retry": True, "pause": 0.5}),
        "error inside": _outcome(rank, other={"broken": True}, after=True),
        "error in a run": _outcome(rank, {"lengths": BEGUN}, other={"lengths": BEGUN, "broken": True}, after=True),
        "no backward": backward_out_of_step(rank, 1),
        "no backward later": backward_out_of_step(rank, 3),
        "absent": _outcome(rank, {"timeout": SHORT}, other={"absent": True}),
        "absent, apart": _outcome(rank, {"lengths": APART, "timeout": SHORT}, other={"absent": True}),
    }


def _outcome(
    rank: int,
    usual: dict[str, Any] | None = None,
    *,
    other: dict[str, Any],
    before: bool = False,
    after: bool = False,
) -> dict[str, Any]:
    """One call in which rank 1 is `other` than the others; `before` and `after` it, one as it should be."""
    group = dist.new_group()
    if before:
        _call(group)
    found = _caught(lambda: _call(group, **(other if rank == 1 else usual or {})))
    if after:
        _call(group)
    return found


def _caught(call: Callable[[], Any]) -> dict[str, Any]:
    start = time.monotonic()
    found = {"error": "none", "text": ""}
    try:
        call()
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error)}
    return {**found, "seconds": time.monotonic() - start}


def _call(
    group: dist.ProcessGroup,
    *,
    name: str = "kda",
    lengths: tuple[int, ...] = CROSSING,
    layout: Any = (12, 12, 12),
    width: int = 8,
    keywords: dict[str, Any] | None = None,
    gradients: bool = True,
    retry: bool = False,
    pause: float = 0.0,
    timeout: float = PATIENCE,
    broken: bool = False,
    absent: bool = False,
) -> None:
    if absent:
        time.sleep(SHORT)
        return
    case = row(lengths, value_width=width)
    inputs = long_memory(op(name), case, "cpu")
    cp = build_cp_context(torch.tensor(case.offsets), group, layout=layout, timeout=timeout)
    refused = replace(inputs, keywords={**inputs.keywords, "scale": "big"})
    inputs = replace(inputs, keywords={**inputs.keywords, **(keywords or {})})
    if retry:
        with suppress(TypeError):
            on_one_rank(op(name), case, refused, cp)
        time.sleep(pause)
    with _broken_summary(broken), torch.set_grad_enabled(gradients):
        if gradients:
            on_one_rank(op(name), case, inputs, cp)
        else:
            tokens = {n: x.detach()[:, cp.shard.start : cp.shard.stop] for n, x in inputs.tokens.items()}
            op(name).chunk(**tokens, cp_context=cp)


def stale_context(rank: int) -> dict[str, Any]:
    """Rank 1 takes the context of the step before, where sequences crossed; none does in the others' new one."""
    group = dist.new_group()

    def call(lengths: tuple[int, ...], old: Any = None) -> Any:
        case = row(lengths)
        inputs = replace(long_memory(op("kda"), case, "cpu"), initial_state=None, d_state=None)
        cp = old or build_cp_context(torch.tensor(case.offsets), group, timeout=PATIENCE)
        tokens = {n: x.detach()[:, cp.shard.start : cp.shard.stop] for n, x in inputs.tokens.items()}
        op("kda").chunk(**tokens, cp_context=cp)
        return cp

    old = call(CROSSING)
    return _caught(lambda: call(CROSSING, old) if rank == 1 else call(APART))


@contextmanager
def _broken_summary(broken: bool) -> Iterator[None]:
    if not broken:
        yield
        return
    error = MemoryError("out of memory")
    with (
        mock.patch.object(torch_op.TorchForward, "summarise", side_effect=error),
        mock.patch.object(torch_op.TorchForward, "run", side_effect=error),
    ):
        yield


def backward_out_of_step(rank: int, step: int) -> dict[str, Any]:
    """In one step rank 1 skips the backward: its next forward meets the others' backward."""
    case = row(CROSSING)
    inputs = long_memory(op("kda"), case, "cpu")
    cp = build_cp_context(torch.tensor(case.offsets), dist.new_group(), timeout=SHORT)
    span = slice(cp.shard.start, cp.shard.stop)

    def steps() -> None:
        for number in range(1, step + 2):
            tokens = {n: x.detach()[:, span].requires_grad_() for n, x in inputs.tokens.items()}
            o, _ = op("kda").chunk(**tokens, cp_context=cp)
            if rank != 1 or number != step:
                o.sum().backward()

    return _caught(steps)


def failing_while_it_waits(rank: int) -> dict[str, Any]:
    """Rank 1 fails where it has joined an exchange and waits for a state: the others hear of it in their backward."""
    case = row((30, 6))
    inputs = long_memory(op("kda"), case, "cpu")
    cp = build_cp_context(torch.tensor(case.offsets), dist.new_group(), layout=(12, 12, 12), timeout=30.0)
    span = slice(cp.shard.start, cp.shard.stop)
    run = torch_op.TorchForward.run

    def fails(self: Any, sequences: range, initial: Any, final: Any) -> None:
        if isinstance(initial, Awaited):
            raise MemoryError("out of memory")
        run(self, sequences, initial, final)

    def forward() -> torch.Tensor:
        tokens = {name: x.detach()[:, span].requires_grad_() for name, x in inputs.tokens.items()}
        return op("kda").chunk(**tokens, cp_context=cp)[0]

    if rank == 1:
        with mock.patch.object(torch_op.TorchForward, "run", fails):
            return _caught(forward)
    o = forward()
    return _caught(lambda: o.sum().backward())


def many_contexts(rank: int) -> tuple[int, float]:
    """(notes of contexts left in the store, seconds) after a call with each of 50 contexts that cross nothing."""
    group = dist.new_group()
    case = row((16, 16))
    inputs = long_memory(op("gla"), case, "cpu")
    start = time.monotonic()
    for _ in range(50):
        cp = build_cp_context(torch.tensor(case.offsets), group, timeout=PATIENCE)
        on_one_rank(op("gla"), case, inputs, cp)
    seconds = time.monotonic() - start
    dist.barrier()
    store = cp.transport._board._store  # type: ignore[attr-defined]
    return sum(store.check([f"context/{number}"]) for number in range(1, 51)), seconds


def on_a_subgroup(rank: int) -> float | None:
    """Ranks 1 and 2 of three, in a group of their own."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    case = row((20, 32))
    inputs = long_memory(op("dplr"), case, "cpu")
    one = evaluate(op("dplr").chunk, inputs, case, backend="eager")
    cp = build_cp_context(torch.tensor(case.offsets), group)
    mine = on_one_rank(op("dplr"), case, inputs, cp)
    span = slice(cp.shard.start, cp.shard.stop)
    return max(float((mine[n] - one[n][:, span]).norm()) for n in by_token(op("dplr")))
