"""What every chunked torch implementation shares: cutting tokens into chunks, sums of decays, scores, the solve.

Rows are tokens: vectors are [.., C, n], scalars [.., C, 1]. Decays are natural logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kcpgen.runtime.functions import compute_dtype, without_autocast
from kcpgen.runtime.functions import log_decay as finite
from kcpgen.runtime.sequences import by_sequence

__all__ = [
    "by_sequence",
    "chunks",
    "compute_dtype",
    "decay_sums",
    "inverse",
    "rows",
    "scan",
    "scores",
    "sums_before",
    "without_autocast",
]

Prepare = Callable[..., tuple[Tensor, ...]]
Step = Callable[..., tuple[Tensor, Tensor]]


def rows(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[B, T, H, n] or [B, T, H] as [B, T, heads, n], n = 1 for a scalar; the heads of a group share theirs."""
    x = x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2)
    return x if x.ndim == 4 else x[..., None]


def scan(
    state: Tensor, tokens: Sequence[Tensor], /, *, prepare: Prepare, step: Step, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HV, V] and the last state [B, HV, K, V] of equally long rows, from tokens [B, T, HV, n].

    `prepare` makes what a chunk needs whatever its entering state, for all chunks at once; `step` takes the state and
    one chunk of that, and returns the chunk's output [B, HV, C, V] and the next state.
    """
    T = tokens[0].shape[1]
    if T == 0:
        return state[:, None, :, 0][:, :0], state
    prepared = prepare(*(chunks(x, chunk_size) for x in tokens))
    outputs = []
    for operands in zip(*(x.unbind(0) for x in prepared), strict=True):
        output, state = step(state, *operands)
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1)[:, :T], state


def chunks(x: Tensor, C: int) -> Tensor:
    """[B, T, HV, n] as [NT, B, HV, C, n], with zeros behind the last token, which change nothing."""
    B, T, HV, n = x.shape
    x = pad(x, (0, 0, 0, 0, 0, -T % C))
    return x.reshape(B, -(-T // C), C, HV, n).permute(1, 0, 3, 2, 4)


def decay_sums(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of log-decays [.., C, n]: G up to and including a token, R of all after it, D between two tokens.

    G and R are [.., C, n]. D [.., t, s, n] is the sum after s and up to t, -inf where t < s; it is summed pair by pair,
    because a difference of two sums from the start would lose what follows a strong decay.
    """
    log_decay = finite(log_decay)
    G = log_decay.cumsum(-2)
    R = pad(log_decay, (0, 0, -1, 1)).flip(-2).cumsum(-2).flip(-2)
    C = log_decay.shape[-2]
    causal = torch.ones(C, C, dtype=torch.bool, device=log_decay.device).tril()[..., None]
    later = causal & ~causal.transpose(0, 1)
    D = torch.where(later, log_decay[..., :, None, :], 0).cumsum(-3)
    return G, R, D.masked_fill(~causal, -torch.inf)  # masked before any exp: its gradients stay finite


def sums_before(G: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """G and D up to the token before, for what reads the state before that token's decay."""
    return pad(G, (0, 0, 1, -1)), pad(D, (0, 0, 0, 0, 1, -1), value=-torch.inf)


def scores(left: Tensor, right: Tensor, between: Tensor | None = None) -> Tensor:
    """[.., t, s]: sum over k of left[t, k] right[s, k] exp(between[t, s, k]), 0 where t < s. None: nothing decays."""
    if between is None:
        return (left @ right.mT).tril()
    if between.shape[-1] == 1:
        return left @ right.mT * torch.exp(between.squeeze(-1))
    return (left[..., :, None, :] * torch.exp(between) * right[..., None, :, :]).sum(-1)


def inverse(L: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Blocks of (I - L)^-1 from blocks of L, each [.., C, C] and strictly lower triangular.

    Ordered by token first and term second, L as a whole is strictly lower triangular too.
    """
    n, C = len(L), L[0][0].shape[-1]
    whole = torch.stack([torch.stack(list(row), dim=-1) for row in L], dim=-3).flatten(-4, -3).flatten(-2)
    identity = torch.eye(n * C, dtype=whole.dtype, device=whole.device).expand_as(whole)
    solved = torch.linalg.solve_triangular(identity - whole, identity, upper=False, unitriangular=True)
    blocks = solved.reshape(*solved.shape[:-2], C, n, C, n)
    return [list(row.unbind(-1)) for row in blocks.unbind(-3)]
