"""Equal-length batches and packed sequences, brought to one call per recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kcpgen.runtime.functions import compute_dtype, without_autocast

__all__ = ["by_sequence", "compute_dtype", "host_offsets", "without_autocast"]

Recurrence = Callable[..., tuple[Tensor, Tensor]]


def host_offsets(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """`cu_seqlens` as host integers; a tensor on a device is read back, which waits for the device."""
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    return tuple(int(value) for value in values)


def by_sequence(
    recurrence: Recurrence,
    state: Tensor,
    tokens: Sequence[Tensor],
    cu_seqlens: Tensor | Sequence[int] | None,
    /,
    **shared: Any,
) -> tuple[Tensor, Tensor]:
    """(o, final state) of `recurrence(state, tokens, **shared)`: rows of a batch at once, packed sequences in turn.

    state: [N, ...], one per row of the batch or per sequence. tokens: tensors [B, T, ...]; o: [B, T, ...].
    """
    if cu_seqlens is None:
        return recurrence(state, tokens, **shared)
    offsets = host_offsets(cu_seqlens)
    parts = [
        recurrence(state[n : n + 1], [x[:, begin:end] for x in tokens], **shared)
        for n, (begin, end) in enumerate(pairwise(offsets))
    ]
    return torch.cat([o for o, _ in parts], dim=1), torch.cat([last for _, last in parts])
