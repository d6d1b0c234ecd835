"""How much of a state outlives the tokens after it: device functions of kernels that bound it and of those told of it.

What a token does to a state is at most its decay times its erase in the spectral norm, so that a sum of the logarithms
of both, over the chunks at the end of a segment, bounds what is left of all that came before these. Below FORGOTTEN the
segment's transition M is taken as zero, and its summary is begun with these chunks. Bounds count in powers of two. What
is not a number is never at most anything, so that nothing is forgotten because of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kcpgen.runtime.ops import LOG2_E, NO_DECAY_BELOW

# 2**-40 of a state's norm: 2**-16 of what rounding leaves of it in fp32, so much may this bound, which is of exact
# vectors, be off where rounded ones erase by more than they should.
FORGOTTEN = tl.constexpr(-40.0)
MOST = tl.constexpr(1024)  # tokens that are looked at: segments are not much longer where they pay
AT_ONCE = 128 * 128  # numbers of a tile of tokens and keys: of each, a program waits for its copy, then for its sums


def tokens_at_once(chunk: int, width: int) -> int:
    """Whole chunks of tokens with `width` padded keys."""
    return max(chunk, AT_ONCE // max(128, width))


@triton.jit
def forgotten(needed_ptr, place, tokens, C: tl.constexpr):
    """How many of a segment's chunks do not matter to what it is summarised as."""
    return tl.cdiv(tokens, C) - tl.load(needed_ptr + place)


@triton.jit
def is_chosen(forgotten_ptr, place, FORGETTING: tl.constexpr):
    """Whether a launch for heads that forget, or for those that do not, is for the one at that place."""
    return (tl.load(forgotten_ptr + place) > 0) == FORGETTING


@triton.jit
def looks_on(bound, tokens, at_once):
    """Whether chunks are still to be looked at after so many tokens: where gates are on the way to FORGOTTEN within
    MOST tokens, or one look behind."""
    pace = (tokens - at_once) * (FORGOTTEN / MOST)
    return (bound > FORGOTTEN) & (bound <= pace) & (tokens < MOST)


@triton.jit
def summed_on(token_bounds, FROM_THE_START: tl.constexpr):
    """Bounds of tokens summed along the first axis, from the end, or from the start."""
    return tl.cumsum(token_bounds, axis=0, reverse=not FROM_THE_START)


@triton.jit
def chunks_until(bounds, rows, count, chunks, CHUNK: tl.constexpr, FROM_THE_START: tl.constexpr):
    """Of the chunks that are looked at those which it takes until little enough is left, and whether it gets so far.

    bounds: of all tokens looked at up to each row. count, chunks: of the rows that are tokens, and what they make.
    """
    done = (rows % CHUNK == CHUNK - 1) | (rows == count - 1) if FROM_THE_START else rows % CHUNK == 0
    enough = done & (rows < count) & (bounds <= FORGOTTEN)
    if FROM_THE_START:
        needed = tl.min(tl.where(enough, rows, count - 1), axis=0) // CHUNK + 1
    else:
        needed = chunks - tl.max(tl.where(enough, rows, 0), axis=0) // CHUNK
    return needed, tl.max(enough.to(tl.int32), axis=0) > 0


@triton.jit
def log2_of_decay(g):
    """As `log2_decay`, but NaN stays NaN."""
    return tl.maximum(g, NO_DECAY_BELOW, propagate_nan=tl.PropagateNan.ALL) * LOG2_E


@triton.jit
def largest(x, inside, axis: tl.constexpr):
    """Along an axis, of what is inside. Triton's maximum passes NaN by; the sum of an x that is finite is too."""
    return tl.max(tl.where(inside, x, float("-inf")), axis=axis) + 0.0 * tl.sum(x, axis=axis)


@triton.jit
def erase_along(share):
    """log2 of the norm of I - c w w^T for share = c |w|^2: of the greater one of 1 and |1 - share|."""
    return tl.log2(0.5 * (tl.abs(share) + tl.abs(2.0 - share)))


@triton.jit
def erase_across(decay, squares, inner):
    """log2 of the norm of decay I + w e^T for squares = |w|^2 |e|^2 and inner = w . e.

    Squared it is the greater eigenvalue of a matrix of two rows, of which the sum is squares + 2 decay (decay + inner)
    and the product decay^2 (decay + inner)^2.
    """
    rest = squares + 4.0 * decay * (decay + inner)
    root = tl.sqrt(tl.maximum(rest, 0.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.log2(0.5 * (tl.sqrt(squares) + root))
