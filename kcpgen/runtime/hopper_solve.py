"""The triangular solve of one chunk for Hopper, in registers and shared memory.

The same steps as `kcpgen.runtime.ops.unit_lower_inverse`, whose threads exchange numbers through global memory. Threads
wait for each other wherever a tile is written after another part of it was: all of a tile is written at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kcpgen.runtime.hopper_ops import rounded

BLOCK = gl.constexpr(16)  # rows that are solved one by one


@gluon.jit
def unit_lower_inverse(L, C: gl.constexpr):
    """(I - L)^-1 of a strictly lower triangular fp32 L, [C, C], as a tile in shared memory.

    Blocks of 16 by substitution, then merged: if X and Y are the inverses of two diagonal blocks, Y L X lies between
    them. No power of L is formed: Neumann series blow up when keys repeat.
    """
    inverse = gl.allocate_shared_memory(gl.float32, [C, C], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    inverse.store(with_solved_blocks(L, C))
    merge_blocks(inverse, C, BLOCK)
    if C > 2 * BLOCK:
        merge_blocks(inverse, C, 2 * BLOCK)
    return inverse


@gluon.jit
def with_solved_blocks(L, C: gl.constexpr):
    """L, but in its 16 x 16 diagonal blocks the inverses of those of I - L.

    Forward substitution in fp32: every thread owns a column of a block, and reads whole rows of L there.
    """
    BLOCKS: gl.constexpr = C // BLOCK
    tiles = L.reshape([BLOCKS, BLOCK, BLOCKS, BLOCK])
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, tiles.type.layout)))
    of_columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, tiles.type.layout)))
    own = gl.arange(0, BLOCKS, of_rows)[:, None, None, None] == gl.arange(0, BLOCKS, of_columns)[None, None, :, None]

    # A row of all blocks side by side.
    diagonal = gl.sum(gl.where(own, tiles, 0.0), axis=2).permute([1, 0, 2]).reshape([BLOCK, C])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = gl.allocate_shared_memory(gl.float32, [BLOCK, 1, C], plain)
    rows._reinterpret(gl.float32, [BLOCK, C], plain).store(diagonal)

    of_blocks: gl.constexpr = gl.BlockedLayout([1, BLOCK, 1], [2, 1, 16], [gl.num_warps(), 1, 1], [1, 2, 0])
    by_column: gl.constexpr = gl.SliceLayout(1, of_blocks)  # [blocks, columns]
    # A row of L as threads take it, 16 entries each: so it needs no change of layout.
    of_entries: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]],
        lane_bases=[[0, 0], [0, 0], [0, 0], [0, 0], [0, 16]],
        warp_bases=[[0, 32 % C], [0, 0]],
        block_bases=[],
        shape=[1, C],
    )
    row = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, of_blocks)))
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, by_column))
    solved = gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, of_blocks)
    for t in gl.static_range(BLOCK):
        entries = gl.convert_layout(
            rows.index(t).load(of_entries).reshape([BLOCKS, BLOCK]), gl.SliceLayout(2, of_blocks)
        )
        found = gl.sum(entries[:, :, None] * solved, axis=1) + gl.where(column == t, 1.0, 0.0)[None, :]
        solved = gl.where((row == t)[None, :, None], found[:, None, :], solved)
    solved = gl.convert_layout(solved, gl.SliceLayout(2, tiles.type.layout))
    return gl.where(own, solved[:, :, None, :], tiles).reshape([C, C])


@gluon.jit
def merge_blocks(inverse, C: gl.constexpr, SIZE: gl.constexpr):
    """In place of L between each two inverted diagonal blocks of SIZE: the inverse there."""
    of_blocks: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, of_blocks, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, of_blocks, 2)
    nothing = gl.zeros([SIZE, SIZE], gl.float32, of_blocks)
    found = ()
    for pair in gl.static_range(C // (2 * SIZE)):
        upper = inverse.slice(2 * pair * SIZE, SIZE, dim=0)
        lower = inverse.slice((2 * pair + 1) * SIZE, SIZE, dim=0)
        earlier = upper.slice(2 * pair * SIZE, SIZE, dim=1).load(right)
        between = lower.slice(2 * pair * SIZE, SIZE, dim=1).load(right)
        later = lower.slice((2 * pair + 1) * SIZE, SIZE, dim=1).load(left)
        seen = gl.convert_layout(product_of_fp32(later, between, nothing), left)
        found = found + (product_of_fp32(seen, earlier, nothing),)  # type: ignore[assignment]  # noqa: RUF005 (Triton grows tuples so)
    gl.thread_barrier()  # all have read what is written over
    for pair in gl.static_range(C // (2 * SIZE)):
        inverse.slice((2 * pair + 1) * SIZE, SIZE, dim=0).slice(2 * pair * SIZE, SIZE, dim=1).store(found[pair])


@gluon.jit
def product_of_fp32(a, b, nothing):
    """a @ b of fp32 operands in three products of 16 bits (2^-16), as `kcpgen.runtime.ops.dot_fp32` does."""
    a_high, a_rest = rounded(a)
    b_high, b_rest = rounded(b)
    total = mma_v2(a_high, b_high, nothing)
    total = mma_v2(a_rest.to(gl.bfloat16), b_high, total)
    return mma_v2(a_high, b_rest.to(gl.bfloat16), total)
