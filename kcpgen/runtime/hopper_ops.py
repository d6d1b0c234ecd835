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
def by_keys(tile, inside):
    """fp32 [keys, tokens] of a tile [1, 1, tokens, keys] of vectors, laid out as `inside` is; zero outside of that."""
    turned = tile.reshape([tile.shape[2], tile.shape[3]]).permute([1, 0])
    return gl.where(inside, turned.load(inside.type.layout).to(gl.float32), 0.0)


@gluon.jit
def upper_half(x):
    """fp32 x cut to the 16 bits that it begins with, and what is left of it."""
    bits = x.to(gl.int32, bitcast=True)
    rest = x - (bits & -65536).to(gl.float32, bitcast=True)
    return (bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True), rest


@gluon.jit
def in_three(x):
    """fp32 x as three tiles of 16 bits whose sum it is: cut, not rounded, which takes no conversions."""
    first, rest = upper_half(x)
    second, rest = upper_half(rest)
    third, rest = upper_half(rest)
    return first, second, third
