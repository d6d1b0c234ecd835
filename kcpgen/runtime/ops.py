"""Device functions shared by every generated kernel.

Shapes: C tokens of one chunk, KP key channels (K padded to a power of two). Ops take decays as natural logarithms;
the helpers here take exponents of 2, into which `log2_decay` converts them.

A *level* b = 0 .. log2(C)-1 splits the chunk into blocks of 2**(b+1) tokens, each with an earlier and a later half.
Every pair (t, s) of tokens with s < t is in the later and earlier half of one block at exactly one level: the highest
bit in which t and s differ. That gives a decay between any two tokens as a product of two factors <= 1, one owned by t
and one by s, both taken from the boundary between the halves: no overflow, no bound on the gate, and nothing of t
depends on tokens after t.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") == "1":
    from kcpgen.runtime.interpreter import mend

    mend()

# exp(-120) is 0 in fp32: clamping there keeps -inf out of differences and changes no value.
NO_DECAY_BELOW = tl.constexpr(-120.0)

LOG2_E = tl.constexpr(1.4426950408889634)

# Exponents of 2 that a vector may be scaled by, up or down, before it meets one scaled the other way. Of fp32 that
# leaves 2**+-46 to what is scaled: a vector forward, and backward a vector times the gradient of a score.
REACH = tl.constexpr(80.0)


@triton.jit
def load_tile(base, stride, rows, columns, height, width):
    """fp32 [rows, columns] tile at `base`; zero outside height x width. Unit stride along columns."""
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_column(base, stride, rows, height):
    """fp32 [rows]: one scalar per token; zero from `height` on."""
    return tl.load(base + rows.to(tl.int64) * stride, mask=rows < height, other=0.0).to(tl.float32)


@triton.jit
def load_vectors(
    source, batch, input_head, token, chunk, head, column, count, IN_PLACE: tl.constexpr, APART: tl.constexpr
):
    """[C, columns] of the vectors of one chunk and head, as `vector_descriptor` has them: an input's, or in scratch.

    Rows from `count` on are zero. APART: whether they are so in memory.
    """
    if IN_PLACE:
        tile = source.load([batch.to(tl.int32), input_head, token.to(tl.int32), column])
    else:
        tile = source.load([chunk, head, 0, column])
    tile = tile.reshape(tile.shape[2], tile.shape[3])
    if IN_PLACE and not APART:
        tile = tl.where((tl.arange(0, tile.shape[0]) < count)[:, None], tile, 0.0)
    return tile


@triton.jit
def store_tile(base, stride, rows, columns, height, width, value):
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    target = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(target, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def store_column(base, stride, rows, height, value):
    tl.store(base + rows.to(tl.int64) * stride, value.to(base.dtype.element_ty), mask=rows < height)


@triton.jit
def exp(x):
    """exp(x), finite for any x: exp(A_log) * softplus(x) must not become inf * 0. Nothing sane exceeds 1e26."""
    return tl.exp2(tl.minimum(x, 60.0) * LOG2_E)  # one instruction, where tl.exp sees to subnormal results too


@triton.jit
def exp_of_minus_abs(x):
    """exp(-|x|), in [0, 1]: what sigmoid, its slope and softplus are made of."""
    return tl.exp2(tl.abs(x) * -LOG2_E)


@triton.jit
def inverse(x):
    """1 / x of an x > 0, by one instruction and a product: a division sees to divisors out of range too."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), written so that neither side overflows."""
    e = exp_of_minus_abs(x)
    return tl.where(x >= 0, 1.0, e) * inverse(1.0 + e)


@triton.jit
def sigmoid_slope(x):
    """sigmoid(x) sigmoid(-x), the derivative of sigmoid, of the same parts and exact on either side."""
    e = exp_of_minus_abs(x)
    r = inverse(1.0 + e)
    return e * r * r


@triton.jit
def softplus(x):
    """log(1 + exp(x)). Of e = exp(-|x|), log(1 + e) is 2 artanh(e / (2 + e)), a series that loses no small e; its next
    term is below 2e-8 of the whole."""
    e = exp_of_minus_abs(x)
    z = e * inverse(2.0 + e)
    w = z * z
    series = 1 / 3 + w * (1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w * (1 / 13)))))
    return tl.maximum(x, 0.0) + 2.0 * (z + z * w * series)


@triton.jit
def log2_decay(g):
    """The exponent of 2 of a natural-log decay: kernels decay by exp2, one instruction."""
    return tl.maximum(g, NO_DECAY_BELOW) * LOG2_E


@triton.jit
def decays(log_decay):
    """Where a log2_decay was not clamped, also if it is the difference of two rounded sums: this far down, neither the
    value nor the gradient matters."""
    return log_decay > (NO_DECAY_BELOW + 1.0) * LOG2_E


@triton.jit
def replaced(values, at: tl.constexpr, value):
    """The tuple with another value at one place."""
    return values[:at] + (value,) + values[at + 1 :]  # noqa: RUF005 (Triton's own way to build a tuple)


