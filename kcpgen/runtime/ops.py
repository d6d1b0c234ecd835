"""Device functions shared by every generated kernel.

Shapes: C tokens of one chunk, KP key channels (K padded to a power of two). Decays are natural logarithms.

A *level* b = 0 .. log2(C)-1 splits the chunk into blocks of 2**(b+1) tokens, each with an earlier and a later half. Every
pair (t, s) of tokens with s < t is in the later and earlier half of one block at exactly one level: the highest bit in which
t and s differ. That gives a decay between any two tokens as a product of two factors <= 1, one owned by t and one by s,
both taken from the boundary between the halves: no overflow, no bound on the gate, and nothing of t depends on tokens after t.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_DECAY_BELOW = tl.constexpr(-120.0)  # exp(-120) is 0 in fp32: clamping here keeps -inf out of differences and changes no value


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
    return tl.exp(tl.minimum(x, 60.0))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), written so that neither side overflows."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + exp(x)); the small-exp branch keeps what 1 + e would round away."""
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(e < 1e-4, e * (1.0 - 0.5 * e), tl.log(1.0 + e))


@triton.jit
def clamp_log_decay(g):
    return tl.maximum(g, NO_DECAY_BELOW)


@triton.jit
def decays(log_decay):
    """Where a log decay was not clamped: below, neither the value nor the gradient matters."""
    return log_decay > NO_DECAY_BELOW


@triton.jit
def same_level(rows, columns, level: tl.constexpr):
    """[C, C] mask of the pairs (later row, earlier column) that `level` owns."""
    t = rows[:, None]
    s = columns[None, :]
    return (t > s) & (((t ^ s) >> level) == 1)


@triton.jit
def same_level_T(rows, columns, level: tl.constexpr):
    """The transpose of `same_level`: (earlier row, later column)."""
    t = columns[None, :]
    s = rows[:, None]
    return (t > s) & (((t ^ s) >> level) == 1)


@triton.jit
def level_boundary(G, level: tl.constexpr, C: tl.constexpr, KP: tl.constexpr):
    """[C, KP]: G at the last token of the earlier half of each token's block."""
    half: tl.constexpr = 1 << level
    block: tl.constexpr = 2 * half
    tiles = tl.reshape(G, (C // block, block, KP))
    last = (tl.arange(0, block) == half - 1)[None, :, None]
    boundary = tl.sum(tl.where(last, tiles, 0.0), axis=1)
    return tl.reshape(tl.broadcast_to(boundary[:, None, :], (C // block, block, KP)), (C, KP))


@triton.jit
def level_decay(G, boundary, rows, level: tl.constexpr):
    """[C, KP] factors: boundary to token in a later half, token to boundary in an earlier one."""
    later = (((rows >> level) & 1) == 1)[:, None]
    return tl.exp(tl.where(later, G - boundary, boundary - G))


@triton.jit
def unit_lower_inverse(L, rows, columns, LEVELS: tl.constexpr):
    """(I - L)^-1 of a strictly lower triangular fp32 L, [C, C], by exact block inversion, level by level.

    If X holds the inverses of the diagonal blocks of one size, those of twice the size need only the block between
    the halves: X + X L_level X. Products run in tf32x3: Neumann series in 16 bits blow up when keys repeat.
    """
    X = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0) + tl.where(same_level(rows, columns, 0), L, 0.0)
    for level in tl.static_range(1, LEVELS):
        across = tl.where(same_level(rows, columns, level), L, 0.0)
        X += tl.dot(tl.dot(X, across, input_precision="tf32x3"), X, input_precision="tf32x3")
    return X


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b with an fp32 sum; PRECISION matters for fp32 operands only, Triton's own default there is tf32."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def select_row(x, rows, index):
    """Row `index` of [C, KP] (-> [KP])."""
    return tl.sum(tl.where((rows == index)[:, None], x, 0.0), axis=0)
