"""From a spec's plan to what its op costs on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcpgen.cost.device import Device
from kcpgen.cost.sizes import Sizes
from kcpgen.cost.work import Counting, KernelWork
from kcpgen.plan import KernelPlan
from kcpgen.runtime.hopper_roles import NARROW


@dataclass(frozen=True, kw_only=True)
class KernelEstimate:
    """bound_ms: of bytes and FLOP at full rates. predicted_ms: what such a kernel is likely to take."""

    work: KernelWork
    bound_ms: float
    predicted_ms: float


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Every tensor moved once, every product of the recurrence made once. Bytes and FLOP per token of a value head."""

    bytes: float
    flops: float
    ms: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """keeping: a forward with a backward to follow. saved: scratch the backward reads again, bytes per token of a value
    head, by tensor. replay: what works states out again where few are kept, and checkpoints the bytes of these.

    segments: into how many parts each sequence is cut, 1 where it stays whole.
    """

    plan: KernelPlan
    device: Device
    sizes: Sizes
    chunk: int
    segments: int
    by_levels: bool
    forward: tuple[KernelEstimate, ...]
    keeping: tuple[KernelEstimate, ...]
    backward: tuple[KernelEstimate, ...]
    forward_floor: Floor
    training_floor: Floor
    saved: Mapping[str, float]
    replay: KernelEstimate
    checkpoints: float

    @property
    def saved_mib(self) -> float:
        return self.mib(sum(self.saved.values()))

    @property
    def replaying_mib(self) -> float:
        """Saved where few states are kept."""
        return self.mib(sum(self.saved.values()) - self.saved["states"] + self.checkpoints)

    def mib(self, bytes_of_one: float) -> float:
        return bytes_of_one * self.sizes.token_heads / 2**20


def estimate(plan: KernelPlan, device: Device, sizes: Sizes, *, by_levels: bool = False) -> Estimate:
    """Costs in bfloat16 with the tiles the op itself would choose; options off.

    Kernels are those that the device takes, one after the other; a call, in which some run side by side, takes less or,
    where these slow each other down, more. On an H200 at 1x8192x32 with K = V = 128 three ops took 0.92 to 1.10 of it.
    """
    counting = _counting(plan, device, sizes, by_levels)
    inputs, output = sum(counting.inputs.values()), float(2 * sizes.V)
    flops = counting.floor_flops
    return Estimate(
        plan=plan,
        device=device,
        sizes=sizes,
        chunk=counting.C,
        segments=counting.segments,
        by_levels=by_levels,
        forward=_estimates(counting.forward, device, sizes, counting.C),
        keeping=_estimates(counting.keeping, device, sizes, counting.C),
        backward=_estimates(counting.backward, device, sizes, counting.C),
        forward_floor=_floor(inputs + output, flops, device, sizes),
        training_floor=_floor(3 * inputs + 2 * output, 3 * flops, device, sizes),
        saved={**counting.saved, "states": counting.state_bytes},
        replay=_estimate(counting.replay, device, sizes, counting.C),
        checkpoints=counting.checkpoints,
    )


def _counting(plan: KernelPlan, device: Device, sizes: Sizes, by_levels: bool) -> Counting:
    import torch

    from kcpgen.runtime.launch import choose_tiles

    tiles = choose_tiles(
        keys=sizes.K,
        values=sizes.V,
        decay="none" if plan.decay_axis is None else "vector" if plan.decay_axis else "scalar",
        terms=len(plan.terms),
        dtype=torch.bfloat16,
        whole_value_axis=plan.whole_value_axis,
    )
    return Counting(
        plan=plan,
        sizes=sizes,
        C=tiles.chunk,
        KP=tiles.prepare.key_width,
        VP=tiles.prepare.value_width,
        block=tiles.scan.value_block,
        by_levels=by_levels,
        multiprocessors=device.multiprocessors,
    )


def _estimates(kernels: Iterable[KernelWork], device: Device, sizes: Sizes, chunk: int) -> tuple[KernelEstimate, ...]:
    return tuple(_estimate(work, device, sizes, chunk) for work in kernels)


def _estimate(work: KernelWork, device: Device, sizes: Sizes, chunk: int) -> KernelEstimate:
    bound = device.bound_ms(work.bytes * sizes.token_heads, work.flops * sizes.token_heads)
    if work.steps == 1:
        predicted = bound / device.reached[work.kind]
    else:
        flops = work.flops * chunk * NARROW / max(NARROW, sizes.V)  # of a step on so many columns
        predicted = max(bound, work.pace * device.serial_ms(work.steps, flops, work.programs, work.reverse))
    return KernelEstimate(work=work, bound_ms=bound, predicted_ms=predicted)


def _floor(bytes_moved: float, flops: float, device: Device, sizes: Sizes) -> Floor:
    ms = device.bound_ms(bytes_moved * sizes.token_heads, flops * sizes.token_heads)
    return Floor(bytes=bytes_moved, flops=flops, ms=ms)
