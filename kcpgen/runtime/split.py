"""Whether sequences are cut into segments that run side by side, and into how many: a model, in integers.

A serial kernel walks one program a head and block of value columns through a sequence, chunk after chunk. Where these
are fewer than a device has multiprocessors, most of it idles. Cut into segments, sequences take more programs and fewer
chunks each, and one more pass to summarise a segment before the state that enters it is known.

Times here are counted in chunks that one program walks. Only sizes decide, never whether gradients are asked for: a
checkpointed forward has to compute the same numbers as its recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

SHORTEST = 32  # chunks of a segment: below, launches and summaries take as long as what they save
GAIN = 1.25  # how much faster a training step's serial kernels must be: the model is good to about that much
LAUNCH = 8  # a launch and the filling of its pipeline, about 7 us
FOLD = 8  # one product of a dense transition and a state: reading 64 KiB, then three dots a block
SCALE = 1  # the same of a diagonal or a number: a load and a multiplication
# A chunk of M beside one of the state, by whether warps of both kernels have roles (`kcpgen.runtime.hopper`): 0.9 us
# of 0.65 at chunks of 32, 1.4 of 1.2 at 64. Portable: 1.9 us of 0.8 to 1 on an H200, and an
# estimate for other devices, two chunks in flight instead of three, which counts.
TRANSITION = {False: 1.5, True: 1.4}
SHARED = 1.4  # two programs on one multiprocessor, beside one

_forced: ContextVar[int | None] = ContextVar("segments", default=None)


@contextmanager
def forced_segments(count: int | None) -> Iterator[None]:
    """Calls made inside cut every sequence into `count` segments; 1 forbids it, None leaves it to the model."""
    token = _forced.set(count)
    try:
        yield
    finally:
        _forced.reset(token)


def asked_for(of_tiles: int | None) -> int | None:
    """Segments that tiles, or whoever surrounds the call, ask for; None: the model decides."""
    return _forced.get() if of_tiles is None else of_tiles


def equal_segments(chunks: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` segments of each sequence, or as many as it has chunks; an empty sequence is one segment."""
    return tuple(max(1, min(count, n)) for n in chunks)


def segment_counts(
    chunks: Sequence[int],
    *,
    programs: int,
    transition_programs: int,
    multiprocessors: int,
    summarised: bool = False,
    roles: bool = False,
) -> tuple[int, ...]:
    """Number of segments of each sequence, from its number of chunks; all 1 where cutting does not pay.

    programs: of a serial kernel for one sequence. transition_programs: likewise of the kernel of M, 0 without one.
    summarised: whether the one sequence comes from another rank of context parallelism and goes on on a third: its
    summaries are made whether it is cut or not. Nothing else about ranks matters: in calls that follow each other a
    rank that is behind waits for nobody, and works as one device does. roles: whether the warps of serial kernels have
    roles.
    Tried are as many segments of the longest as fill the device with one program a multiprocessor, half as many, ...
    """
    found = (1,) * len(chunks)
    longest, total = max(chunks, default=0), sum(chunks)
    count = min(longest // SHORTEST, multiprocessors * longest // (programs * max(total, 1)))
    if count < 2:
        return found
    sizes = (programs, transition_programs, multiprocessors, summarised, roles)
    best = training_steps(chunks, found, *sizes) / GAIN
    while count >= 2:
        length = -(-longest // count)
        counts = tuple(max(1, min(-(-n // length), n // SHORTEST)) for n in chunks)
        steps = training_steps(chunks, counts, *sizes)
        if steps < best:
            found, best = counts, steps
        count //= 2
    return found


def training_steps(
    chunks: Sequence[int],
    counts: Sequence[int],
    programs: int,
    transition_programs: int,
    multiprocessors: int,
    summarised: bool = False,
    roles: bool = False,
) -> float:
    """Of a forward and a backward: the scan, the reverse scan, which takes as long as two, and what cutting adds.

    And the summaries for other ranks: of the sequence as it is, or, where segments are summarised, of one more of them.
    """
    longest = max(-(-n // count) for n, count in zip(chunks, counts, strict=True))
    whole = _pass(programs * sum(chunks), longest, multiprocessors)
    added = sum(added_steps(chunks, counts, programs, transition_programs, multiprocessors, roles))
    owed = 2 * (whole if max(counts) == 1 else longest) if summarised else 0.0
    return 3.0 * whole + added + owed


def added_steps(
    chunks: Sequence[int],
    counts: Sequence[int],
    programs: int,
    transition_programs: int,
    multiprocessors: int,
    roles: bool = False,
) -> tuple[float, float]:
    """Of the forward and the backward: summaries of all segments but the last of each sequence (the first, backward).

    Forward, M of those inside is worked out beside them. Then each time one fold over the segments of a sequence.
    """
    most = max(counts)
    if most == 1:
        return 0.0, 0.0
    pairs = list(zip(chunks, counts, strict=True))
    longest = max(-(-n // count) for n, count in pairs)
    summarised = programs * sum(n - n // count for n, count in pairs)
    inner = TRANSITION[roles] * transition_programs * sum(n - 2 * n // count for n, count in pairs if count > 2)
    slowest = TRANSITION[roles] * longest if inner else longest
    fold = 2 * LAUNCH + (FOLD if inner else SCALE) * (most - 2)
    forward = _pass(summarised + inner, slowest, multiprocessors)
    return forward + fold, _pass(summarised, longest, multiprocessors) + fold


def _pass(work: float, longest: float, multiprocessors: int) -> float:
    """Time of a kernel whose programs walk `work` chunks in all, the longest of them `longest`."""
    programs = work / max(longest, 1)
    if programs <= multiprocessors:
        return longest
    return longest * SHARED * -(-programs // (2 * multiprocessors))
