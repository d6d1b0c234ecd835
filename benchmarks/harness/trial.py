"""One configuration of tiles on the device: right before it may be timed, then timed kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import agreement, device, inputs
from benchmarks.harness.calls import our_call
from benchmarks.harness.measure import Problem, Result, in_direction
from benchmarks.harness.shapes import Shape
from kcpgen.runtime import hopper
from kcpgen.runtime.split import forced_segments
from kcpgen.runtime.tuned import looked_up_by
from kcpgen.runtime.tuned_table import Overrides
from kcpgen.verify.compare import relative_rms
from kcpgen.verify.op import Op, load_op

Times = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A problem, and what its call gives with the tiles of `choose_tiles`: right, or there is nothing to tune."""

    problem: Problem
    plain: Result


@contextmanager
def tiles(overrides: Overrides) -> Iterator[None]:
    """Whole sequences and portable kernels, with the chosen tiles but for `overrides`, whatever the table has.

    Those in roles choose for themselves how many chunks are in flight.
    """
    with looked_up_by(lambda structure: overrides), forced_segments(1), hopper.forced(False):
        yield


def problem_of(op: Op, shape: Shape, where: str) -> Problem:
    arguments = inputs.draw(op, shape, "open", where)
    expected = agreement.reference(op, shape, arguments)
    return Problem(op=op, shape=shape, gates="open", arguments=arguments, expected=expected)


def reference_of(directory: Path, shape: Shape, where: str) -> Reference:
    """Raises ValueError where the chosen tiles themselves are wrong."""
    problem = problem_of(load_op(directory), shape, where)
    with tiles({}):
        plain = _run(problem, "training")
        wrong = agreement.too_large(problem.op, _errors(problem, plain))
    if wrong:
        raise ValueError(f"{problem.op.name} is wrong with the tiles that are chosen for it: {wrong}")
    return Reference(problem=problem, plain=plain)


def fault(references: Sequence[Reference], overrides: Overrides) -> str:
    """Why these tiles may not be timed, "" if every op agrees with its reference. Raises DeviceLostError."""
    for reference in references:
        try:
            with tiles(overrides):
                errors = _all_errors(reference)
        except Exception as error:  # a kernel may fail in any way
            device.synchronize()
            return f"{reference.problem.op.name} failed: {device.first_line(error)}"
        if wrong := agreement.too_large(reference.problem.op, errors):
            return f"{reference.problem.op.name} is wrong: {wrong}"
    return ""


def _all_errors(reference: Reference) -> agreement.Errors:
    """Against float64 on a window, in both directions; over all tokens against the tiles that were found right."""
    problem, plain = reference.problem, reference.plain
    found = _run(problem, "training")
    pairs = {"o": (found.o, plain.o), **{f"d{n}": (x, plain.gradients[n]) for n, x in found.gradients.items()}}
    moved = {f"{name} (chosen tiles)": relative_rms(x, other.double()) for name, (x, other) in pairs.items()}
    return {**_errors(problem, found), **moved}


def _errors(problem: Problem, found: Result) -> agreement.Errors:
    forward = agreement.our_errors(problem.op, problem.arguments, problem.expected, _run(problem, "forward").o, {})
    training = agreement.our_errors(problem.op, problem.arguments, problem.expected, found.o, found.gradients)
    return {**{f"{name.split()[0]} (forward)": error for name, error in forward.items()}, **training}


def _run(problem: Problem, direction: str) -> Result:
    return _call(problem, direction)()


def _call(problem: Problem, direction: str) -> Callable[[], Result]:
    return in_direction(our_call(problem.op, problem.arguments), problem.arguments, direction)


def times(references: Sequence[Reference], overrides: Overrides, rounds: int) -> Times:
    """Device ms of each kernel of a training step, the mean of `rounds`, added up over the ops."""
    total: Times = {}
    for reference in references:
        call = _call(reference.problem, "training")

        def several(call: Callable[[], Result] = call) -> None:
            for _ in range(rounds):
                call()

        with tiles(overrides):
            call()
            for name, ms in device.kernels(several).items():
                total[name] = total.get(name, 0.0) + ms / rounds
    return total


def of(kernels: Sequence[str], found: Mapping[str, float]) -> float:
    """ms of the kernels of a part. Raises ValueError where none of them ran: then nothing was measured."""
    there = [found[name] for name in kernels if name in found]
    if not there:
        raise ValueError(f"none of {', '.join(kernels)} ran, but {', '.join(sorted(found)) or 'nothing'}")
    return sum(there)
