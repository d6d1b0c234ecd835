"""Gluon functions that serial kernels in roles share: rings of tiles in shared memory, and products in flight.

Gluon is Triton with layouts, copies and waits written out. Imported by kernels for Hopper only, since Triton calls it
experimental.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

NOWHERE = gl.constexpr(1 << 30)  # a coordinate outside any tensor: what is copied there is dropped


@gluon.jit
def barriers(count: gl.constexpr):
    """One for each stage of a ring, each completed by a single arrival, or by the bytes that one expects."""
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
def product(left, right, into):
    """Begin to add left @ right to `into`. Products are done in the order in which they were begun."""
    return warpgroup_mma(left, right, into, is_async=True)


@gluon.jit
def fresh_product(left, right, into):
    """Likewise, in the place of what `into` holds."""
    return warpgroup_mma(left, right, into, use_acc=False, is_async=True)


@gluon.jit
def product_fp32(left, right, into, layout: gl.constexpr):
    """Begin to add left @ right to `into` for fp32 `left` and a bf16 tile, as `dot_fp32` does: three products.

    The greatest part comes first, so that the others are worked out while its product is under way. layout: of left
    operands.
    """
    high, rest = rounded(left)
    into = product(gl.convert_layout(high, layout), right, into)
    return _product_of_rest(rest, right, into, layout)


@gluon.jit
def fresh_product_fp32(left, right, into, layout: gl.constexpr):
    """Likewise, in the place of what `into` holds."""
    high, rest = rounded(left)
    into = fresh_product(gl.convert_layout(high, layout), right, into)
    return _product_of_rest(rest, right, into, layout)


@gluon.jit
def _product_of_rest(rest, right, into, layout: gl.constexpr):
    middle, last = rounded(rest)
    into = product(gl.convert_layout(middle, layout), right, into)
    return product(gl.convert_layout(last.to(gl.bfloat16), layout), right, into)


@gluon.jit
def rounded(x):
    """fp32 numbers in bf16, and what rounding left of them.

    Two at a time by one instruction; LLVM would convert what is also read back one by one, with another.
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
