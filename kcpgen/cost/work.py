"""Bytes and FLOP of every kernel, read off the plan: its inputs, its scratch and its block equations.

Counted per token of a value head. Each tensor of a kernel counts once, as if the cache kept what programs share; a
masked score counts whole, as the tile that is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from kcpgen.cost.device import Kind
from kcpgen.cost.products import flops
from kcpgen.cost.sizes import Sizes
from kcpgen.derivation.chunk_form import Equation
from kcpgen.emit import (
    gluon_far_gradients,
    gluon_gradients,
    gluon_prepare,
    gluon_prepare_channels,
    gluon_upright,
    scores_in_scan,
    solve_in_scan,
    triton_values,
)
from kcpgen.emit.gluon_value_axis import on_both_axes
from kcpgen.emit.triton_operands import column_names, row_names, whole_scores
from kcpgen.emit.triton_prepare import rows_of_scores
from kcpgen.emit.triton_score_gradients import score_operands
from kcpgen.emit.triton_scratch import field_of, in_place, let_go, row_decays, scratch
from kcpgen.plan import KernelPlan
from kcpgen.runtime.hopper_roles import UPRIGHT_CHUNK, WIDE, WIDER, fit_upright, fitting_columns
from kcpgen.runtime.layout import CHECKPOINT
from kcpgen.runtime.split import added_steps, segment_counts
from kcpgen.spec import TokenInput
from kcpgen.tokenwise import names

LOW, FULL = 2, 4  # bytes of a 16-bit and of an fp32 element
NEAR = 2  # log2 of the tokens of a block whose pairs the backward takes one by one
KEY_WIDTHS = (64, 128)  # that kernels for Hopper are written for
UPRIGHT_PACE = 0.85  # of a step of 32 columns: measured 0.74 to 0.85 of the scan, 0.85 to 0.97 of the reverse scan
SUBSTITUTED = 4  # log2 of the rows of the blocks that are inverted without a dot


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """reads, writes: bytes by tensor. steps: chunks that one program walks in turn, 1 where all are side by side.

    pace: time of such a step beside one of 64 columns. reverse: whether it is one of the reverse scan.
    kind: of a kernel whose chunks are side by side.
    """

    name: str
    reads: Mapping[str, float]
    writes: Mapping[str, float]
    flops: float
    programs: int
    steps: int
    pace: float = 1.0
    reverse: bool = False
    kind: Kind = Kind.COMPUTING

    @property
    def bytes(self) -> float:
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass(frozen=True, kw_only=True)
class Counting:
    """A plan at given sizes. C: tokens of a chunk; KP, VP: padded widths; block: state columns of a serial program.

    by_levels: whether channels decay by more within a chunk than fp32 holds. multiprocessors: of the device, which
    decide whether sequences are cut into segments.
    """

    plan: KernelPlan
    sizes: Sizes
    C: int
    KP: int
    VP: int
    block: int
    by_levels: bool
    multiprocessors: int

    @property
    def forward(self) -> tuple[KernelWork, ...]:
        return self._forward({}, {})

    @property
    def keeping(self) -> tuple[KernelWork, ...]:
        """The same with a backward to follow: the scan leaves what that reads, and programs need room for states."""
        scores = {name: size for name, size in self.scratch.items() if self._scoring and name.startswith("A_")}
        return self._forward({"states": self.state_bytes}, {**self._values("U", self.plan.erasing), **scores})

    def _forward(self, states: Mapping[str, float], kept: Mapping[str, float]) -> tuple[KernelWork, ...]:
        """states, kept: what the scan leaves beside an output; programs have room for U in any case."""
        corrected = tuple(triton_values.equations(self.plan).values())
        rests = [name for name in triton_values.value_fields(self.plan) if name.endswith("_rest")]
        solving = solve_in_scan.read_by_scan(self.plan) if self._solving else []
        reads = {name: self.scratch[name] for name in [*triton_values.strengths(self.plan), *rests, *solving]}
        numbers = scores_in_scan.fields(self.plan) if self._scoring else {}
        for_output = reads | {name: self.scratch[name] for name in numbers}
        scan = self._serial("scan", (*corrected, *self._equations("O", "S_next")), for_output, self._output("o"))
        scores = 2 * self.C * self.KP * (self.VP // self.block) if self._scoring else 0
        scan = replace(scan, reads=self._without_A(self._without_W(scan.reads)), flops=scan.flops + scores)
        scan = self._in_roles(scan, leaving={**scan.writes, **self._values("U", self.plan.erasing), **states})
        scan = replace(scan, writes={**scan.writes, **kept, **states})
        summary = self._summary((*corrected, *self._equations("S_next")), reads, self._added[0])
        return (self._prepare(), *(replace(work, reads=self._without_W(work.reads)) for work in summary), scan)

    @property
    def backward(self) -> tuple[KernelWork, ...]:
        reversed_ = {"state_gradients": self.state_bytes, **self._corrected_gradients}
        equations = (*self.plan.form.reverse_scan, *(self._gradients("dR") if self._solving else []))
        reads = {**self._output("do"), **{name: self.scratch[name] for name in self._solving}}
        reverse = self._serial("reverse", equations, reads, reversed_)
        reverse = replace(reverse, reads=self._without_W(reverse.reads), reverse=True)
        reverse = self._in_roles(reverse, leaving=reverse.writes)
        summary = self._summary(equations, reads, self._added[1])
        kernels = (
            *(replace(work, reads=self._without_W(work.reads)) for work in summary),
            reverse,
            *((self._both_axes(),) if self._on_both_axes else (self._score_gradients(), self._walk_over_states())),
            *((self._near_gradients(),) if self.plan.decay_axis else ()),
        )
        return kernels if self.sizes.H == self.sizes.HV else (*kernels, self._group_sums())

    @cached_property
    def scratch(self) -> dict[str, float]:
        """What `prepare` leaves behind in training; vectors read in place are none of it, nor is W where scans solve
        and nobody wants M."""
        made = {n: self._scratch_bytes(shape) for n, (shape, _) in scratch(self.plan).items()}
        later = [*self._vectors_in_place, *(f"U_{e}" for e in self.plan.erasing)]
        if self._solving:
            later += [n for n in made if "not for_roles" in solve_in_scan.condition(self.plan, n)]
        else:
            later += solve_in_scan.fields(self.plan)
        later += () if self._scoring else scores_in_scan.fields(self.plan)
        made = {n: size for n, size in made.items() if n not in later}
        return made if self.segments > 2 else self._without_W(made)

    @property
    def saved(self) -> dict[str, float]:
        """What the backward reads again, beside states."""
        kept = {name: size for name, size in self.scratch.items() if name not in let_go(self.plan)}
        return {**kept, **self._values("U", self.plan.erasing)}

    @property
    def _vectors_in_place(self) -> dict[str, str]:
        """Vectors that serial kernels read where the inputs lie, by field: the input."""
        found: dict[str, str] = {}
        if in_place(self.plan) != "False":
            found |= {"read": self.plan.read.base, **{f"write_{j}": base for j, base in enumerate(self.plan.write)}}
        if triton_values.in_place(self.plan) != "False":
            fields = triton_values.value_fields(self.plan)
            found |= {name: triton_values.input_of(self.plan, name) for name in fields}
        return found

    @property
    def inputs(self) -> dict[str, float]:
        """Input tensors; one shared by a group of heads counts once a group."""
        return {i.name: self._elements(i) * _width(i) for i in self.plan.spec.inputs}

    @property
    def floor_flops(self) -> float:
        """Token by token: a product with the state for the read, and for each term's write and erase."""
        return 2 * self.sizes.K * self.sizes.V * (1 + len(self.plan.terms) + len(self.plan.erasing))

    def _prepare(self) -> KernelWork:
        kept = {name.split("_")[0] for name in self.scratch}
        solved = [e for e in self.plan.form.solved if e.target.name == "W" and "W" in kept]
        count = sum(1 for _ in rows_of_scores(self.plan)) - self._scoring
        scores = 2 * self.C * self.KP * self._passes * count
        passed_by = set(self._vectors_in_place.values()) & {i.name for i in self.plan.inputs_on("V")}
        passed_by |= {*(gluon_prepare.passed_by(self.plan) if self._scoring else ())}
        reads = {name: size for name, size in self.inputs.items() if name not in passed_by}
        by_tokens = self._copied(gluon_prepare.in_flight(self.plan), chunk=64)
        kind = _kind(by_tokens or self._copied(gluon_prepare_channels.in_flight(self.plan), chunk=32))
        writes, products = self._without_A(self.scratch), scores + self._solve + self._flops(solved)
        return self._parallel("prepare", reads, writes, products, kind)

    @cached_property
    def _solving(self) -> list[str]:
        """What the scans read beside where they solve for corrected values themselves; W is for M then."""
        return [*solve_in_scan.fields(self.plan)] if self._copied(gluon_prepare.in_flight(self.plan), chunk=64) else []

    @cached_property
    def _scoring(self) -> bool:
        """Whether the scan makes scores of reads itself; A is for the backward then, and the scan's to write."""
        found = scores_in_scan.scores_in_scan(self.plan) and gluon_prepare.in_flight(self.plan)
        return self._copied(found, chunk=64)

    def _without_A(self, moved: Mapping[str, float]) -> dict[str, float]:
        return {n: size for n, size in moved.items() if not (self._scoring and n.startswith("A_"))}

    def _without_W(self, moved: Mapping[str, float]) -> dict[str, float]:
        return {n: size for n, size in moved.items() if not (self._solving and n.startswith("W_"))}

    @property
    def checkpoints(self) -> float:
        """Bytes of states where few are kept."""
        return 2 * self.state_bytes / CHECKPOINT

    @property
    def replay(self) -> KernelWork:
        """Of the others then, in runs of a few chunks, side by side."""
        reads = {**self._corrected, "checkpoints": self.checkpoints}
        work = self._serial("states", self._equations("S_next"), reads, {"states": self.state_bytes})
        runs = -(-self._chunks // CHECKPOINT)
        return replace(work, programs=self.sizes.B * self._serial_programs * runs, steps=min(CHECKPOINT, self._chunks))

    def _score_gradients(self) -> KernelWork:
        equations = self._gradients("dA", "dL", "dV", *([] if self._solving else ["dR"]))
        made = {i.name for i in self.plan.inputs_on("V")}
        inputs = {
            i.name: self.inputs[i.name]
            for i in self.plan.spec.inputs
            if not i.axis or i.name in made - self._plain_values
        }
        reads = {**inputs, **self._output("do"), **self._corrected, **self._corrected_gradients}
        solve = {name: size for name, size in self._scratch_of(equations).items() if name not in reads}
        writes = {**({} if self._solving else self._solved_gradients), **self._score_bytes}
        writes |= {f"d{name}": self._gradient_bytes[f"d{name}"] for name in made}
        sums = self._sums if "sums" in score_operands(self.plan) else {}
        products = self._flops(equations)
        return self._parallel("score_gradients", {**reads, **solve, **sums}, writes, products, Kind.STREAMING)

    def _both_axes(self) -> KernelWork:
        """In one kernel, between whose parts nothing passes through memory."""
        values, keys = self._score_gradients(), self._walk_over_states()
        passed = {*([] if self._solving else self._solved_gradients), *self._score_bytes}
        return replace(
            keys,
            reads={name: size for name, size in {**values.reads, **keys.reads}.items() if name not in passed},
            writes={name: size for name, size in {**values.writes, **keys.writes}.items() if name not in passed},
            flops=values.flops + keys.flops,
        )

    @property
    def _on_both_axes(self) -> bool:
        return self._copied_by_key_axis and not self.plan.decay_axis and on_both_axes(self.plan)

    @property
    def _copied_by_key_axis(self) -> bool:
        """Whether the kernel that reads the states copies them at once."""
        if self.plan.decay_axis:
            return self._copied(gluon_far_gradients.in_flight(self.plan), chunk=32)
        operands = len([*row_names(self.plan), *column_names(self.plan)])
        fit = operands * self.C <= 2 * self.VP  # where states were
        return self._copied(gluon_gradients.in_flight(self.plan) and fit, chunk=64)

    def _copied(self, in_flight: bool, chunk: int) -> bool:
        """Whether a kernel that an op may have is taken at these sizes. chunk: tokens that it is written for."""
        return in_flight and chunk == self.C and self.KP in KEY_WIDTHS

    def _walk_over_states(self) -> KernelWork:
        """What reads the states: all of the key axis, or where every channel decays, what comes from afar."""
        equations = self._gradients("da_in", "dq_in", "dw_out", "ddecay_out")
        states = {"states": self.state_bytes, "state_gradients": self.state_bytes}
        reads = {**self._on_keys, **self._output("do"), **states, **self._corrected, **self._score_bytes, **self._sums}
        reads |= self._solved_gradients
        reads |= {name: size for name, size in self.scratch.items() if name == "to_end"}
        far = self.C.bit_length() - 1 - NEAR if self.plan.decay_axis and self.by_levels else 1
        pairs = 4 * self.C * self.KP * far * sum(1 for _ in rows_of_scores(self.plan))
        name, writes = ("far_gradients", self._far) if self.plan.decay_axis else ("gradients", self._key_gradients)
        return self._parallel(name, reads, writes, self._flops(equations) + pairs, _kind(self._copied_by_key_axis))

    def _near_gradients(self) -> KernelWork:
        """Pairs within a block, one by one: no products of tiles. Adding up key blocks moves next to nothing."""
        reads = {**self._on_keys, **self._score_bytes, **self._far, **self._sums}
        return self._parallel("gradients", reads, self._key_gradients, 0.0, Kind.STREAMING)

    @property
    def _corrected(self) -> dict[str, float]:
        """Corrected values, which the forward left for the backward."""
        return self._values("U", self.plan.terms)

    @property
    def _corrected_gradients(self) -> dict[str, float]:
        """What the reverse scan leaves."""
        if self._solving:
            return self._solved_gradients
        rests = {f"dU_{e}_rest": float(self.VP * LOW) for e in self.plan.erasing}
        return {**self._values("dU", self.plan.terms), **rests}

    @property
    def _solved_gradients(self) -> dict[str, float]:
        """Of what the chunk's erases were solved for, in two parts where an erase's own gradient hangs on it."""
        rests = {f"dR_{e}_rest": float(self.VP * LOW) for e in self.plan.erasing if self.plan.erases_apart}
        return {**self._values("dR", self.plan.erasing), **rests}

    @property
    def _score_bytes(self) -> dict[str, float]:
        """Gradients of the scores, between kernels."""
        whole = whole_scores(self.plan)
        names = [f"d{score}" for score, _, _ in rows_of_scores(self.plan)]
        return {name: float(self.C * (FULL if name in whole else LOW)) for name in names}

    @property
    def _far(self) -> dict[str, float]:
        """What reaches every row and column operand from afar, between kernels."""
        names = ["read", *(f"erase_{i}" for i in self.plan.erasing), *(f"write_{j}" for j in self.plan.terms)]
        return {**{f"d_{name}": float(self.KP * FULL) for name in names}, "dG_end": self.KP * FULL / self.C}

    @property
    def _key_gradients(self) -> dict[str, float]:
        return {f"d{i.name}": self._gradient_bytes[f"d{i.name}"] for i in self.plan.spec.inputs if i.axis != "V"}

    @property
    def _on_keys(self) -> dict[str, float]:
        return {i.name: self.inputs[i.name] for i in self.plan.spec.inputs if i.axis != "V"}

    @property
    def _sums(self) -> dict[str, float]:
        return {"sums": self.scratch["sums"]} if "sums" in self.scratch else {}

    @property
    def _plain_values(self) -> set[str]:
        """Inputs that are values as they are: their gradient needs them no more."""
        made = {name for value in self.plan.values if not value.is_Symbol for name in names(value)}
        return {i.name for i in self.plan.inputs_on("V")} - made

    def _group_sums(self) -> KernelWork:
        """Gradients of inputs that heads share, added over their group."""
        shared = [i for i in self.plan.spec.inputs if i.heads == "H"]
        reads = {f"d{i.name}": self._gradient_bytes[f"d{i.name}"] for i in shared}
        writes = {f"d{i.name}": self.inputs[i.name] for i in shared}
        return KernelWork(
            name="group sums",
            reads=reads,
            writes=writes,
            flops=0.0,
            programs=len(shared),
            steps=1,
            kind=Kind.STREAMING,
        )

    @property
    def _gradient_bytes(self) -> dict[str, float]:
        grouped = self.sizes.H != self.sizes.HV
        return {
            f"d{i.name}": self._size(i.axis) * (FULL if grouped and i.heads == "H" else _width(i))
            for i in self.plan.spec.inputs
        }

    def _parallel(
        self, name: str, reads: Mapping[str, float], writes: Mapping[str, float], flops: float, kind: Kind
    ) -> KernelWork:
        programs = self.sizes.B * self._chunks * self.sizes.HV
        return KernelWork(name=name, reads=reads, writes=writes, flops=flops, programs=programs, steps=1, kind=kind)

    def _in_roles(self, work: KernelWork, leaving: Mapping[str, float]) -> KernelWork:
        """With the columns that a program would take. leaving: what it writes in training, all of it on values."""
        fields = [*triton_values.value_fields(self.plan), *self._corrected, "do"]
        on_values = {*fields, *(i.name for i in self.plan.inputs_on("V"))}
        whole = sum(size for name, size in work.reads.items() if name not in on_values)
        split = sum(size for name, size in work.reads.items() if name in on_values)

        made = 2 * self.C**2 if self._scoring and work.name == "scan" else 0  # a place that no copy fills

        def shared(columns: int) -> tuple[int, int]:
            share = columns / self.VP
            return int(self.C * (whole + split * share)) + made, int(self.C * sum(leaving.values()) * share)

        upright = gluon_upright.upright(self.plan) and self.C == UPRIGHT_CHUNK and self.KP in KEY_WIDTHS
        if upright and fit_upright(work.programs, self.multiprocessors):
            return replace(work, programs=2 * work.programs, pace=work.pace * UPRIGHT_PACE)
        lengths = (work.steps,) * (self.sizes.B * self.segments)
        sizes = (lengths, self._serial_programs, self.multiprocessors)
        if self.VP % WIDE or self.KP not in KEY_WIDTHS or fitting_columns(*sizes, shared) != WIDE:
            return work
        return replace(work, programs=work.programs // 2, pace=work.pace * WIDER)

    def _serial(
        self, name: str, equations: Iterable[Equation], reads: Mapping[str, float], writes: Mapping[str, float]
    ) -> KernelWork:
        equations = tuple(equations)
        return KernelWork(
            name=name,
            reads={**self._scratch_of(equations), **reads},
            writes=writes,
            flops=self._flops(equations),
            programs=self.sizes.B * self._serial_programs * self.segments,
            steps=-(-self._chunks // self.segments),
        )

    def _summary(
        self, equations: Iterable[Equation], reads: Mapping[str, float], steps: float
    ) -> tuple[KernelWork, ...]:
        """Of all segments of a sequence but one, with M of those inside, and the fold: nothing for whole sequences."""
        if self.segments == 1:
            return ()
        whole, share = self._serial("segments", equations, reads, {}), 1 - 1 / self.segments
        return (
            replace(
                whole,
                reads={name: size * share for name, size in whole.reads.items()},
                writes={"S_ext": FULL * self.KP * self.VP * (self.segments - 1) / self.sizes.T},
                flops=whole.flops * share,
                programs=whole.programs - whole.programs // self.segments,
                steps=round(steps),
            ),
        )

    @cached_property
    def segments(self) -> int:
        """Into how many segments each sequence is cut."""
        chunks = [self._chunks] * self.sizes.B
        return segment_counts(chunks, summarised=False, roles=True, **self._device)[0]

    @property
    def _added(self) -> tuple[float, float]:
        """Steps of a forward's and of a backward's summaries."""
        counts = [self.segments] * self.sizes.B
        return added_steps([self._chunks] * self.sizes.B, counts, roles=True, **self._device)

    @property
    def _device(self) -> dict[str, int]:
        return {
            "programs": self._serial_programs,
            "transition_programs": self.sizes.HV * max(1, self.KP // 64) if self.plan.erasing else 0,
            "multiprocessors": self.multiprocessors,
        }

    @property
    def _serial_programs(self) -> int:
        """Of one sequence."""
        return self.sizes.HV * (self.VP // self.block)

    @property
    def _chunks(self) -> int:
        return -(-self.sizes.T // self.C)

    def _equations(self, *targets: str) -> list[Equation]:
        return [e for e in self.plan.form.solved if e.target.name in targets]

    def _gradients(self, *targets: str) -> list[Equation]:
        return [e for e in self.plan.form.gradients if e.target.name in targets]

    def _scratch_of(self, equations: Iterable[Equation]) -> dict[str, float]:
        factors = [factor for e in equations for monomial in e.terms for factor in monomial.factors]
        scales = [name for letter, (name, _) in row_decays(self.plan).items() if letter in {f.name for f in factors}]
        names = dict.fromkeys(field_of(self.plan, "_".join([f.name, *map(str, f.index)])) for f in factors)
        vectors = {self._vectors_in_place[name] for name in names if name in self._vectors_in_place}
        found = {name: self.scratch[name] for name in [*names, *scales] if name in self.scratch}
        return {**{name: self.inputs[name] for name in vectors}, **found}

    def _scratch_bytes(self, shape: str) -> float:
        *letters, last = [part.strip() for part in shape.split(",")]
        full = last == "dtype=torch.float32"
        dimensions = {"C": self.C, "KP": self.KP, "VP": self.VP}
        elements = prod(dimensions.get(d) or int(d) for d in (letters if full else [*letters, last]))
        return elements * (FULL if full else LOW) / self.C

    @property
    def state_bytes(self) -> float:
        return self.KP * self.VP * LOW / self.C

    def _values(self, name: str, terms: Iterable[int]) -> dict[str, float]:
        return {f"{name}_{j}": float(self.VP * LOW) for j in terms}

    def _output(self, name: str) -> dict[str, float]:
        return {name: float(self.sizes.V * LOW)}

    def _elements(self, declared: TokenInput) -> float:
        share = self.sizes.H / self.sizes.HV if declared.heads == "H" else 1.0
        return self._size(declared.axis) * share

    def _size(self, axis: str) -> int:
        return {"": 1, "K": self.sizes.K, "V": self.sizes.V}[axis]

    @property
    def _passes(self) -> int:
        """Whole-tile products that one score matrix takes: one for each level where decays per channel are strong."""
        return self.C.bit_length() - 1 if self.plan.decay_axis and self.by_levels else 1

    @property
    def _solve(self) -> float:
        """The blockwise inverse, and the Schur complements between erasing terms; products of [C, C] tiles."""
        merges = 2 * max(0, self.C.bit_length() - 1 - SUBSTITUTED)
        products = sum(merges + 3 * done * done + 3 * done for done in range(len(self.plan.erasing)))
        return float(products * 2 * self.C * self.C)

    def _flops(self, equations: Iterable[Equation]) -> float:
        return flops(equations, {"C": self.C, "K": self.KP, "V": self.VP}) / self.C


def _kind(copied: bool) -> Kind:
    return Kind.COPIED_AT_ONCE if copied else Kind.COMPUTING


def _width(declared: TokenInput) -> int:
    """Log decays are passed in fp32, data in 16 bits."""
    return FULL if declared.role == "log_decay" else LOW
