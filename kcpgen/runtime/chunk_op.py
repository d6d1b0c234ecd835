"""An op's generated kernels behind autograd, on one device or on the ranks of a context-parallel group.

Two launches forward (the chunk-parallel `prepare`, the serial `scan`), three backward (the scan replayed for its
states, `reverse`, the chunk-parallel `gradients`). On ranks the same launches work on windows of the local sequences,
and what crosses ranks is summarised by the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel import passes
from kcpgen.runtime.context_parallel.arguments import told_to_others
from kcpgen.runtime.context_parallel.context import CPContext
from kcpgen.runtime.context_parallel.merge import compose
from kcpgen.runtime.context_parallel.merge_kernels import merge_in_triton, product
from kcpgen.runtime.context_parallel.payload import Kind
from kcpgen.runtime.context_parallel.states import callers_rows, entering_states, global_states, local_states
from kcpgen.runtime.functions import outside_graphs, requires_grad
from kcpgen.runtime.launch import Tiles, dot_precision, scratch_dtype, unit_stride
from kcpgen.runtime.layout import ChunkLayout, chunk_layout
from kcpgen.runtime.segments import chunks_before, segment_count, segments
from kcpgen.runtime.streams import beside, join

Launcher = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The generated launchers of one op, and what is known of the transition M of its state.

    value: number of the token input whose shape and dtype the output takes. transitions: None where M is no matrix.
    """

    op: str
    kind: Kind
    value: int
    prepare: Launcher
    scan: Launcher
    scan_states: Launcher
    reverse: Launcher
    reverse_summary: Launcher
    gradients: Launcher
    transitions: Launcher | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call: everything that is no tensor. keywords: constants and modes that `prepare` and `gradients` take."""

    kernels: Kernels
    keywords: Mapping[str, Any]
    layout: ChunkLayout
    tiles: Tiles
    cp: CPContext | None
    differentiable: bool

    @property
    def sequences(self) -> range:
        return range(self.layout.sequence_count)

    def window(self, sequences: range) -> ChunkLayout:
        """The layout of some of the sequences; the chunks, and all scratch, stay those of all."""
        if sequences == self.sequences:
            return self.layout
        rows = self.layout.sequences[sequences.start : sequences.stop]
        return replace(self.layout, sequences=rows, sequence_count=len(sequences))


class _Op:
    """Sizes that context parallelism asks for."""

    merge = staticmethod(merge_in_triton)

    def __init__(self, run: Run, prepared: Any) -> None:
        self.name = run.kernels.op
        self.kind = run.kernels.kind
        self.differentiable = run.differentiable
        self.heads, self.keys, self.values = prepared.heads, prepared.keys, prepared.values
        self.prepared = prepared
        self._run = run

    def states(self, count: int) -> Tensor:
        sizes = (count, self.heads, self.keys, self.values)
        return torch.empty(sizes, dtype=torch.float32, device=self._run.layout.sequences.device)


class Forward(_Op):
    def __init__(self, run: Run, tensors: Sequence[Tensor | None]) -> None:
        value = tensors[run.kernels.value]
        assert value is not None
        prepared = run.kernels.prepare(
            *tensors,
            run.layout,
            run.tiles.prepare,
            **run.keywords,
            precision=dot_precision(value.dtype),
            scratch_dtype=scratch_dtype(value.dtype),
        )
        super().__init__(run, prepared)
        self.o = value.new_empty((*value.shape[:2], self.heads, self.values))

    def run(self, sequences: range, initial: Tensor | None, final: Tensor | None) -> None:
        self._scan(sequences, self.o, initial, final)

    def summarise(self, sequence: int, initial: Tensor | None, final: Tensor, transition: Tensor | None) -> None:
        if transition is not None:
            with beside(self.o.device):
                self._transition(sequence, transition)
        self._scan(range(sequence, sequence + 1), None, initial, final)
        if transition is not None:
            join(self.o.device)

    def _scan(self, sequences: range, o: Tensor | None, initial: Tensor | None, final: Tensor | None) -> None:
        run = self._run
        layout = run.window(sequences)
        run.kernels.scan(self.prepared, layout, run.tiles.scan, o=o, initial_state=initial, final_state=final)

    def _transition(self, sequence: int, out: Tensor) -> None:
        """A long sequence is cut into segments, whose transitions are made side by side and then multiplied."""
        run, layout = self._run, self._run.layout
        assert run.cp is not None
        offsets = run.cp.shard.offsets
        before = chunks_before(offsets, layout.chunk)
        if run.kernels.transitions is None:
            decays = self.prepared.decay_out[before[sequence] : before[sequence + 1]]
            torch.prod(decays[..., : self.keys] if self.kind == "diagonal" else decays, 0, out=out)
            return
        programs = self.heads * max(1, self.prepared.key_width // 64)
        count = segment_count(before[sequence + 1] - before[sequence], programs)
        table = segments(offsets, sequence, layout.chunk, count, str(layout.sequences.device))
        parts = out.new_empty(len(table), self.heads, self.keys, self.keys)
        run.kernels.transitions(self.prepared, replace(layout, sequences=table, sequence_count=len(table)), parts)
        out.copy_(compose(parts, product))


class Backward(_Op):
    def __init__(
        self, run: Run, prepared: Any, tensors: Sequence[Tensor | None], do: Tensor, initial: Tensor | None
    ) -> None:
        super().__init__(run, prepared)
        self._tensors = tensors
        self._do = do
        self._initial = initial
        self._replayed: tuple[Tensor, tuple[Tensor, ...]] | None = None
        self._reversed: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def replay(self) -> None:
        run = self._run
        self._replayed = run.kernels.scan_states(
            self.prepared, run.layout, run.tiles.states, initial_state=self._initial
        )

    def run(self, sequences: range, leaving: Tensor | None, entering: Tensor | None) -> None:
        run = self._run
        more = {} if self._reversed is None else {"into": self._reversed}
        self._reversed = run.kernels.reverse(
            self.prepared,
            run.window(sequences),
            run.tiles.reverse,
            do=self._do,
            final_state_gradient=leaving,
            initial_state_gradient=entering,
            **more,
        )

    def summarise(self, sequence: int, entering: Tensor) -> None:
        run = self._run
        layout = run.window(range(sequence, sequence + 1))
        run.kernels.reverse_summary(
            self.prepared, layout, run.tiles.reverse, do=self._do, initial_state_gradient=entering
        )

    def finish(self) -> tuple[Tensor | None, ...]:
        run = self._run
        assert self._replayed is not None
        assert self._reversed is not None
        found: tuple[Tensor | None, ...] = run.kernels.gradients(
            *self._tensors,
            run.layout,
            run.tiles.gradients,
            self.prepared,
            **run.keywords,
            do=self._do,
            states=self._replayed[0],
            state_gradients=self._reversed[0],
            corrected=self._replayed[1],
            corrected_gradients=self._reversed[1],
        )
        return found


class _Chunked(torch.autograd.Function):
    """o, final_state = f(initial_state, tensors); states are those of the local sequences."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, output_final_state: bool, initial: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with told_to_others(run.kernels.op, run.cp):
            op = Forward(run, tensors)
        final = op.states(run.layout.sequence_count) if output_final_state else None
        kept = passes.Kept(entering=None, transitions=None)
        if run.cp is None:
            op.run(run.sequences, initial, final)
        else:
            kept = passes.forward(op, run.cp, initial, final)
        ctx.save_for_backward(initial, kept.entering, kept.transitions, *tensors)
        ctx.set_materialize_grads(False)
        ctx.run = run
        ctx.prepared = op.prepared
        return op.o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, leaving: Tensor | None) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        if torch.is_grad_enabled():  # create_graph=True: the kernels' gradients would come out as constants
            raise RuntimeError(f"{run.kernels.op}: no gradients of gradients on Triton; backend='eager' has them")
        initial, received, transitions, *tensors = ctx.saved_tensors
        value = tensors[run.kernels.value]
        sizes = (*value.shape[:2], ctx.prepared.heads, ctx.prepared.values)
        do = value.new_zeros(sizes) if do is None else unit_stride(do)
        leaving = None if leaving is None else leaving.contiguous()
        entering = None if initial is None else torch.empty_like(initial)
        if run.cp is None:
            op = Backward(run, ctx.prepared, tensors, do, initial)
            op.replay()
            op.run(run.sequences, leaving, entering)
            return (None, None, entering, *op.finish())
        op = Backward(run, ctx.prepared, tensors, do, entering_states(run.cp.shard, initial, received))
        kept = passes.Kept(entering=received, transitions=transitions)
        found = passes.backward(op, run.cp, kept, leaving, entering)
        return (None, None, callers_rows(run.cp.shard, entering), *found)


@outside_graphs
def run_chunks(
    kernels: Kernels,
    inputs: Sequence[Tensor],
    params: Sequence[Tensor | None],
    keywords: Mapping[str, Any],
    *,
    tiles: Tiles,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: tuple[int, ...] | None,
    cp: CPContext | None,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) of checked arguments; `cu_seqlens` are host integers."""
    B, T = inputs[kernels.value].shape[:2]
    offsets = cu_seqlens if cp is None else cp.shard.offsets
    layout = chunk_layout(B, T, offsets, tiles.chunk, inputs[0].device)
    differentiable = requires_grad(initial_state, *inputs, *params)
    run = Run(kernels=kernels, keywords=keywords, layout=layout, tiles=tiles, cp=cp, differentiable=differentiable)
    if initial_state is not None:
        initial_state = initial_state.float() if cp is None else local_states(cp.shard, initial_state.float())
        initial_state = initial_state.contiguous()
    tensors = [*map(unit_stride, inputs), *(None if p is None else p.float().contiguous() for p in params)]
    o, final = _Chunked.apply(run, output_final_state, initial_state, *tensors)  # type: ignore[no-untyped-call]
    return o, final if cp is None or final is None else global_states(cp.shard, final)