@triton.jit
def same_level(rows, columns, level):
    """[C, C] mask of the pairs (later row, earlier column) that `level` owns.

    In blocks of 2**level the row's number is odd and the column's the one before: one comparison an element.
    """
    half = columns >> level
    later_half = tl.where((half & 1) == 0, half + 1, -1)
    return (rows >> level)[:, None] == later_half[None, :]


@triton.jit
def same_level_T(rows, columns, level):
    """The transpose of `same_level`: (earlier row, later column)."""
    half = rows >> level
    later_half = tl.where((half & 1) == 0, half + 1, -1)
    return later_half[:, None] == (columns >> level)[None, :]


@triton.jit
def later_block(rows, columns, level):
    """[C, C] mask of the pairs (later row, earlier column) in different blocks of 2**level."""
    return (rows >> level)[:, None] > (columns >> level)[None, :]


@triton.jit
def earlier_block(rows, columns, level):
    """The transpose of `later_block`: (earlier row, later column)."""
    return (rows >> level)[:, None] < (columns >> level)[None, :]


@triton.jit
def sum_scalars(chosen, x):
    """[C]: `sum_tokens` of one number per token."""
    return tl.sum(tl.where(chosen, x[None, :], 0.0), axis=1)


@triton.jit
def in_parts(x, LOW: tl.constexpr, COUNT: tl.constexpr = 3):
    """fp32 x as a tuple of tiles whose sum it is: three of 16 bits, which hold all 24 of it, where dots have 16."""
    if LOW == tl.float32:  # noqa: SIM300
        parts = (x,)
    else:
        parts = ()  # type: ignore[assignment]
        for _ in tl.static_range(COUNT):
            part = x.to(tl.bfloat16)
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
            x -= part.to(tl.float32)
    return parts


@triton.jit
def sum_tokens(chosen, parts):
    """[C, WIDTH]: for each token t the sum of x over the tokens s with chosen[t, s], from x `in_parts`, in fp32.

    A product with zeros and ones: no thread needs another one's rows, and no difference of two large sums is taken.
    """
    ones = tl.where(chosen, 1.0, 0.0).to(parts[0].dtype)
    total = tl.dot(ones, parts[0], input_precision="tf32x3")
    for part in tl.static_range(1, len(parts)):
        total = tl.dot(ones, parts[part], total)
    return total


@triton.jit
def level_span(rows, level):
    """chosen[t, s]: tokens between t and the edge of its block's halves at `level`, t itself if in the later half."""
    t = rows[:, None]
    s = rows[None, :]
    edge = ((t >> (level + 1)) << (level + 1)) + (1 << level) - 1
    return ((s > edge) & (s <= t)) | ((s > t) & (s <= edge))


@triton.jit
def level_span_T(rows, columns, level):
    """The transpose of `level_span`: chosen[s, t]."""
    s = rows[:, None]
    t = columns[None, :]
    edge = ((t >> (level + 1)) << (level + 1)) + (1 << level) - 1
    return ((s > edge) & (s <= t)) | ((s > t) & (s <= edge))


@triton.jit
def of_block(blocks, rows, level):
    """chosen[b, s]: token s lies in block b, of 2**level."""
    return blocks[:, None] == (rows >> level)[None, :]


@triton.jit
def up_to(rows):
    """chosen[t, s]: s <= t."""
    return rows[:, None] >= rows[None, :]


@triton.jit
def before(rows):
    """chosen[t, s]: s < t."""
    return rows[:, None] > rows[None, :]


@triton.jit
def after(rows):
    """chosen[t, s]: s > t."""
    return rows[:, None] < rows[None, :]


@triton.jit
def from_on(rows):
    """chosen[t, s]: s >= t."""
    return rows[:, None] <= rows[None, :]


@triton.jit
def level_edge(G_ptr, rows, columns, level, WIDTH: tl.constexpr):
    """[C, WIDTH]: G at the last token of the earlier half of each token's block at `level`, from [C, WIDTH] at G_ptr.

    Memory serves as the exchange between threads: a program has just written its own G there, behind a barrier.
    """
    last = ((rows >> (level + 1)) << (level + 1)) + (1 << level) - 1
    return tl.load(G_ptr + last[:, None] * WIDTH + columns[None, :])


@triton.jit
def within_reach(G_middle, G_end):
    """Whether no channel decays by more than 2**-REACH in either half of the chunk, from G at their ends."""
    return tl.min(tl.minimum(G_middle, G_end - G_middle)) > -REACH


@triton.jit
def in_place(x):
    """x itself. Triton moves the layout conversion of a dot's operand up to the loads that it comes from, through
    elementwise operations but not through a sum: all these tiles would be held once more, several times over."""
    return tl.sum(x[:, :, None], axis=2)


@triton.jit
def in_two(x, LOW: tl.constexpr):
    """x as an operand of dots, and what rounding it lost."""
    low = x.to(LOW)
    return low, (x - low.to(tl.float32)).to(LOW)


@triton.jit
def rounded_apart(x, LOW: tl.constexpr):
    """x as an operand of dots, `in_place`, and what rounding it lost."""
    low, lost = in_two(x, LOW)
    return in_place(low), lost


