"""Devices that times are predicted for, by rates measured on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a chunk-parallel kernel waits for.

    COMPUTING: its own loads, exponentials and small dots in turn. COPIED_AT_ONCE: memory, and products from shared
    memory; the copies of all that a chunk needs are begun before anything else. STREAMING: memory alone.
    """

    COMPUTING = "computing"
    COPIED_AT_ONCE = "copied at once"
    STREAMING = "streaming"


@dataclass(frozen=True, kw_only=True)
class Device:
    """copy: bytes read plus written per second. matmul: bfloat16 FLOP per second of a large product.

    step_us, reverse_step_us: the least time that a chunk takes a program of a serial kernel, and of the reverse scan,
    however little it moves: of any chunk, and of each MFLOP of its products beside.
    reached: the share of its nearest bound that a chunk-parallel kernel gets to, by its kind.
    """

    name: str
    title: str
    copy: float
    matmul: float
    multiprocessors: int
    step_us: tuple[float, float]
    reverse_step_us: tuple[float, float]
    reached: Mapping[Kind, float]

    def bound_ms(self, bytes_moved: float, flops: float) -> float:
        return 1e3 * max(bytes_moved / self.copy, flops / self.matmul)

    def serial_ms(self, steps: int, flops: float, programs: int, reverse: bool) -> float:
        """Of `programs` that each walk `steps` chunks of so many FLOP, one program a multiprocessor at a time."""
        waves = -(-programs // self.multiprocessors)
        chunk_us, megaflop_us = self.reverse_step_us if reverse else self.step_us
        return 1e-3 * waves * steps * (chunk_us + megaflop_us * 1e-6 * flops)


DEVICES = {
    "h200": Device(
        name="h200",
        title="NVIDIA H200",
        copy=4.27e12,
        matmul=690e12,
        multiprocessors=132,
        # At K = V = 128, of kernels whose warps have roles, 64 columns each: with a decay per channel 0.73 us and 1.84
        # MFLOP, of two terms 0.95 and 2.49, with one per head 1.53 to 1.67 and 5.24; of the reverse scan, which leaves
        # a state each chunk, 1.17 and 1.7, 1.47 and 2.36, 1.9 and 4.19, and without an erase 0.88 and 1.18.
        step_us=(0.24, 0.26),
        reverse_step_us=(0.6, 0.31),
        # What the kernels of docs/performance.md got to at 1x8192x32, K = V = 128. Computing: `prepare` of two terms
        # 0.33 to 0.37, the portable `gradients` of a decay per token 0.41. Copied at once: `prepare` 0.62 and 0.71, but
        # 0.46 where it solves and leaves scores to the scan, `far_gradients` 0.73 and 0.57, all gradients in one kernel
        # 0.67 and 0.78. Streaming: `score_gradients` 0.86, near pairs 0.81.
        reached={Kind.COMPUTING: 0.38, Kind.COPIED_AT_ONCE: 0.7, Kind.STREAMING: 0.83},
    ),
}
