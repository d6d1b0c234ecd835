"""What a rank sends: one flat tensor of header, the state it passes on and, where some rank is interior, a transition.

The header lets every rank check, without another exchange, that all came to the same call with the same metadata, and
lets a rank that failed say so.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel.errors import RankFailedError, RankMismatchError

# How M of S_next = M S + S_ext is sent: K x K numbers per head, K of a diagonal, one, or none where nothing decays.
Kind = Literal["dense", "diagonal", "scalar", "identity"]
HEADER = 32  # numbers; keeps what follows aligned for vector loads
EXACT = 1 << 24  # integers below are exact in float32
FIELDS = ("call", "direction", "attempt", "gradients", "cu_seqlens", "shards")
FAILED = len(FIELDS)  # index of the flag that a failed rank raises


@dataclass(frozen=True, kw_only=True)
class Format:
    """Sizes of a payload. `transitions`: whether a slot for M is part of it, which the identity never has."""

    heads: int
    keys: int
    values: int
    kind: Kind
    transitions: bool

    @cached_property
    def transition_shape(self) -> tuple[int, ...]:
        shapes = {"dense": (self.keys, self.keys), "diagonal": (self.keys,), "scalar": ()}
        return (self.heads, *shapes[self.kind])

    @cached_property
    def state_shape(self) -> tuple[int, ...]:
        return (self.heads, self.keys, self.values)

    @cached_property
    def _state_end(self) -> int:
        return HEADER + math.prod(self.state_shape)

    @cached_property
    def numbers(self) -> int:
        return self._state_end + (math.prod(self.transition_shape) if self.transitions else 0)

    def states(self, x: Tensor) -> Tensor:
        """View [.., HV, K, V] of payloads [.., n]."""
        return x[..., HEADER : self._state_end].view(*x.shape[:-1], *self.state_shape)

    def transition(self, x: Tensor) -> Tensor:
        """View [.., HV, ...] of payloads [.., n]; only where the format has transitions."""
        return x[..., self._state_end :].view(*x.shape[:-1], *self.transition_shape)


def header(
    *,
    call: int,
    attempt: int,
    backward: bool,
    differentiable: bool,
    fingerprints: tuple[int, int],
    failed: bool,
) -> list[float]:
    """Header of one rank: FIELDS, then the flag of failure, as integers that float32 holds exactly.

    fingerprints: of the offsets and of the bounds.
    """
    numbers = (call % EXACT, int(backward), attempt % EXACT, int(differentiable))
    fields = [*numbers, *fingerprints, int(failed)]
    return [float(x) for x in fields] + [0.0] * (HEADER - len(fields))


def fingerprint(values: Sequence[int]) -> int:
    return zlib.crc32(repr(tuple(values)).encode()) % EXACT


def shown(values: Sequence[int]) -> str:
    """Offsets in a message: the first of them, and a number that differs where any of them does."""
    first = ", ".join(map(str, values[:6])) + (", ..." if len(values) > 6 else "")
    return f"[{first}] ({len(values)} values, checksum {fingerprint(values)})"


def gradients(differentiable: bool) -> str:
    """A rank where nothing requires a gradient has no backward in which the others could meet it."""
    return "required" if differentiable else "not required"


def check_headers(headers: Tensor, rank: int) -> None:
    """headers: [W, HEADER] on the host. Raises on every rank alike, naming a rank and the field it differs in."""
    rows = headers.tolist()
    if not rows[0][FAILED] and all(row == rows[0] for row in rows):
        return
    rows = [[int(x) for x in row] for row in rows]
    failed = [other for other, row in enumerate(rows) if row[FAILED] and other != rank]
    if failed:
        raise RankFailedError(f"context parallelism: {_ranks(failed)} failed; the error is in its own traceback")
    for index, field in enumerate(FIELDS):
        values = [row[index] for row in rows]
        common = max(sorted(set(values)), key=values.count)
        other = [r for r, value in enumerate(values) if value != common]
        if other:
            text = f"{_ranks(other)} came with another `{field}`: {_by_rank(values, field)}"
            raise RankMismatchError(f"context parallelism: {text}")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _by_rank(values: Sequence[int], field: str) -> str:
    """Fingerprints, counters or words, rank by rank."""
    words = {"direction": ("forward", "backward"), "gradients": (gradients(False), gradients(True))}.get(field)
    named = [f"rank {r}: {words[value] if words else value}" for r, value in enumerate(values[:8])]
    return ", ".join(named) + (", ..." if len(values) > 8 else "")


def write(numbers: list[float], target: Tensor, pinned: Tensor | None) -> None:
    """By way of pinned memory, where there is any, to a device, without waiting for it."""
    there = torch.tensor(numbers, dtype=target.dtype)
    target.copy_(there if pinned is None else pinned.copy_(there), non_blocking=True)
