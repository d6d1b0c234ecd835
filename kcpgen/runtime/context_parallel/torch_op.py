"""Context parallelism of any recurrence in torch: a function of tokens and a state is all that is asked of it.

The recurrence is affine in its state, so its transition over a sequence is what it does to the columns of the
identity, less what it does to zero. Backward runs it again, under autograd, from the states that entered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kcpgen.runtime.awaited import Awaited, arrived
from kcpgen.runtime.context_parallel import passes
from kcpgen.runtime.context_parallel.context import CPContext
from kcpgen.runtime.context_parallel.merge import merge_in_torch
from kcpgen.runtime.context_parallel.payload import Kind
from kcpgen.runtime.context_parallel.states import callers_rows, entering_states, global_states, local_states
from kcpgen.runtime.functions import compute_dtype, outside_graphs, requires_grad

Recurrence = Callable[..., tuple[Tensor, "Tensor | None"]]


@dataclass(frozen=True, kw_only=True)
class TorchRun:
    """One call: `function(*tokens, **tensors, **plain, initial_state=, output_final_state=, cu_seqlens=)`.

    named: names of the tensors that are not token inputs, e.g. parameters; they follow the token inputs in every
    tuple.
    """

    function: Recurrence
    name: str
    kind: Kind
    tokens: int
    named: tuple[str, ...]
    plain: Mapping[str, Any]
    sizes: tuple[int, int, int]
    dtype: torch.dtype
    cp: CPContext
    differentiable: bool

    def call(self, tensors: Sequence[Tensor], sequences: range, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """(o, final states) of some of the local sequences; `tensors` hold only their tokens."""
        offsets = self.cp.shard.offsets[sequences.start : sequences.stop + 1]
        o, final = self.function(
            *tensors[: self.tokens],
            **dict(zip(self.named, tensors[self.tokens :], strict=True)),
            **self.plain,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=tuple(offset - offsets[0] for offset in offsets),
        )
        assert final is not None
        return o, final

    def span(self, sequences: range) -> slice:
        offsets = self.cp.shard.offsets
        return slice(offsets[sequences.start], offsets[sequences.stop])

    def cut(self, tensors: Sequence[Tensor], sequences: range) -> list[Tensor]:
        span = self.span(sequences)
        return [x[:, span] if index < self.tokens else x for index, x in enumerate(tensors)]


class _TorchOp:
    merge = staticmethod(merge_in_torch)

    def __init__(self, run: TorchRun, tensors: Sequence[Tensor]) -> None:
        self.name = run.name
        self.kind = run.kind
        self.differentiable = run.differentiable
        self.heads, self.keys, self.values = run.sizes
        self._run = run
        self._tensors = tensors

    def states(self, count: int) -> Tensor:
        return self._tensors[0].new_empty((count, self.heads, self.keys, self.values), dtype=self._run.dtype)

    def _final(self, sequences: range, initial: Tensor | None) -> Tensor:
        return self._run.call(self._run.cut(self._tensors, sequences), sequences, initial)[1]


class TorchForward(_TorchOp):
    def __init__(self, run: TorchRun, tensors: Sequence[Tensor]) -> None:
        super().__init__(run, tensors)
        self._outputs: dict[int, Tensor] = {}

    @property
    def o(self) -> Tensor:
        return torch.cat([self._outputs[first] for first in sorted(self._outputs)], dim=1)

    def summarise(self, sequence: int, external: Tensor, transition: Tensor | None) -> None:
        external.copy_(self._final(range(sequence, sequence + 1), None))
        if transition is not None:
            self._transition(sequence, transition, external)

    def run(self, sequences: range, initial: Tensor | Awaited | None, final: Tensor | None) -> None:
        initial = arrived(initial)
        o, last = self._run.call(self._run.cut(self._tensors, sequences), sequences, initial)
        self._outputs[sequences.start] = o
        if final is not None:
            final.copy_(last)

    def _transition(self, sequence: int, out: Tensor, external: Tensor) -> None:
        sequences = range(sequence, sequence + 1)
        size = _power_of_two(external)
        if self.kind != "dense":
            carried = (self._final(sequences, torch.full_like(external, size)) - external) / size
            out.copy_(carried[0, :, :, 0] if self.kind == "diagonal" else carried[0, :, 0, 0])
            return
        for columns, basis in self._identity(external):
            carried = (self._final(sequences, size * basis) - external) / size
            out[..., columns] = carried[0, :, :, : columns.stop - columns.start]

    def _identity(self, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The K columns of the identity, V at a time, as states."""
        identity = torch.eye(self.keys, dtype=like.dtype, device=like.device)
        for start in range(0, self.keys, self.values):
            columns = slice(start, min(start + self.values, self.keys))
            basis = torch.zeros_like(like)
            basis[..., : columns.stop - start] = identity[:, columns]
            yield columns, basis


