"""No time counts before its numbers are right: compared with the float64 per-token reference on a window of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import calls
from benchmarks.harness.inputs import Arguments
from benchmarks.harness.shapes import Shape
from kcpgen.runtime.split import forced_segments
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import bound_of, relative_rms
from kcpgen.verify.op import Op

WINDOW = 96
PEER_BOUND = 5e-2  # only tells another recurrence, or a broken kernel, from the rounding of 16 bits

Errors = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The first tokens of one sequence; what they give depends on no other token."""

    row: int
    start: int
    stop: int

    def of(self, x: Tensor) -> Tensor:
        """A view: its strides, which kernels are specialised on, stay those of the whole tensor."""
        return x[self.row : self.row + 1, self.start : self.stop]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """o and the gradients of a window by itself, float64."""

    window: Window
    found: Mapping[str, Tensor]


def window_of(shape: Shape) -> Window:
    """Of the last row, or of the second packed sequence, so that batch strides and offsets count."""
    if len(shape.lengths) > 1:
        start, length = shape.lengths[0], shape.lengths[1]
    else:
        start, length = 0, shape.tokens
    return Window(row=shape.batch - 1, start=start, stop=start + min(WINDOW, length))


def reference(op: Op, shape: Shape, arguments: Arguments) -> Reference:
    window = window_of(shape)
    return Reference(window=window, found=_run(op, window, arguments, torch.float64, "naive"))


def our_errors(op: Op, arguments: Arguments, expected: Reference, o: Tensor, gradients: Mapping[str, Tensor]) -> Errors:
    """Of the timed output; in training also of the same kernels run on the window alone, since gradients depend on
    what follows: of the timed ones it is asked only that they are finite."""
    found = _run(op, expected.window, arguments, None, calls.BACKEND) if gradients else {}
    errors = {name: relative_rms(x, expected.found[name]) for name, x in found.items()}
    lost = {f"d{name} (timed)": float("nan") for name, x in gradients.items() if not _finite(x)}
    return {"o (timed)": _output_error(expected, o), **errors, **lost}


def segment_errors(call: Callable[[], Any], o: Tensor, gradients: Mapping[str, Tensor]) -> Errors:
    """Of everything that was timed in segments, against the same call on whole sequences: a window has one segment."""
    with forced_segments(1):
        whole = call()
    pairs = {"o": (o, whole.o), **{f"d{name}": (x, whole.gradients[name]) for name, x in gradients.items()}}
    return {f"{name} (whole)": relative_rms(x, other.double()) for name, (x, other) in pairs.items()}


def peer_errors(expected: Reference, o: Tensor, gradients: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Errors:
    """Of the output against the reference, of gradients against ours over all tokens."""
    compared = {
        f"d{name} (ours)": relative_rms(x, ours[name].double()) for name, x in gradients.items() if name in ours
    }
    return {"o (timed)": _output_error(expected, o), **compared}


def too_large(op: Op, errors: Errors) -> str:
    """The errors of ours beyond their bounds, as text; NaN is beyond any."""
    case = Case(label="", backend="triton", dtype="bfloat16")
    return _beyond(errors, {name: bound_of(op, case, name.split()[0]) for name in errors})


def peer_too_large(errors: Errors) -> str:
    return _beyond(errors, dict.fromkeys(errors, PEER_BOUND))


def _beyond(errors: Errors, bounds: Mapping[str, float]) -> str:
    wrong = [f"{name} {error:.1e} > {bounds[name]:.0e}" for name, error in errors.items() if not error <= bounds[name]]
    return ", ".join(wrong)


def _output_error(expected: Reference, o: Tensor) -> float:
    return relative_rms(expected.window.of(o), expected.found["o"]) if _finite(o) else float("nan")


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _run(op: Op, window: Window, arguments: Arguments, dtype: torch.dtype | None, backend: str) -> dict[str, Tensor]:
    """o and d<leaf> on the window; dtype None leaves every input in its own."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype or x.dtype).requires_grad_()

    tokens = {name: leaf(window.of(x)) for name, x in arguments.tokens.items()}
    leaves = {**tokens, **{name: leaf(x) for name, x in arguments.params.items()}}
    upstream = window.of(arguments.d_output).to(dtype or arguments.d_output.dtype)
    call = op.naive if backend == "naive" else op.chunk
    chosen = {} if backend == "naive" else {"backend": backend}
    o, _ = call(**leaves, **arguments.keywords, **chosen)
    gradients = torch.autograd.grad(o, list(leaves.values()), upstream)
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}
