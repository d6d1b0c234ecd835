"""Products of the chain of transitions, as long as there are chunks: nothing of it is rounded below float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_fp32(x, tile):
    """x @ tile for float32 x. A bfloat16 tile is exact as it is, and x is the sum of three bfloat16 parts.

    That is three products on the fast path of tensor cores. A float32 tile takes tf32x3: Triton's default is tf32.
    """
    if tile.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(low, tile) + tl.dot(middle, tile) + tl.dot(high, tile)
    else:
        product = tl.dot(x, tile, input_precision="tf32x3")
    return product
