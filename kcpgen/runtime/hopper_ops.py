"""Gluon functions that kernels for Hopper share: tiles in shared memory, in rings or not, and products in flight.

Gluon is Triton with layouts, copies and waits written out. Imported by kernels for Hopper only, since Triton calls it
experimental.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

NOWHERE = gl.constexpr(1 << 30)  # a coordinate outside any tensor: what is copied there is dropped


@gluon.jit
def barriers(count: gl.constexpr):
    """So many, say one for each stage of a ring; each ends with one arrival, or with the bytes that one expects."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(count):
        mbarrier.init(made.index(stage), count=1)
    return made


@gluon.jit
def fetch_vectors(source, batch, head_of_input, token, chunk, head, column, barrier, tile, IN_PLACE: gl.constexpr):
    """Begin to copy [C, columns] of the vectors of one chunk: an input's, or scratch (`load_vectors`)."""
    if IN_PLACE:
        tma.async_copy_global_to_shared(source, [batch, head_of_input, token, column], barrier, tile)
    else:
        tma.async_copy_global_to_shared(source, [chunk, head, 0, column], barrier, tile)


@gluon.jit
def clear_behind(tile, count, IN_PLACE: gl.constexpr, layout: gl.constexpr):
    """Zeros in the rows of an input's tile from `count` on, which are another sequence's. For tensor cores to read them
    takes a fence, and a barrier of the warps that share this. layout: how these lie over the tile."""
    if IN_PLACE:
        alive = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout)) < count
        tile.store(gl.where(alive[:, None], tile.load(layout), 0.0))


@gluon.jit
def product(left, right, into):
    """Begin to add left @ right to `into`. Products are done in the order in which they were begun."""
    return warpgroup_mma(left, right, into, is_async=True)


@gluon.jit
def fresh_product(left, right, into):
    """Likewise, in the place of what `into` holds."""
    return warpgroup_mma(left, right, into, use_acc=False, is_async=True)


