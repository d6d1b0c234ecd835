"""Equal-length batches and packed sequences, brought to one call per recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

Recurrence = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]


def host_offsets(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """`cu_seqlens` as host integers; a tensor on a device is read back, which waits for the device."""
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    return tuple(int(value) for value in values)


def by_sequence(
    recurrence: Recurrence, state: Tensor, tokens: Sequence[Tensor], cu_seqlens: Tensor | Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """(o, final state) of `recurrence(state, tokens)`: a batch of rows at once, or a packed row's sequences in turn.

    state: [N, ...], one per row of the batch or per sequence. tokens: tensors [B, T, ...]; o: [B, T, ...].
    """
    if cu_seqlens is None:
        return recurrence(state, tokens)
    offsets = host_offsets(cu_seqlens)
    parts = [recurrence(state[n : n + 1], [x[:, a:b] for x in tokens]) for n, (a, b) in enumerate(pairwise(offsets))]
    return torch.cat([o for o, _ in parts], dim=1), torch.cat([last for _, last in parts])
