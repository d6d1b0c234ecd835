"""Mends of Triton's interpreter, so that bf16 kernels compute the same numbers on a CPU as on a GPU.

Up to Triton 3.6 it multiplies the 16-bit images of bf16 operands as integers, and truncates where a GPU rounds to
nearest even. Applied by what defines kernels that convert to or from bf16, when TRITON_INTERPRET=1, and only there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def mend() -> None:
    """Replace the interpreter's bf16 conversion and dot; idempotent."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "_kcpgen_mended", False):
        return
    convert, create_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return to_bfloat16(data)
        if source == tl.bfloat16 and target == tl.float32:
            return from_bfloat16(data)
        return convert(data, source, target, rounding)

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
            product = np.matmul(from_bfloat16(a.data), from_bfloat16(b.data), dtype=d.data.dtype)
            return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
        return create_dot(self, a, b, d, *rest)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._kcpgen_mended = True


def from_bfloat16(image: NDArray[Any]) -> NDArray[np.float32]:
    return (image.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)
