"""An op on one device and on ranks, brought to the same set of tensors: o, final_state, and d<input> of every leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kcpgen.runtime.context_parallel import CPContext, build_cp_context
from kcpgen.runtime.context_parallel.merge import Method
from kcpgen.runtime.split import forced_segments
from kcpgen.simulate.ranks import SimulatedTransport, run_ranks
from kcpgen.verify.cases import Case
from kcpgen.verify.inputs import Inputs, make_inputs
from kcpgen.verify.op import Op

LONGEST_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a row is spread over ranks; layout and merge as in `build_cp_context`.

    segments: into how many ranks cut their own part of a sequence; None: see `rank_segments`.
    """

    ranks: int
    layout: str | Sequence[int] = "contiguous"
    merge: Method = "fold"
    segments: int | None = None


def ordinary_memory(op: Op, case: Case, device: str) -> Inputs:
    """Inputs that forget as trained models do, with a very different decay on every head.

    The mean decay halves a state in 4 tokens on the first head and in 400 on the last. Where nothing decays, erases are
    all that forgets.
    """

    def paced(x: Tensor, heads: Tensor) -> Tensor:
        mean = x.abs().mean(dim=[axis for axis in range(x.ndim) if axis != 2])
        return math.log(2) / (4 * 100**heads) / mean

    return _with_decays(op, case, device, paced)


def long_memory(op: Op, case: Case, device: str) -> Inputs:
    """Inputs whose states outlive a rank, with a very different decay on every head.

    With the decays of an ordinary test nothing would be left of a state after a few hundred tokens, whoever lost it.
    """
    tokens = max(case.tokens, 16)
    return _with_decays(op, case, device, lambda x, heads: 2 / tokens * (tokens / 8) ** heads)


MEMORIES: Mapping[str, Callable[[Op, Case, str], Inputs]] = {"ordinary": ordinary_memory, "long": long_memory}


def _with_decays(op: Op, case: Case, device: str, factors: Callable[[Tensor, Tensor], Tensor]) -> Inputs:
    """Log decays times `factors(log decay, heads from 0 to 1)`, one for each of its heads."""
    inputs = make_inputs(op, case, device)
    heads = torch.arange(case.value_heads, device=device) / max(1, case.value_heads - 1)

    def changed(name: str, x: Tensor) -> Tensor:
        if name not in op.description.log_decays:
            return x
        own = factors(x.detach(), heads[:: case.value_heads // x.shape[2]]).to(x.dtype)
        return (x.detach() * own.reshape(1, 1, -1, *[1] * (x.ndim - 3))).requires_grad_()

    return replace(inputs, tokens={name: changed(name, x) for name, x in inputs.tokens.items()})


def on_ranks(op: Op, case: Case, inputs: Inputs, spread: Spread) -> dict[str, Tensor]:
    """Of all ranks, simulated: tokens side by side, states and parameters' gradients added up."""
    offsets = torch.tensor(case.offsets, device=inputs.device)

    def body(transport: SimulatedTransport) -> dict[str, Tensor]:
        cp = build_cp_context(
            offsets,
            transport,
            cu_seqlens_cpu=torch.tensor(case.offsets),
            layout=spread.layout,
            merge=spread.merge,
        )
        return on_one_rank(op, case, inputs, cp, segments=spread.segments)

    return together(run_ranks(spread.ranks, body), by_token(op))


def rank_segments(cp: CPContext) -> int | None:
    """1 where cuts lie on borders of chunks of any length: there, ranks must agree with one device to the last bit, and
    cannot if they cut their part up once more. Elsewhere the model decides, as for any call."""
    return 1 if cp.shard.start % LONGEST_CHUNK == 0 and (cp.shard.stop - cp.shard.start) % LONGEST_CHUNK == 0 else None


def on_one_rank(
    op: Op,
    case: Case,
    inputs: Inputs,
    cp: CPContext,
    *,
    checkpointed: bool = False,
    segments: int | None = None,
) -> dict[str, Tensor]:
    """What one rank computes, from its own tokens of the whole row's `inputs`."""
    span = slice(cp.shard.start, cp.shard.stop)
    tokens = {name: x.detach()[:, span].requires_grad_() for name, x in inputs.tokens.items()}
    params = {name: x.detach().requires_grad_() for name, x in inputs.params.items()}
    initial = None if inputs.initial_state is None else inputs.initial_state.detach().requires_grad_()

    def call() -> tuple[Tensor, Tensor | None]:
        return op.chunk(
            **tokens,
            **params,
            **inputs.keywords,
            initial_state=initial,
            output_final_state=True,
            backend=case.backend,
            cp_context=cp,
        )

    with forced_segments(rank_segments(cp) if segments is None else segments):
        o, state = checkpoint(call, use_reentrant=False) if checkpointed else call()
    assert state is not None
    roots = [] if inputs.d_output is None else [(o, inputs.d_output[:, span])]
    roots += [] if inputs.d_state is None else [(state, inputs.d_state)]
    leaves = {**tokens, **params, **({} if initial is None else {"initial_state": initial})}
    grads = torch.autograd.grad(
        [y for y, _ in roots], list(leaves.values()), [dy for _, dy in roots], allow_unused=True
    )
    found = {
        f"d{name}": torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(leaves.items(), grads, strict=True)
    }
    return {"o": o.detach(), "final_state": state.detach(), **found}


def by_token(op: Op) -> frozenset[str]:
    """Names of the tensors that have a token axis."""
    return frozenset(["o", *(f"d{name}" for name in op.signature.inputs)])


def together(shares: Sequence[Mapping[str, Tensor]], tokens: frozenset[str]) -> dict[str, Tensor]:
    """The ranks' results as those of one device."""
    return {
        name: torch.cat([share[name] for share in shares], dim=1)
        if name in tokens
        else torch.stack([share[name] for share in shares]).sum(0)
        for name in shares[0]
    }
