"""An estimate as a table for a person and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from kcpgen.cost.estimate import Estimate, Floor, KernelEstimate

COLUMNS = (
    f"{'':18}{'reads B':>9}{'writes B':>9}{'kFLOP':>8}{'programs':>10}{'steps':>7}{'bound ms':>10}{'predicted ms':>14}"
)


def to_text(estimate: Estimate) -> str:
    return "\n".join(_lines(estimate)) + "\n"


def to_json(estimate: Estimate) -> str:
    sizes, device = estimate.sizes, estimate.device
    whole = {
        "op": estimate.plan.spec.name,
        "device": {"name": device.name, "copy_bytes_per_s": device.copy, "matmul_flop_per_s": device.matmul},
        "sizes": vars(sizes),
        "dtype": "bfloat16",
        "chunk": estimate.chunk,
        "segments": estimate.segments,
        "by_levels": estimate.by_levels,
        "unit": "bytes and FLOP per token of a value head",
        "forward": [_kernel(kernel) for kernel in estimate.forward],
        "keeping": [_kernel(kernel) for kernel in estimate.keeping],
        "backward": [_kernel(kernel) for kernel in estimate.backward],
        "floor": {"forward": _floor(estimate.forward_floor), "training": _floor(estimate.training_floor)},
        "saved": {"bytes": dict(estimate.saved), "mib": round(estimate.saved_mib, 1)},
        "replayed": {"kernel": _kernel(estimate.replay), "saved_mib": round(estimate.replaying_mib, 1)},
        "predicted_ms": {
            "forward": _rounded(_predicted(estimate.forward)),
            "training": _rounded(_predicted((*estimate.keeping, *estimate.backward))),
        },
    }
    return json.dumps(whole, indent=2) + "\n"


def _lines(estimate: Estimate) -> Iterator[str]:
    yield f"{estimate.plan.spec.title} on {estimate.device.title}, bfloat16: {_sizes(estimate)}"
    if estimate.plan.decay_axis:
        pairs = "pairs of tokens level by level" if estimate.by_levels else "all pairs of a chunk at once"
        yield f"decay per channel, {pairs}"
    if estimate.segments > 1:
        chunks, idle = -(-estimate.sizes.T // estimate.chunk), estimate.device.multiprocessors
        segments = f"{estimate.segments} segments of {-(-chunks // estimate.segments)} chunks"
        yield f"each sequence in {segments}: whole ones would leave most of {idle} multiprocessors idle"
    yield "bytes and FLOP per token of a value head"
    yield ""
    yield COLUMNS
    yield from _section("forward", estimate.forward, estimate.forward_floor)
    yield _total("with what it keeps", estimate.keeping, None)
    yield from _section("backward", estimate.backward, None)
    yield _total("training", (*estimate.keeping, *estimate.backward), estimate.training_floor)
    yield ""
    yield f"saved       {', '.join(estimate.saved)}: {sum(estimate.saved.values()):.0f} B, {estimate.saved_mib:.0f} MiB"
    replay = f"`states` works them out in {estimate.replay.predicted_ms:.3f} ms, predicted"
    yield f"recomputed  nothing; with replayed_states() most states, {estimate.replaying_mib:.0f} MiB: {replay}"
    floors = (("forward", estimate.forward_floor), ("training", estimate.training_floor))
    yield f"floor       {'; '.join(_floor_text(title, floor) for title, floor in floors)}:"
    yield "            inputs, outputs and gradients moved once, products with the state made once for every token"


def _sizes(estimate: Estimate) -> str:
    sizes = estimate.sizes
    heads = f"{sizes.H}" if sizes.H == sizes.HV else f"{sizes.H}/{sizes.HV}"
    return f"B={sizes.B} T={sizes.T} H={heads} K={sizes.K} V={sizes.V}, chunks of {estimate.chunk} tokens"


def _section(title: str, kernels: tuple[KernelEstimate, ...], floor: Floor | None) -> Iterator[str]:
    for kernel in kernels:
        work = kernel.work
        yield (
            f"  {work.name:16}{sum(work.reads.values()):9.0f}{sum(work.writes.values()):9.0f}{work.flops / 1e3:8.0f}"
            f"{work.programs:10}{work.steps:7}{kernel.bound_ms:10.3f}{kernel.predicted_ms:14.3f}"
        )
    yield _total(title, kernels, floor)


def _total(title: str, kernels: tuple[KernelEstimate, ...], floor: Floor | None) -> str:
    reads, writes = (sum(sum(getattr(k.work, part).values()) for k in kernels) for part in ("reads", "writes"))
    flops, bound = sum(k.work.flops for k in kernels), sum(k.bound_ms for k in kernels)
    total = f"{title:18}{reads:9.0f}{writes:9.0f}{flops / 1e3:8.0f}{'':17}{bound:10.3f}{_predicted(kernels):14.3f}"
    return total if floor is None else f"{total}   floor {floor.ms:.3f}"


def _floor_text(title: str, floor: Floor) -> str:
    return f"{title} {floor.bytes:.0f} B, {floor.flops / 1e3:.0f} kFLOP"


def _kernel(kernel: KernelEstimate) -> dict[str, Any]:
    work = kernel.work
    return {
        "name": work.name,
        "reads": dict(work.reads),
        "writes": dict(work.writes),
        "bytes": work.bytes,
        "flops": work.flops,
        "programs": work.programs,
        "steps": work.steps,
        "bound_ms": _rounded(kernel.bound_ms),
        "predicted_ms": _rounded(kernel.predicted_ms),
    }


def _floor(floor: Floor) -> dict[str, float]:
    return {"bytes": floor.bytes, "flops": floor.flops, "ms": _rounded(floor.ms)}


def _predicted(kernels: Iterable[KernelEstimate]) -> float:
    return sum(kernel.predicted_ms for kernel in kernels)


def _rounded(ms: float) -> float:
    return float(f"{ms:.4g}")
