"""One case: the op and its float64 per-token reference on the same rounded inputs, compared tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kcpgen.runtime.halves import forced_halves
from kcpgen.runtime.kept import replayed_states
from kcpgen.runtime.split import forced_segments
from kcpgen.verify.cases import Case
from kcpgen.verify.inputs import Inputs, in_float64, make_inputs
from kcpgen.verify.op import Op, Recurrence

EXACT = 1e-10  # float64 against float64
FULL = 1e-4  # fp32 inputs: no operand of a kernel is rounded to 16 bits
DATA = 5e-3  # o, the final state and the gradients of data
SENSITIVE = 8e-3  # gradients of gates (log decays, scalars per token, gates per channel), parameters: sums that cancel
EXTREME = 10.0  # how much wider the bound is for inputs made to break kernels
BF16_STEP = 2.0**-9
NOTHING = 1e-12  # a reference smaller than this is compared absolutely: it is zero but for underflow


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Relative RMS error of one tensor, and of its worst sequence where the tensor is divided by sequences.

    floor: likewise, how far the reference moves when its bfloat16 inputs move by half a unit in the last place.
    """

    tensor: str
    error: float
    bound: float
    worst_sequence: float | None = None
    floor: float | None = None

    @property
    def ok(self) -> bool:
        """Written so that NaN is a failure."""
        return self.error <= self.bound and (self.worst_sequence is None or self.worst_sequence <= 2 * self.bound)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    case: Case
    figures: tuple[Figure, ...]
    failure: str = ""  # why there are no figures: the call raised

    @property
    def ok(self) -> bool:
        return not self.failure and all(figure.ok for figure in self.figures)


def compare(op: Op, case: Case, device: str) -> Comparison:
    """Run a case. What the op raises becomes the comparison's failure; what the reference raises is raised."""
    inputs = make_inputs(op, case, device)
    expected = evaluate(op.naive, in_float64(inputs), case)
    try:
        found = evaluate(op.chunk, inputs, case, backend=case.backend)
    except Exception as error:  # a kernel may fail in any way; the other cases still count
        return Comparison(case=case, figures=(), failure=f"{type(error).__name__}: {error}".splitlines()[0])
    moved = _moved(op, inputs, case)
    return Comparison(
        case=case,
        figures=tuple(_figure(op, case, name, found[name], expected[name], moved.get(name)) for name in expected),
    )


def evaluate(call: Recurrence, inputs: Inputs, case: Case, **keywords: Any) -> dict[str, Tensor]:
    """Outputs and gradients of all leaves, by name: o, final_state, d<input>."""
    offsets = torch.tensor(case.offsets, device=inputs.device) if case.offsets else None
    with forced_segments(case.segments), replayed_states(case.replayed), forced_halves(case.halves):
        o, state = call(
            **inputs.tokens,
            **inputs.params,
            **inputs.keywords,
            initial_state=inputs.initial_state,
            output_final_state=True,
            cu_seqlens=offsets,
            **keywords,
        )
    assert state is not None
    results = [(o, inputs.d_output), (state, inputs.d_state)]
    roots = [(y, dy) for y, dy in results if dy is not None]
    leaves = inputs.leaves
    outputs, upstream = zip(*roots, strict=True)
    grads = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    found = {f"d{name}": torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}
    return {"o": o.detach(), "final_state": state.detach(), **found}


def _moved(op: Op, inputs: Inputs, case: Case) -> Mapping[str, Tensor]:
    if case.backend != "triton" or case.dtype != "bfloat16":
        return {}
    return evaluate(op.chunk, in_float64(inputs, perturbed=BF16_STEP), case, backend="eager")


def _figure(op: Op, case: Case, name: str, found: Tensor, expected: Tensor, moved: Tensor | None) -> Figure:
    return Figure(
        tensor=name,
        error=relative_rms(found, expected),
        bound=bound_of(op, case, name),
        worst_sequence=_worst_sequence(case, name, found, expected),
        floor=None if moved is None else relative_rms(moved, expected),
    )


def bound_of(op: Op, case: Case, name: str) -> float:
    if case.dtype == "float64":
        return EXACT
    wider = EXTREME if case.extreme else 1.0
    if case.dtype == "float32":
        return FULL * wider
    source = name.removeprefix("d")
    gate = op.is_scalar(source) or source in op.description.log_decays or source in channel_gates(op)
    sensitive = gate or source in op.signature.params
    return (SENSITIVE if sensitive else DATA) * wider


def channel_gates(op: Op) -> frozenset[str]:
    """Inputs that only scale, channel by channel, the vector with which a term erases what it writes."""
    return frozenset(
        name
        for term in op.description.terms
        if set(term.erase) & set(term.write)
        for name in term.erase
        if name not in term.write
    )


def relative_rms(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, root mean square; NaN where anything is not finite."""
    if found.shape != expected.shape:
        return float("nan")
    error, size = float((found.double() - expected).norm()), float(expected.norm())
    return error if size < NOTHING else error / size


def _worst_sequence(case: Case, name: str, found: Tensor, expected: Tensor) -> float | None:
    """Of the output and the states, which are divided by sequences: a short one hides in the sum over all."""
    if name == "o" and case.offsets:
        spans = [(a, b) for a, b in pairwise(case.offsets) if b > a]
        return max(relative_rms(found[:, a:b], expected[:, a:b]) for a, b in spans)
    if name in ("final_state", "dinitial_state") and case.sequences > 1:
        return max(relative_rms(found[n], expected[n]) for n in range(case.sequences))
    return None