@gluon.jit
def running_sum(x, reverse: gl.constexpr = False):
    """The sum of a vector up to each place, or from it on. Triton has none for the layout of a product's rows.

    Each warp works out all of it, and none waits for another.
    """
    line: gl.constexpr = gl.BlockedLayout([max(1, x.shape[0] // 32)], [32], [gl.num_warps()], [0])
    summed = tl.cumsum(gl.convert_layout(x, line), axis=0, reverse=reverse)
    return gl.convert_layout(summed, x.type.layout)


@gluon.jit
def handed_over(x):
    """Numbers that every warp has, in shared memory, where rows and columns of tiles find those they need."""
    return gl.allocate_shared_memory(gl.float32, [x.shape[0]], gl.SwizzledSharedLayout(1, 1, 1, [0]), x)


@gluon.jit
def by_rows(tile, inside):
    """fp32 [tokens, keys] of a tile [1, 1, tokens, keys] of vectors, laid out as `inside` is; zero outside of that."""
    whole = tile.reshape([tile.shape[2], tile.shape[3]])
    return gl.where(inside, whole.load(inside.type.layout).to(gl.float32), 0.0)


@gluon.jit
def by_keys(tile, inside):
    """fp32 [keys, tokens] of a tile [1, 1, tokens, keys] of vectors, laid out as `inside` is; zero outside of that."""
    turned = tile.reshape([tile.shape[2], tile.shape[3]]).permute([1, 0])
    return gl.where(inside, turned.load(inside.type.layout).to(gl.float32), 0.0)


@gluon.jit
def laid_by_rows(value, tile, target):
    """fp32 [tokens, columns] put into a tile that nobody needs any more, on their way to memory of its type."""
    if target.dtype.element_ty == tile.dtype:
        tile.store(value.to(tile.dtype))


@gluon.jit
def store_rows(value, tile, target, stride, height, width):
    """Rows of `value` to memory, out of the tile in which `laid_by_rows` put them.

    A product's layout gives a warp 16 bytes of each of eight rows of 16-bit numbers; out of the tile it writes whole
    lines. Results of another type than the tile's, which are fp32, fill the 32 bytes of a sector where they are.
    """
    WIDTH: gl.constexpr = value.shape[1]
    if target.dtype.element_ty == tile.dtype:
        LANES: gl.constexpr = min(32, WIDTH // 8)  # of a row
        lines: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
        _store_within(tile.load(lines), target, stride, height, width)
    else:
        _store_within(value, target, stride, height, width)


@gluon.jit
def _store_within(value, target, stride, height, width):
    rows = gl.arange(0, value.shape[0], gl.SliceLayout(1, value.type.layout))
    columns = gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
    place = target + rows[:, None].to(gl.int64) * stride + columns[None, :]
    gl.store(place, value.to(target.dtype.element_ty), mask=(rows < height)[:, None] & (columns < width)[None, :])


@gluon.jit
def product_fp32(left, right, into, layout: gl.constexpr):
    """Begin to add left @ right to `into` for fp32 `left` and a bf16 tile, as `dot_fp32` does: three products.

    layout: of left operands.
    """
    high, middle, low = in_three(left, layout)
    into = product(low, right, into)
    into = product(middle, right, into)
    return product(high, right, into)


@gluon.jit
def fresh_product_fp32(left, right, into, layout: gl.constexpr):
    """Likewise, in the place of what `into` holds. The least part comes first: tensor cores cut off what an accumulator
    cannot hold, and where the greatest one came first they did so three times as often (M of 256 chunks was 9e-6 off,
    and 2e-6 where each part had a sum of its own)."""
    high, middle, low = in_three(left, layout)
    into = fresh_product(low, right, into)
    into = product(middle, right, into)
    return product(high, right, into)


@gluon.jit
def sum_of_parts(x, chosen, nothing):
    """The sum of fp32 x over tokens that are chosen, [tokens, C], in fp32 but for what the tensor cores cut off."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, nothing.type.layout, 2)
    total = fresh_product_fp32(x, chosen, nothing, LEFT)
    return warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def in_three(x, layout: gl.constexpr):
    """fp32 x as three left operands of 16 bits whose sum it is."""
    high, rest = rounded(x)
    middle, low = rounded(rest)
    return (
        gl.convert_layout(high, layout),
        gl.convert_layout(middle, layout),
        gl.convert_layout(low.to(gl.bfloat16), layout),
    )


@gluon.jit
def in_bf16(x):
    """fp32 numbers in bf16, two at a time as in `rounded`: for a result that is read back."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def rounded(x):
    """fp32 numbers in bf16, and what rounding left of them.

    Two at a time by one instruction; LLVM would convert what is also read back one by one, with another, of which a
    multiprocessor does sixteen in a cycle.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 even, odd;
        cvt.rn.bf16x2.f32 $0, $4, $3;
        shl.b32 even, $0, 16;
        and.b32 odd, $0, 0xffff0000;
        sub.f32 $1, $3, even;
        sub.f32 $2, $4, odd;
        }
        """,
        "=&r,=&r,=r,r,r",
        [x],
        dtype=(gl.bfloat16, gl.float32),
        is_pure=True,
        pack=2,
    )


CARRIED = gl.constexpr(32)  # rows of a column that one thread rounds


def _rounding_in_columns() -> str:
    """CARRIED fp32 numbers, $16 to $47, each of which first takes what the last one lost; $0 to $15 are pairs."""
    lines = ["mov.b32 lost, 0f00000000;"]
    for n in range(CARRIED.value):
        x, low = f"${16 + n}", ("first", "second")[n % 2]
        lines += [f"setp.neu.f32 some, {x}, 0f00000000;", f"mov.b32 {low}, 0f00000000;", f"@some add.f32 x, {x}, lost;"]
        lines += [f"@some cvt.rn.bf16x2.f32 {low}, x, 0f00000000;", f"@some sub.f32 lost, x, {low};"]
        lines += [f"prmt.b32 ${n // 2}, first, second, 0x7632;"] if n % 2 else []
    return "{ .reg .pred some; .reg .b32 x, lost, first, second; " + " ".join(lines) + " }"


ROUNDING = gl.constexpr(_rounding_in_columns())
ROUNDED = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32))


@gluon.jit
def rounded_in_columns(tile, C: gl.constexpr):
    """What lies below the diagonal of an fp32 tile [C, C], in bf16, and what rounding left.

    What a number loses the one below takes with it, in runs of CARRIED rows, so that a sum of a column's numbers loses
    what one of them loses. Where keys repeat, numbers of (I - L)^-1 are large and alternate, and sums of them, which
    are what a state sees, nearly vanish. Zeros stay zeros: nothing passes from before a reset to what is behind it.
    """
    columns: gl.constexpr = gl.BlockedLayout(
        [CARRIED, 1], [1, 32], [C // CARRIED, gl.num_warps() * CARRIED // C], [0, 1]
    )
    rows = gl.arange(0, C, gl.SliceLayout(1, columns))
    x = gl.where(rows[:, None] > gl.arange(0, C, gl.SliceLayout(0, columns))[None, :], tile.load(columns), 0.0)
    low = gl.inline_asm_elementwise(ROUNDING, ROUNDED, [x], dtype=gl.bfloat16, is_pure=True, pack=CARRIED)
    return low, x - low.to(gl.float32)
