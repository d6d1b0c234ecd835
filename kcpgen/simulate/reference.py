"""The truth that simulations are held against, in float64: token by token, or chunk by chunk where rows are long."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import Inputs
from kcpgen.verify.op import Op, Recurrence

SEGMENT = 4096  # tokens of the chunked form whose intermediates are held at a time


def exact(op: Op, case: Case, inputs: Inputs, reference: str) -> dict[str, Tensor]:
    """Outputs and gradients of `inputs` in float64. `reference`: "naive", or "eager", which is the chunked form."""
    call = op.naive if reference == "naive" else _in_segments(op)
    return evaluate(call, _in_float64(inputs), case)


def _in_float64(inputs: Inputs) -> Inputs:
    def leaf(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_()

    return replace(
        inputs,
        tokens={name: leaf(x) for name, x in inputs.tokens.items()},
        params={name: leaf(x) for name, x in inputs.params.items()},
        initial_state=None if inputs.initial_state is None else leaf(inputs.initial_state),
        d_output=None if inputs.d_output is None else inputs.d_output.double(),
        d_state=None if inputs.d_state is None else inputs.d_state.double(),
    )


def _in_segments(op: Op, segment: int = SEGMENT) -> Recurrence:
    """The chunked form of a packed row, a few thousand tokens at a time; the backward computes each of them again.

    All chunks of a row at once could take tens of gigabytes: decays between two tokens are held channel by channel.
    """
    names = tuple(op.signature.inputs)

    def call(*, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor, **keywords: Any) -> Any:
        tokens = {name: keywords.pop(name) for name in names}
        outputs: list[Tensor] = []
        finals: list[Tensor] = []
        for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            state = None if initial_state is None else initial_state[n : n + 1]
            for start in range(begin, max(end, begin + 1), segment):  # an empty sequence is one empty segment
                part = {name: x[:, start : min(start + segment, end)] for name, x in tokens.items()}
                o, state = checkpoint(_eager, op, part, keywords, state, use_reentrant=False)
                outputs.append(o)
            assert state is not None
            finals.append(state)
        return torch.cat(outputs, dim=1), torch.cat(finals)

    return call


def _eager(op: Op, tokens: dict[str, Tensor], keywords: dict[str, Any], state: Tensor | None) -> Any:
    return op.chunk(**tokens, **keywords, initial_state=state, output_final_state=True, backend="eager")