@triton.jit
def invert_diagonal_blocks(scratch, C: tl.constexpr):
    """Turn the 16 x 16 diagonal blocks of the L in `scratch`, [C, C], into the inverses of those of I - L.

    Forward substitution in fp32: every thread owns a column of a block, the entries of L it needs come by broadcast.
    """
    column = tl.arange(0, 16)
    block = tl.arange(0, C // 16) * (16 * C + 16)
    solved = ()
    for t in tl.static_range(16):
        row = tl.where(column == t, 1.0, 0.0)[None, :] + tl.zeros((C // 16, 16), tl.float32)
        for s in tl.static_range(t):
            row += tl.load(scratch + (block + (t * C + s)))[:, None] * solved[s]
        solved = solved + (row,)  # type: ignore[assignment]  # noqa: RUF005 (Triton's own way to grow a tuple)
    tl.debug_barrier()
    for t in tl.static_range(16):
        tl.store(scratch + (block[:, None] + t * C + column[None, :]), solved[t])


@triton.jit
def dot_whole(a, b, PRECISION: tl.constexpr):
    """a @ b with an fp32 a: where b is 16 bits, a enters as two halves of 16 bits, so that only b was ever rounded."""
    if b.dtype == tl.float32:
        return tl.dot(a, b, input_precision=PRECISION)
    high = a.to(b.dtype)
    return tl.dot(high, b) + tl.dot((a - high.to(tl.float32)).to(b.dtype), b)


@triton.jit
def dot_two(a, a_rest, b, PRECISION: tl.constexpr):
    """(a + a_rest) @ b of an fp32 value in two 16-bit parts; an fp32 a has no rest."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision=PRECISION)
    return tl.dot(a, b) + tl.dot(a_rest, b)


@triton.jit
def dot_both(a, a_rest, b, b_rest, total, PRECISION: tl.constexpr):
    """total + (a + a_rest) @ (b + b_rest) of fp32 values in two 16-bit parts each, but for the product of the rests;
    fp32 operands have none. Accumulated throughout: no sum of products waits in registers of its own."""
    if a.dtype == tl.float32:
        return total + tl.dot(a, b, input_precision=PRECISION)
    total = tl.dot(a_rest, b, total)
    total = tl.dot(a, b_rest, total)
    return tl.dot(a, b, total)


@triton.jit
def dot_fp32(a, b, PRECISION: tl.constexpr):
    """a @ b of fp32 operands: tf32x3, or where the op's own are 16 bits anyway, three bf16 products (2^-16)."""
    if PRECISION == "tf32x3":
        return tl.dot(a, b, input_precision="tf32x3")
    a_high = a.to(tl.bfloat16)
    b_high = b.to(tl.bfloat16)
    a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
    b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(a_high, b_high) + tl.dot(a_low, b_high) + tl.dot(a_high, b_low)


@triton.jit
def unit_lower_inverse(L, scratch, rows, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I - L)^-1 of a strictly lower triangular fp32 L, [C, C]; `scratch` is as large and the program's own.

    Blocks of 16 by substitution, then merged: if X and Y are the inverses of two diagonal blocks, Y L X lies between
    them. No power of L is formed: Neumann series blow up when keys repeat. All of it happens in memory, where blocks
    can be addressed: dots are as large as the blocks, and those of L are not compiled as one chain with these, which
    would have warps share the work along one side of the tile only.
    """
    place = scratch + rows[:, None] * C + rows[None, :]
    tl.debug_barrier()
    tl.store(place, L)
    tl.debug_barrier()
    invert_diagonal_blocks(scratch, C)
    tl.debug_barrier()
    for level in tl.static_range(4, LEVELS):
        merge_blocks(scratch, C, 1 << level, PRECISION)
    inverse = tl.load(place)
    tl.debug_barrier()  # `scratch` may be written over now
    return inverse


@triton.jit
def merge_blocks(scratch, C: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """In place of L between each two inverted diagonal blocks of SIZE: the inverse there. All pairs wait only once."""
    tokens = tl.arange(0, SIZE)
    tile = tokens[:, None] * C + tokens[None, :]
    inverses = ()
    for pair in tl.static_range(C // (2 * SIZE)):
        corner = scratch + pair * (2 * SIZE) * (C + 1)
        earlier = tl.load(corner + tile)
        later = tl.load(corner + SIZE * (C + 1) + tile)
        between = tl.load(corner + SIZE * C + tile)
        inverse = dot_fp32(dot_fp32(later, between, PRECISION), earlier, PRECISION)
        inverses = inverses + (inverse,)  # type: ignore[assignment]  # noqa: RUF005 (as above)
    tl.debug_barrier()
    for pair in tl.static_range(C // (2 * SIZE)):
        tl.store(scratch + (pair * (2 * SIZE) * (C + 1) + SIZE * C) + tile, inverses[pair])
    tl.debug_barrier()


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b with an fp32 sum; PRECISION matters for fp32 operands only, Triton's own default there is tf32."""
    return tl.dot(a, b, input_precision=PRECISION)
