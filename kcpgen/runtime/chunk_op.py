"""An op's generated kernels behind autograd, on one device or on the ranks of a context-parallel group.

Two kernels forward (the chunk-parallel `prepare`, the serial `scan`), two to five backward (`reverse`, and what is
chunk-parallel, behind `gradients`; `states` before them where few were kept), some launched once for each stretch of
chunks. On ranks the same kernels work on windows of the local sequences, and what crosses ranks is summarised by them.
So are segments, where few heads of long sequences would leave most of a device idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kcpgen.runtime import halves, hopper, split, split_passes, stretches
from kcpgen.runtime.awaited import Awaited, arrived
from kcpgen.runtime.chains import products_of_decays
from kcpgen.runtime.context_parallel import passes
from kcpgen.runtime.context_parallel.arguments import told_to_others
from kcpgen.runtime.context_parallel.context import CPContext
from kcpgen.runtime.context_parallel.merge import compose
from kcpgen.runtime.context_parallel.merge_kernels import merge_in_triton, product
from kcpgen.runtime.context_parallel.payload import Kind
from kcpgen.runtime.context_parallel.states import callers_rows, entering_states, global_states, local_states
from kcpgen.runtime.functions import outside_graphs, requires_grad
from kcpgen.runtime.hopper_roles import UPRIGHT_CHUNK, fit_upright, takes
from kcpgen.runtime.kept import replays
from kcpgen.runtime.launch import StatesAround, Tiles, altered, dot_precision, readable, scratch_dtype, unit_stride
from kcpgen.runtime.layout import CHECKPOINT, ChunkLayout, chunk_layout
from kcpgen.runtime.pieces import Pieces, cut, multiprocessors
from kcpgen.runtime.segments import chunks_before, segment_count, segments
from kcpgen.runtime.streams import beside, join
from kcpgen.runtime.tuned import tiles_for
from kcpgen.runtime.tuned_table import Form

Launcher = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The generated launchers of one op, and what is known of the transition M of its state.

    form: what the choice of tiles depends on. key, value: numbers of a token input on the key axis and of the one whose
    shape and dtype the output takes. transitions: None where M is no matrix. forgetting: None where nothing bounds what
    is left of a state (`kcpgen.runtime.forgetting`). gradients_in_one: whether one kernel for Hopper makes gradients of
    all inputs, and leaves nothing for a next one. scores_in_scan, solves_in_scan: whether the scan can make scores
    itself, in roles, and whether both can solve for corrected values and what these hang on; `prepare` is told whether
    they will. upright: whether programs of serial kernels may have 32 columns.
    """

    op: str
    kind: Kind
    form: Form
    key: int
    value: int
    prepare: Launcher
    scan: Launcher
    scan_states: Launcher
    reverse: Launcher
    reverse_summary: Launcher
    gradients: Launcher
    transitions: Launcher | None
    forgetting: Launcher | None
    gradients_in_one: bool = False
    scores_in_scan: bool = False
    solves_in_scan: bool = False
    upright: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call: everything that is no tensor.

    keywords: constants and modes that `prepare` and `gradients` take. promises: of the inputs; `prepare` may use them.
    heads: of values. batch, starts: rows of tokens, and where in each of them sequences start, and the last one ends.
    """

    kernels: Kernels
    keywords: Mapping[str, Any]
    promises: Mapping[str, bool]
    layout: ChunkLayout
    heads: int
    batch: int
    starts: tuple[int, ...]
    tiles: Tiles
    cp: CPContext | None
    differentiable: bool  # whether a backward may follow
    segments: int | None  # asked for when the call was made: a backward may run where nobody asks
    replays: bool  # whether the backward replays states, of which the forward keeps a few; likewise

    @cached_property
    def sequences(self) -> range:
        return range(self.layout.sequence_count)

    def window(self, sequences: range) -> ChunkLayout:
        """The layout of some of the sequences; the chunks, and all scratch, stay those of all."""
        if sequences == self.sequences:
            return self.layout
        return self.layout.once(("window", sequences), lambda: _window(self.layout, sequences))

    @cached_property
    def programs(self) -> int:
        """Of a serial kernel, for one sequence."""
        return self.heads * (self.tiles.prepare.value_width // self.tiles.scan.value_block)

    @cached_property
    def stretches(self) -> tuple[range, ...]:
        """Those of its one sequence, where chunk-parallel kernels are to run beside serial ones; () where not."""
        if self._few or self.halves is not None or self.pieces(self.sequences) is not None:
            return ()
        processors = multiprocessors(self.layout.sequences.device)
        return stretches.side_by_side(self.layout.lengths, self.heads, self.programs, processors)

    @cached_property
    def _few(self) -> bool:
        """Whether serial kernels take 32 columns: nothing has room beside their programs."""
        if not self.kernels.upright or not self.tiles.scan.roles or self.layout.chunk != UPRIGHT_CHUNK:
            return False
        processors = multiprocessors(self.layout.sequences.device)
        return fit_upright(self.layout.sequence_count * self.programs, processors)

    @cached_property
    def halves(self) -> halves.Halves | None:
        """Those of its sequences, where heads that forget are to run both side by side; None on ranks, and for whoever
        asks for segments or has them."""
        known = self.kernels.upright and self.kernels.forgetting is not None
        if not known or self.cp is not None or self.segments is not None or self.pieces(self.sequences) is not None:
            return None
        if not halves.wanted(self.layout, few=self._few):
            return None
        return self.layout.once("halves", lambda: halves.halved(self.layout, self.batch, self.starts))

    def pieces(self, sequences: range) -> Pieces | None:
        """The segments that these sequences are cut into; None where they stay whole."""
        return self.layout.once(("pieces", sequences, *self._cutting), lambda: self._pieces(sequences, *self._cutting))

    @cached_property
    def _cutting(self) -> tuple[int | None, int, int, int, bool, bool]:
        """What decides on segments, beside the layout."""
        transitions = self.heads * max(1, self.tiles.prepare.key_width // 64) if self.kernels.transitions else 0
        summarised = self.cp is not None and self.cp.shard.interior
        processors = multiprocessors(self.layout.sequences.device)
        return self.segments, self.programs, transitions, processors, summarised, self.tiles.scan.roles

    def _pieces(
        self,
        sequences: range,
        segments: int | None,
        programs: int,
        transition_programs: int,
        processors: int,
        summarised: bool,
        roles: bool,
    ) -> Pieces | None:
        """All sequences of a layout decide on the segments of each, whichever are asked for."""
        chunks = self.layout.lengths
        if segments is not None:
            counts = split.equal_segments(chunks, segments)
        else:
            counts = split.segment_counts(
                chunks,
                programs=programs,
                transition_programs=transition_programs,
                multiprocessors=processors,
                summarised=summarised,
                roles=roles,
            )
        some = counts[sequences.start : sequences.stop]
        return None if max(some, default=1) == 1 else cut(self.layout, self.batch, self.starts, counts, sequences)


def _window(layout: ChunkLayout, sequences: range) -> ChunkLayout:
    some = slice(sequences.start, sequences.stop)
    rows, lengths = layout.sequences[some], layout.lengths[some]
    return replace(layout, sequences=rows, sequence_count=len(sequences), lengths=lengths)


class _Op:
    """Sizes that context parallelism asks for."""

    merge = staticmethod(merge_in_triton)

    prepared: Any  # the op's generated `Prepared`

    def __init__(self, run: Run, tensors: Sequence[Any], inner: dict[int, Tensor]) -> None:
        """inner: by sequence, M of its inner segments where it is cut into any."""
        self.inner = inner
        self._looked_at: tuple[ChunkLayout | None, Tensor | None] = (None, None)  # what `_needed` said, and of what
        self.name = run.kernels.op
        self.kind = run.kernels.kind
        self.differentiable = run.differentiable
        self.heads = run.heads
        self.keys, self.values = tensors[run.kernels.key].shape[3], tensors[run.kernels.value].shape[3]
        self._run = run
        self._tensors = tensors

    def states(self, count: int) -> Tensor:
        sizes = (count, self.heads, self.keys, self.values)
        return torch.empty(sizes, dtype=torch.float32, device=self._run.layout.sequences.device)

    def transitions(self, cut: Pieces) -> Tensor | None:
        if self.kind == "identity":
            return None
        found = [self.inner[n] for n, count in cut.inner_counts.items() if count]
        return found[0] if len(found) == 1 else torch.cat([*found, self.room_for_transitions(0)])

    def transitions_of(self, layout: ChunkLayout) -> Tensor | None:
        if self.kind == "identity":
            return None
        out = self.room_for_transitions(layout.sequence_count)
        if self._run.kernels.transitions is None:
            products_of_decays(self.prepared.decay_out, layout.sequences, layout.chunk, out)
        else:
            self._make_transitions(layout, out)
        return out

    def _make_transitions(self, layout: ChunkLayout, out: Tensor) -> None:
        assert self._run.kernels.transitions is not None
        needed = self._needed(layout)
        self._run.kernels.transitions(self.prepared, layout, self._run.tiles.scan, out, chunks_needed=needed)

    def _needed(self, layout: ChunkLayout, from_the_start: bool = False) -> Tensor | None:
        """How many chunks the summary of each of a layout's sequences has to run, by head: those at its end, or of its
        gradient at its start. None: all."""
        if self._run.kernels.forgetting is None:
            return None
        if layout is self._looked_at[0] and not from_the_start:
            return self._looked_at[1]
        found = self.counts(layout.sequence_count)
        self.look(layout, found, from_the_start=from_the_start)
        return found

    def counts(self, *rows: int) -> Tensor:
        """Uninitialised int32 [.., HV]."""
        return torch.empty((*rows, self.heads), dtype=torch.int32, device=self._run.layout.sequences.device)

    def look(self, layout: ChunkLayout, needed: Tensor, *, from_the_start: bool, **more: Tensor) -> None:
        """Fill `needed` [N, HV], as above. more: what else the op's `forgetting` is to fill."""
        run = self._run
        assert run.kernels.forgetting is not None
        keywords = {**run.keywords, **more}
        run.kernels.forgetting(*self._tensors, layout, needed, **keywords, from_the_start=from_the_start)

    def room_for_transitions(self, count: int) -> Tensor:
        sizes = {"dense": (self.keys, self.keys), "diagonal": (self.keys,), "scalar": ()}[self.kind]
        return self.states(0).new_empty(count, self.heads, *sizes)


