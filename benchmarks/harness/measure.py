"""One configuration: the op and its peers, checked, then timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import agreement, device
from benchmarks.harness.calls import FLA, OURS, Call, Peer, our_call, peer_call
from benchmarks.harness.device import Attempt, Timing
from benchmarks.harness.floor import Rates, Work, work_of
from benchmarks.harness.inputs import Arguments
from benchmarks.harness.record import Row
from benchmarks.harness.shapes import Shape
from kcpgen.verify.op import Op

DIRECTIONS = ("forward", "training")
IN_SEGMENTS = {"fold_kernel", "fold_decays_kernel", "forgetting_kernel"}  # where sequences were cut, or halved


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a timed call returns: the output, and in training the gradient of every leaf."""

    o: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One op on one set of arguments; its reference serves both directions."""

    op: Op
    shape: Shape
    gates: str
    arguments: Arguments
    expected: agreement.Reference


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """rounds: timed calls of each implementation; warm_ups: calls before them, after the first."""

    rounds: int
    warm_ups: int
    rates: Rates
    peers: Sequence[Peer]


def in_direction(call: Call, arguments: Arguments, direction: str) -> Callable[[], Result]:
    """Forward as in inference, without autograd; training as a step does it, forward then backward."""
    return partial(_forward if direction == "forward" else _training, call, arguments)


def _forward(call: Call, arguments: Arguments) -> Result:
    with torch.no_grad():
        return Result(o=call()[0], gradients={})


def _training(call: Call, arguments: Arguments) -> Result:
    o = call()[0]
    leaves = arguments.leaves
    found = torch.autograd.grad(o, list(leaves.values()), arguments.d_output)
    return Result(o=o.detach(), gradients=dict(zip(leaves, found, strict=True)))


def measure(problem: Problem, direction: str, protocol: Protocol) -> Iterator[Row]:
    """A row for ours and one for every peer. Raises DeviceLostError if a kernel faults."""
    rows: dict[str, dict[str, Any]] = {OURS: _ours(problem, direction, protocol)}
    for peer in protocol.peers:
        if problem.op.name not in peer.entries:
            continue
        rows[peer.name] = _theirs(peer, problem, direction, protocol, rows[OURS]["attempt"])
    attempts = {name: row.pop("attempt") for name, row in rows.items()}
    for attempt in attempts.values():
        attempt.result = None
    timings = device.interleaved({n: a for n, a in attempts.items() if a.call and not a.failure}, protocol.rounds)
    work = work_of(problem.op, problem.arguments, direction)
    for name, row in rows.items():
        yield _row(problem, direction, name, row, attempts[name], timings.get(name), work, protocol.rates)


def _ours(problem: Problem, direction: str, protocol: Protocol) -> dict[str, Any]:
    call = in_direction(our_call(problem.op, problem.arguments), problem.arguments, direction)
    attempt = device.warm_up(call, protocol.warm_ups)
    if attempt.failure:
        return {"attempt": attempt, "status": "failed", "message": attempt.failure}
    try:
        result = attempt.result
        errors = agreement.our_errors(problem.op, problem.arguments, problem.expected, result.o, result.gradients)
        if set(attempt.kernels) & IN_SEGMENTS:
            errors |= agreement.segment_errors(call, result.o, result.gradients)
    except Exception as error:
        device.synchronize()
        attempt.failure = device.first_line(error)
        return {"attempt": attempt, "status": "failed", "message": f"on the window: {attempt.failure}"}
    own = device.triton_names([f"kcpgen_verified_{problem.op.name}", "kcpgen.runtime"])
    return _judged(attempt, errors, agreement.too_large(problem.op, errors), own)


def _theirs(peer: Peer, problem: Problem, direction: str, protocol: Protocol, ours: Attempt) -> dict[str, Any]:
    none = Attempt(call=_nothing, failure="not run")
    why = peer.unsupported(problem.op.name, problem.shape, problem.arguments.bound)
    if why:
        return {"attempt": none, "status": "unsupported", "message": why}
    call = in_direction(peer_call(peer, problem.op.name, problem.arguments), problem.arguments, direction)
    attempt = device.warm_up(call, protocol.warm_ups)
    if attempt.failure:
        return {"attempt": attempt, "status": "failed", "message": attempt.failure}
    gradients = {} if ours.result is None else ours.result.gradients
    errors = agreement.peer_errors(problem.expected, attempt.result.o, attempt.result.gradients, gradients)
    attempt.result = None
    own = device.triton_names([peer.module]) if peer is FLA else set(attempt.kernels)
    return _judged(attempt, errors, agreement.peer_too_large(errors), own)


def _nothing() -> None:
    """Stands for the call of a peer that is not run."""


def _judged(attempt: Attempt, errors: agreement.Errors, beyond: str, own: set[str]) -> dict[str, Any]:
    strange = device.foreign_kernels(attempt.kernels, own)
    status = "wrong" if beyond else "other kernels" if strange else "ok"
    return {"attempt": attempt, "status": status, "message": beyond or strange, "errors": errors}


def _row(
    problem: Problem,
    direction: str,
    name: str,
    row: dict[str, Any],
    attempt: Attempt,
    timing: Timing | None,
    work: Work,
    rates: Rates,
) -> Row:
    measured: dict[str, Any] = {}
    if timing is not None:
        measured = {
            "ms": timing.ms,
            "samples": timing.samples,
            "host_ms": timing.host_ms,
            "peak_mib": timing.peak_mib,
            "floor_ms": work.floor_ms(rates),
            "floor_bytes": work.bytes,
            "floor_flops": work.flops,
            "kernels": attempt.kernels,
        }
    return Row(
        op=problem.op.name,
        shape=problem.shape.label,
        gates=problem.gates,
        direction=direction,
        implementation=name,
        **row,
        **measured,
    )
