"""States by sequence of the whole row and by sequence of one rank. The former are the caller's, on every rank alike.

Initial states are read on the rank where a sequence begins, final states are given by the rank where it ends: rows of
other sequences are without effect, and zero.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from kcpgen.runtime.context_parallel.shard import Shard


def local_states(shard: Shard, states: Tensor) -> Tensor:
    """[N, HV, K, V] to the rows of local sequences, [n, HV, K, V]; its gradient is zero in all other rows."""
    return states[shard.first_sequence : shard.first_sequence + shard.sequences].contiguous()


def global_states(shard: Shard, states: Tensor) -> Tensor:
    """[n, HV, K, V] to [N, HV, K, V]: zero for every sequence that does not end here."""
    ended = states[: len(shard.ending)]
    after = shard.global_sequences - shard.first_sequence - len(ended)
    return pad(ended, (0, 0, 0, 0, 0, 0, shard.first_sequence, after))


def entering_states(shard: Shard, initial: Tensor | None, entering: Tensor | None) -> Tensor | None:
    """[n, HV, K, V]: what every local sequence entered with. `entering` [HV, K, V] is row 0 where it was received.

    Only that row is kept between forward and backward; whoever reads states by sequence needs all of them.
    """
    if entering is None:
        return initial
    if shard.sequences == 1:
        return entering[None]
    rows = entering.new_zeros(shard.sequences, *entering.shape) if initial is None else initial.clone()
    rows[0] = entering
    return rows


def callers_rows(shard: Shard, gradient: Tensor | None) -> Tensor | None:
    """The gradient of local initial states; that of a state from another rank goes there, not to the caller."""
    if gradient is not None and shard.receives:
        gradient[0] = 0
    return gradient