class Forward(_Op):
    def __init__(self, run: Run, tensors: Sequence[Tensor | None]) -> None:
        self._run = run
        self._stretches = run.stretches
        super().__init__(run, tensors, {})
        value = tensors[run.kernels.value]
        assert value is not None
        self._modes = {
            **run.keywords,
            **run.promises,
            "precision": dot_precision(value.dtype),
            "scratch_dtype": scratch_dtype(value.dtype),
            "differentiable": run.differentiable,
            **self._left_to_scans(scratch_dtype(value.dtype)),
        }
        self.prepared = None
        self._unprepared = list(self._stretches or (range(run.layout.chunk_count),))
        self._like = value
        self._o: Tensor | None = None
        if self._stretches or run.cp is not None:  # before streams begin, and before others count on this rank
            self._o = self.o
        replayed, kept = run.differentiable and run.replays, run.differentiable and not run.replays
        self.checkpoints = self.states(-(-run.layout.chunk_count // CHECKPOINT)) if replayed else None
        self.kept = self._room_for_states(scratch_dtype(value.dtype)) if kept else None
        self._summaries: dict[range, Tensor] = {}  # of the segments of a sequence that comes and goes on

    def _room_for_states(self, dtype: torch.dtype) -> Tensor:
        """Of all chunks, as `scan_states` would return them."""
        layout, widths = self._run.layout, self._run.tiles.prepare
        sizes = (layout.chunk_count, self.heads, widths.value_width, widths.key_width)
        return torch.empty(sizes, dtype=dtype, device=layout.sequences.device)

    @property
    def o(self) -> Tensor:
        """The output [B, T, HV, V]; room for it is made when it is first asked for."""
        if self._o is None:
            self._o = self._like.new_empty((*self._like.shape[:2], self.heads, self.values))
        return self._o

    def _left_to_scans(self, dtype: torch.dtype) -> dict[str, bool]:
        """What `prepare` is told of what scans make: both are in roles, or none. Sizes decide, not whether gradients
        are asked for: a checkpointed forward has to compute the same numbers."""
        run, told = self._run, {}
        if run.kernels.scores_in_scan:
            keys, scans = run.tiles.prepare.key_width, (run.tiles.scan, run.tiles.reverse)
            told["for_roles"] = all(t.roles and takes(keys, self.values, dtype, run.layout, t) for t in scans)
        if run.kernels.solves_in_scan:
            cut = run.pieces(run.sequences)
            told["summarised"] = run.cp is not None or (cut is not None and cut.inner.sequence_count > 0)
        return told

    def _look_ahead(self, cut: Pieces) -> None:
        """Which segments forget all that enters them, before `prepare` makes W of them for M alone."""
        scans_solve = self._run.kernels.solves_in_scan and self._modes["for_roles"]
        if scans_solve and self._run.cp is None and cut.inner.sequence_count:
            needed = self._needed(cut.inner)
            if needed is not None:
                self._looked_at = cut.inner, needed
                self._modes |= {"segments": cut.inner_of_chunks, "chunks_needed": needed}

    def prepare(self, chunks: range) -> None:
        if chunks not in self._unprepared:
            return
        run = self._run
        self._unprepared.remove(chunks)
        self.prepared = run.kernels.prepare(
            *self._tensors, run.layout, run.tiles.prepare, **self._modes, chunks=chunks, prepared=self.prepared
        )

    def prepare_all(self) -> None:
        for chunks in tuple(self._unprepared):
            self.prepare(chunks)

    def run(self, sequences: range, initial: Tensor | Awaited | None, final: Tensor | None) -> None:
        run, cut = self._run, self._run.pieces(sequences)
        if self._stretches:  # of the only sequence there is
            rows = stretches.layouts(run.layout, run.starts[-1], self._stretches)
            stretches.forward(self, self._stretches, rows, initial, final)
            return
        if run.halves is not None:  # of all sequences, on one device
            halves.forward(self, run.halves, arrived(initial), final)
            return
        if cut is not None:
            self._look_ahead(cut)
        self.prepare_all()
        if cut is None:
            self.scan(run.window(sequences), self.o, arrived(initial), final)
        elif isinstance(initial, Awaited):
            ahead = split_passes.foresee(self, cut, self._summaries.pop(sequences, None))
            entering = split_passes.catch_up(self, cut, initial.get(), ahead)
            split_passes.forward(self, cut, initial.get(), final, entering)
        else:
            split_passes.forward(self, cut, initial, final)

    def summarise(self, sequence: int, external: Tensor, transition: Tensor | None) -> None:
        alone = range(sequence, sequence + 1)
        cut = self._run.pieces(alone)
        self.prepare_all()
        if transition is not None:
            with beside(self.o.device):
                self._transition(sequence, transition)
        try:
            if cut is None:
                self.scan(self._run.window(alone), None, None, external)
            else:
                self._summaries[alone] = split_passes.summarise(self, cut, external)
        finally:
            if transition is not None:
                join(self.o.device)

    def scan(
        self,
        layout: ChunkLayout,
        o: Tensor | None,
        initial: Tensor | None,
        final: Tensor | None,
        chosen: halves.Chosen | None = None,
    ) -> None:
        run, some = self._run, {} if chosen is None else {"chosen": chosen}
        needed = None if o is not None else self._needed(layout) if chosen is None else chosen.needed
        run.kernels.scan(
            self.prepared,
            layout,
            run.tiles.scan,
            o=o,
            initial_state=initial,
            final_state=final,
            states=None if o is None else self.kept,  # a summary leaves all as it was
            checkpoints=None if o is None else self.checkpoints,
            chunks_needed=needed,
            **some,
        )

    def make_transitions(self, cut: Pieces) -> None:
        if self.kind != "identity" and not self.inner.keys() >= {n for n, count in cut.inner_counts.items() if count}:
            self.keep_transitions(cut, self.transitions_of(cut.inner))

    def keep_transitions(self, cut: Pieces, inner: Tensor | None) -> None:
        counts = {n: count for n, count in cut.inner_counts.items() if count}
        if inner is not None:
            self.inner.update(zip(counts, torch.split(inner, list(counts.values())), strict=True))

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

        def cut() -> ChunkLayout:
            return layout.over(segments(offsets, sequence, layout.chunk, count))

        within = layout.once(("segments", sequence, count), cut)
        parts = out.new_empty(within.sequence_count, self.heads, self.keys, self.keys)
        self._make_transitions(within, parts)
        out.copy_(compose(parts, product))


@dataclass(frozen=True, kw_only=True)
class _Restored:
    """What a forward has left for its backward. states: that entered all chunks, or None; checkpoints are some then."""

    prepared: Any
    states: Tensor | None
    checkpoints: Tensor | None
    inner: dict[int, Tensor]


class Backward(_Op):
    def __init__(
        self,
        run: Run,
        tensors: Sequence[Tensor | None],
        do: Tensor,
        initial: Tensor | None,
        saved: _Restored,
    ) -> None:
        super().__init__(run, tensors, saved.inner)
        self.prepared = saved.prepared
        self._checkpoints = saved.checkpoints
        self._do = do
        self._initial = initial
        self._entering = saved.states  # of all chunks
        self._reversed: tuple[Tensor, tuple[Tensor, ...]] | None = None
        self._summaries: dict[range, Tensor] = {}  # of the segments of a sequence that comes and goes on
        found = run.stretches
        rows = stretches.layouts(run.layout, run.starts[-1], found)
        self._behind = stretches.Behind(found, rows) if found else None

    def __enter__(self) -> Backward:
        if self._behind is not None:
            with told_to_others(self.name, self._run.cp):  # half of what a backward allocates, before the exchange
                self._behind.begin(self)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._behind is not None:
            self._behind.end(*raised)

    def serially(self) -> AbstractContextManager[None]:
        return nullcontext() if self._behind is None else self._behind.serially()

    def replay(self) -> None:
        """The states that entered the chunks, unless they were kept, which waits for nothing."""
        run = self._run
        if self._entering is None:
            self._entering = run.kernels.scan_states(
                self.prepared, run.layout, run.tiles.states, initial_state=self._initial, checkpoints=self._checkpoints
            )

    def run(self, sequences: range, leaving: Tensor | Awaited | None, entering: Tensor | None) -> None:
        run, cut = self._run, self._run.pieces(sequences)
        if self._behind is not None:  # of the only sequence there is
            self._behind.reverse(self, leaving, entering)
        elif not isinstance(leaving, Awaited):
            if run.halves is not None:  # of all sequences, on one device
                halves.backward(self, run.halves, leaving, entering)
            elif cut is None:
                self.reverse(run.window(sequences), leaving, entering)
            else:
                split_passes.backward(self, cut, leaving, entering)
        elif cut is None:
            self.replay()
            self.reverse(run.window(sequences), leaving.get(), entering)
        else:
            ahead = split_passes.foresee_gradient(self, cut, self._summaries.pop(sequences, None))
            self.replay()
            known = split_passes.catch_up_gradient(self, cut, leaving.get(), ahead)
            split_passes.backward(self, cut, leaving.get(), entering, known)

    def reverse(
        self,
        layout: ChunkLayout,
        leaving: Tensor | None,
        entering: Tensor | None,
        chosen: halves.Chosen | None = None,
    ) -> None:
        run, some = self._run, {} if chosen is None else {"chosen": chosen}
        self._reversed = run.kernels.reverse(
            self.prepared,
            layout,
            run.tiles.reverse,
            do=self._do,
            final_state_gradient=leaving,
            initial_state_gradient=entering,
            into=self._reversed,
            **some,
        )

    def summarise(self, sequence: int, entering: Tensor) -> None:
        alone = range(sequence, sequence + 1)
        cut = self._run.pieces(alone)
        if cut is None:
            self.summary(self._run.window(alone), None, entering)
        else:
            self._summaries[alone] = split_passes.summarise_gradient(self, cut, entering)

    def summary(
        self,
        layout: ChunkLayout,
        leaving: Tensor | None,
        entering: Tensor,
        chosen: halves.Chosen | None = None,
    ) -> None:
        run, some = self._run, {} if chosen is None else {"chosen": chosen}
        needed = self._needed(layout, from_the_start=True) if chosen is None else chosen.needed
        run.kernels.reverse_summary(
            self.prepared,
            layout,
            run.tiles.reverse,
            do=self._do,
            initial_state_gradient=entering,
            final_state_gradient=leaving,
            chunks_needed=needed,
            **some,
        )

    def finish(self) -> tuple[Tensor | None, ...]:
        run = self._run
        self.replay()
        assert self._entering is not None
        assert self._reversed is not None
        states = StatesAround(entering=self._entering, leaving=self._reversed[0])
        corrected_gradients = self._reversed[1]
        self._entering = self._reversed = None
        found: tuple[Tensor | None, ...] = run.kernels.gradients(
            *self._tensors,
            run.layout,
            run.tiles.gradients,
            self.prepared,
            **run.keywords,
            do=self._do,
            states=states,
            corrected_gradients=corrected_gradients,
            stretches=self._parts(),
        )
        return found

    def _parts(self) -> Iterable[range]:
        """The chunks, in what portions `gradients` takes them."""
        run = self._run
        at_once = run.kernels.gradients_in_one
        if self._behind is not None:
            return self._behind.once_reversed(in_portions=not at_once)
        if at_once:
            return (range(run.layout.chunk_count),)
        return stretches.halves(run.layout.chunk_count, run.heads, multiprocessors(run.layout.sequences.device))


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What a backward needs, all of whose tensors autograd saves: hooks may replace them (checkpoints, offloading), and
    what they were may then serve for anything else.

    prepared: without tensors. lent: by field, the number of an input that serial kernels read in place. scratch: the
    fields of what else is saved, and inner: the sequences whose M follow.
    """

    prepared: Any
    lent: Mapping[str, int]
    scratch: tuple[str, ...]
    inner: tuple[int, ...]

    @classmethod
    def of(cls, op: Forward, tensors: Sequence[Tensor | None]) -> tuple[_Saved, list[Tensor | None]]:
        """And what is to be saved, beside the tensors of the call."""
        prepared = op.prepared.for_backward()
        found = {name: x for name, x in vars(prepared).items() if isinstance(x, Tensor)}
        numbers = {id(x): n for n, x in enumerate(tensors) if x is not None}
        lent = {name: numbers[id(x)] for name, x in found.items() if id(x) in numbers}
        scratch = {name: x for name, x in found.items() if name not in lent}
        bare = altered(prepared, **dict.fromkeys(found))
        saved = cls(prepared=bare, lent=lent, scratch=(*scratch,), inner=(*op.inner,))
        return saved, [op.kept, op.checkpoints, *scratch.values(), *op.inner.values()]

    def restored(self, saved: Sequence[Any], inputs: Sequence[Any]) -> _Restored:
        states, checkpoints, *rest = (None if x is None else x.contiguous() for x in saved)
        scratch = dict(zip(self.scratch, rest, strict=False))
        lent = {name: readable(inputs[n]) for name, n in self.lent.items()}
        return _Restored(
            prepared=altered(self.prepared, **scratch, **lent),
            states=states,
            checkpoints=checkpoints,
            inner={n: x for n, x in zip(self.inner, rest[len(self.scratch) :], strict=True) if x is not None},
        )


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
            op.prepare_all()  # where there is no sequence to run
        if not run.differentiable:
            return op.o, final
        ctx.saved, made = _Saved.of(op, tensors)
        ctx.save_for_backward(initial, kept.entering, kept.transitions, *tensors, *made)
        ctx.set_materialize_grads(False)
        ctx.run, ctx.count = run, len(tensors)
        return op.o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, leaving: Tensor | None) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        if torch.is_grad_enabled():  # create_graph=True: the kernels' gradients would come out as constants
            raise RuntimeError(f"{run.kernels.op}: no gradients of gradients on Triton; backend='eager' has them")
        saved = ctx.saved_tensors  # once: a checkpoint's hook gives them back no second time
        states, tensors, made = saved[:3], saved[3 : 3 + ctx.count], saved[3 + ctx.count :]  # laid out anew by hooks
        initial, received, transitions = (None if x is None else x.contiguous() for x in states)
        tensors = [None if x is None else unit_stride(x) for x in tensors]
        found = ctx.saved.restored(made, tensors)
        value = tensors[run.kernels.value]
        sizes = (*value.shape[:2], run.heads, value.shape[3])
        do = value.new_zeros(sizes) if do is None else hopper.copyable(do, run.tiles)
        leaving = None if leaving is None else leaving.contiguous()
        entering = None if initial is None else torch.empty_like(initial)
        local = initial if run.cp is None else entering_states(run.cp.shard, initial, received)
        with Backward(run, tensors, do, local, found) as op:
            if run.cp is None:
                op.run(run.sequences, leaving, entering)
                return (None, None, entering, *op.finish())
            kept = passes.Kept(entering=received, transitions=transitions)
            gradients = passes.backward(op, run.cp, kept, leaving, entering)
        return (None, None, callers_rows(run.cp.shard, entering), *gradients)


@outside_graphs
def run_chunks(
    kernels: Kernels,
    inputs: Sequence[Tensor],
    params: Sequence[Tensor | None],
    keywords: Mapping[str, Any],
    promises: Mapping[str, bool],
    *,
    tiles: Tiles | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: tuple[int, ...] | None,
    cp: CPContext | None,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) of checked arguments; `cu_seqlens` are host integers, tiles None what suits the device."""
    v = inputs[kernels.value]
    B, T, _, V = v.shape
    if tiles is None:
        tiles = tiles_for(kernels.form, inputs[kernels.key].shape[3], V, v.dtype, v.device)
    offsets = cu_seqlens if cp is None else cp.shard.offsets
    layout = chunk_layout(B, T, offsets, tiles.chunk, inputs[0].device)
    rows, starts = (B, (0, T)) if offsets is None else (1, tuple(offsets))
    run = Run(
        kernels=kernels,
        keywords=keywords,
        promises=promises,
        layout=layout,
        heads=v.shape[2],
        batch=rows,
        starts=starts,
        tiles=hopper.settled(tiles, v.device),
        cp=cp,
        differentiable=requires_grad(initial_state, *inputs, *params),
        segments=split.asked_for(tiles.segments),
        replays=replays(),
    )
    if initial_state is not None:
        initial_state = initial_state.float() if cp is None else local_states(cp.shard, initial_state.float())
        initial_state = initial_state.contiguous()
    tensors = [*map(unit_stride, inputs), *(None if p is None else p.float().contiguous() for p in params)]
    o, final = _Chunked.apply(run, output_final_state, initial_state, *tensors)  # type: ignore[no-untyped-call]
    return o, final if cp is None or final is None else global_states(cp.shard, final)