def _power_of_two(x: Tensor) -> float:
    """About the largest element of x, at least 1: what M is applied to has this size, so that taking x away again costs
    no digits however large the values are."""
    largest = float(x.detach().abs().amax()) if x.numel() else 1.0
    return 2.0 ** max(0, math.frexp(largest)[1]) if math.isfinite(largest) else 1.0


class TorchBackward(_TorchOp):
    def __init__(self, run: TorchRun, tensors: Sequence[Tensor], do: Tensor | None, initial: Tensor | None) -> None:
        super().__init__(run, tensors)
        self._do = do
        self._initial = initial
        self._gradients = [torch.zeros_like(x) for x in tensors]

    def summarise(self, sequence: int, entering: Tensor) -> None:
        entering.copy_(self._differentiate(range(sequence, sequence + 1), None, tensors=False)[-1])

    def run(self, sequences: range, leaving: Tensor | Awaited | None, entering: Tensor | None) -> None:
        *found, state = self._differentiate(sequences, arrived(leaving), tensors=True)
        for index, (sum_, share) in enumerate(zip(self._gradients, found, strict=True)):
            (sum_[:, self._run.span(sequences)] if index < self._run.tokens else sum_).add_(share)
        if entering is not None:
            entering.copy_(state)

    def serially(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> tuple[Tensor | None, ...]:
        return tuple(self._gradients)

    @torch.enable_grad()
    def _differentiate(self, sequences: range, leaving: Tensor | None, *, tensors: bool) -> list[Tensor]:
        """Gradients of the tensors, unless they are not wanted, and of the entering states."""
        cut = [x.detach().requires_grad_(tensors) for x in self._run.cut(self._tensors, sequences)]
        states = slice(sequences.start, sequences.stop)
        given = self.states(len(sequences)).zero_() if self._initial is None else self._initial[states]
        entering = given.detach().requires_grad_()
        o, final = self._run.call(cut, sequences, entering)
        upstream = torch.zeros_like(final) if leaving is None else leaving
        wanted = [*cut, entering] if tensors else [entering]
        do = torch.zeros_like(o) if self._do is None else self._do[:, self._run.span(sequences)]
        found = torch.autograd.grad([o, final], wanted, [do, upstream], allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: TorchRun, initial: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        op = TorchForward(run, tensors)
        final = op.states(run.cp.shard.sequences)
        kept = passes.forward(op, run.cp, initial, final)
        ctx.run = run
        ctx.save_for_backward(initial, kept.entering, kept.transitions, *tensors)
        ctx.set_materialize_grads(False)
        return op.o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, leaving: Tensor | None) -> tuple[Tensor | None, ...]:
        initial, entering, transitions, *tensors = ctx.saved_tensors
        run: TorchRun = ctx.run
        op = TorchBackward(run, tensors, do, entering_states(run.cp.shard, initial, entering))
        gradient = None if initial is None else torch.zeros_like(initial)
        kept = passes.Kept(entering=entering, transitions=transitions)
        found = passes.backward(op, run.cp, kept, leaving, gradient)
        return (None, callers_rows(run.cp.shard, gradient), *found)


@outside_graphs
def torch_context_parallel(
    function: Recurrence,
    cp: CPContext,
    name: str,
    axes: Mapping[str, str],
    kind: Kind,
    *tokens: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) of this rank, `function` being the op on one device.

    axes: of each token input, e.g. "B T HV K". kind: what is known of the transition of the op's state.
    """
    sizes: dict[str, int] = {}
    for x, letters in zip(tokens, axes.values(), strict=True):
        sizes.update(zip(letters.split(), x.shape, strict=True))
    named = {key: value for key, value in keywords.items() if isinstance(value, Tensor)}
    run = TorchRun(
        function=function,
        name=name,
        kind=kind,
        tokens=len(tokens),
        named=tuple(named),
        plain={key: value for key, value in keywords.items() if key not in named},
        sizes=(sizes.get("HV", sizes.get("H", 1)), sizes["K"], sizes["V"]),
        dtype=compute_dtype(*tokens, initial_state),
        cp=cp,
        differentiable=requires_grad(initial_state, *tokens, *named.values()),
    )
    initial = None if initial_state is None else local_states(cp.shard, initial_state.to(run.dtype))
    o, final = _ContextParallel.apply(run, initial, *tokens, *named.values())  # type: ignore[no-untyped-call]
    return o, global_states(cp.shard, final) if output_final_state else None
