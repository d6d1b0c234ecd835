"""Devices that times are predicted for, by rates measured on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """copy: bytes read plus written per second. matmul: bfloat16 FLOP per second of a large product.

    A serial kernel takes at least step_us + step_us_per_token * C for a chunk of C tokens, however little it moves.
    reached: the share of its nearest bound that a chunk-parallel kernel of small dots and exponentials gets to.
    """

    name: str
    title: str
    copy: float
    matmul: float
    multiprocessors: int
    step_us: float
    step_us_per_token: float
    reached: float

    def bound_ms(self, bytes_moved: float, flops: float) -> float:
        return 1e3 * max(bytes_moved / self.copy, flops / self.matmul)

    def serial_ms(self, steps: int, chunk: int, programs: int) -> float:
        """Of `programs` that each walk `steps` chunks, one program a multiprocessor at a time."""
        waves = -(-programs // self.multiprocessors)
        return 1e-3 * waves * steps * (self.step_us + self.step_us_per_token * chunk)


DEVICES = {
    "h200": Device(
        name="h200",
        title="NVIDIA H200",
        copy=4.27e12,
        matmul=690e12,
        multiprocessors=132,
        step_us=0.01,  # 0.65 us for 32 tokens and 1.29 us for 64, at K = V = 128, of a scan whose warps have roles
        step_us_per_token=0.02,
        reached=0.5,
    ),
}
