"""Host side of the kernels: tile choice, scratch dtypes, gradient buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

D = TypeVar("D")
ALIGNMENT = 16  # bytes, of all that a tile is copied from without passing through registers


@dataclass(frozen=True, kw_only=True)
class PrepareTiles:
    """Tiles of the chunk-parallel forward: padded widths, key and value columns per step, warps per program, and the
    registers a thread may have, None for any.

    in_flight: whether it goes to a kernel that has all it needs on its way at once, as in `GradientTiles`.
    """

    key_width: int
    value_width: int
    key_block: int
    value_block: int
    warps: int
    registers: int | None = None
    in_flight: bool = True

    @property
    def launch(self) -> dict[str, int]:
        """Options of the launch itself."""
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})


@dataclass(frozen=True, kw_only=True)
class GradientTiles:
    """Tiles of the chunk-parallel backward: key and value columns per step, warps, value blocks in flight.

    score_block, score_warps: of the value axis's own kernel. pair_rows: tokens of a block whose pairs are taken one by
    one, in programs of `pair_block` key columns and `pair_warps` warps. finish_warps: of what adds up key blocks.
    in_flight: whether far pairs and states, or all of it where tokens decay as a whole, go to a kernel that has all it
    needs on its way at once, where the device has one, see `kcpgen.runtime.hopper`; its tiles are its own.
    """

    key_block: int
    value_block: int
    warps: int
    stages: int
    score_block: int
    registers: int | None = None  # per thread at most, so that more programs fit a multiprocessor
    score_warps: int = 4
    pair_rows: int = 4
    pair_block: int = 64
    pair_warps: int = 4
    finish_warps: int = 2
    in_flight: bool = True


@dataclass(frozen=True, kw_only=True)
class ScanTiles:
    """Tiles of a serial kernel: state columns per program, warps, chunks in flight.

    roles: whether its warps have roles where the device has them, see `kcpgen.runtime.hopper_roles`, which then chooses
    columns, warps and stages.
    """

    value_block: int
    warps: int
    stages: int
    roles: bool = True


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One launch configuration of all kernels of an op; `chunk` tokens per chunk.

    segments: into how many the serial kernels cut each sequence, 1 for none; None leaves it to `kcpgen.runtime.split`.
    """

    chunk: int
    prepare: PrepareTiles
    scan: ScanTiles
    states: ScanTiles
    reverse: ScanTiles
    gradients: GradientTiles
    segments: int | None = None


def choose_tiles(
    *,
    keys: int,
    values: int,
    decay: str,
    terms: int,
    dtype: torch.dtype,
    whole_value_axis: bool = False,
) -> Tiles:
    """A configuration that fits registers and shared memory of an sm_90 multiprocessor; measured choices are in
    docs/performance.md. `decay` is "none", "scalar" or "vector"."""
    key_width, value_width = padded(keys), max(64, padded(values))
    wide, fp32 = key_width > 128, scratch_dtype(dtype) is torch.float32
    # A decay of one number per pair costs no levels: twice the chunk halves the serial steps and the states.
    chunk = 16 if wide and fp32 else 32 if wide or fp32 or decay == "vector" or terms > 1 else 64
    parallel = value_width if whole_value_axis else min(value_width, 32 if fp32 else 64)
    scan = ScanTiles(
        value_block=64,
        warps=8 if wide else 4,
        stages=_stages(chunk, key_width, 64, terms, 4 if fp32 else 2),
    )
    key_block = min(key_width, 32 if fp32 else 64)
    whole = decay == "vector" and terms == 1 and value_width == 128 and not fp32
    return Tiles(
        chunk=chunk,
        prepare=PrepareTiles(
            key_width=key_width,
            value_width=value_width,
            key_block=min(key_width, 32 if terms > 1 or fp32 or chunk == 64 else 64),
            value_block=parallel,
            warps=2,  # more would repeat each other's products, or each hold less of what the solve walks through
        ),
        scan=scan,
        states=scan,
        # beside its operands it holds the gradients that it leaves, those of an erase in two parts
        reverse=replace(scan, stages=1) if wide and terms > 1 else scan,
        gradients=GradientTiles(
            key_block=key_block,
            value_block=value_width if whole else parallel,
            warps=4,
            stages=2,
            score_block=parallel,
            score_warps=2 if chunk == 32 else 4,
            pair_block=min(key_width, 64),
        ),
    )


@dataclass(kw_only=True)
class StatesAround:
    """The states that enter the chunks and the gradients of those that leave, [NT, HV, VP, KP] each: most of what a
    backward holds. Who has read them lets them go, while gradients are still added up."""

    entering: torch.Tensor | None
    leaving: torch.Tensor | None

    def release(self) -> None:
        self.entering = self.leaving = None


SHARED_MEMORY = 200_000  # bytes of a multiprocessor that operands in flight may take


def _stages(chunk: int, keys: int, values: int, terms: int, size: int) -> int:
    """Chunks in flight: three hide the latency of their loads, where they fit."""
    one = chunk * size * ((2 * terms + 1) * keys + terms * (values + chunk))
    most = 3 if keys <= 128 and size == 2 else 2 if size == 2 else 1
    return max(1, min(most, SHARED_MEMORY // one))


def tile_descriptor(scratch: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Dense scratch [..., rows of a chunk, width] as one tall matrix, read and written in [rows, columns] tiles."""
    return with_base(_tall(scratch.dtype, scratch.shape, rows, columns), scratch)


@lru_cache(maxsize=512)
def _tall(dtype: torch.dtype, shape: tuple[int, ...], rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(nowhere(dtype), *tall(shape), [rows, columns])


def tall(shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Sizes and strides of dense scratch as one matrix."""
    width = shape[-1]
    return [math.prod(shape[:-1]), width], [width, 1]


def nowhere(dtype: torch.dtype) -> Any:
    """In place of a tensor, for a descriptor that only `with_base` is to see."""
    return SimpleNamespace(dtype=dtype, data_ptr=lambda: 0)


def with_base(like: D, base: torch.Tensor) -> D:
    """A descriptor of the same dtype, sizes and tiles. To check these takes Triton longer than all else about it, and a
    call has dozens; what is left to check is where it lies."""
    if base.data_ptr() % ALIGNMENT:
        raise ValueError(f"scratch begins at {base.data_ptr()}; allowed: multiples of {ALIGNMENT}")
    fields = like.__dict__.copy()
    fields["base"] = base
    made = object.__new__(type(like))
    made.__dict__ = fields
    return made


def altered(like: D, **fields: Any) -> D:
    """As `dataclasses.replace`, where nothing has to be checked or made anew: in a tenth of its time."""
    made = object.__new__(type(like))
    made.__dict__.update(like.__dict__, **fields)
    return made


def vector_descriptor(vectors: torch.Tensor, in_place: bool, rows: int, columns: int) -> TensorDescriptor:
    """Vectors of chunks, for `load_vectors`: an input [B, T, heads, K], or dense scratch [NT, HV, rows, columns]."""
    return with_base(_by_head(vectors.dtype, vectors.shape, vectors.stride(), in_place, rows, columns), vectors)


@lru_cache(maxsize=512)
def _by_head(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], in_place: bool, rows: int, columns: int
) -> TensorDescriptor:
    return TensorDescriptor(nowhere(dtype), *heads_first(shape, strides, in_place), [1, 1, rows, columns])


def heads_first(shape: tuple[int, ...], strides: tuple[int, ...], in_place: bool) -> tuple[list[int], list[int]]:
    """Sizes and strides of an input or scratch, its heads before its rows. Of these two a descriptor has its own: the
    tensor itself is not transposed for it, which would take longer than all else about it."""
    order = (0, 2, 1, 3) if in_place else (0, 1, 2, 3)
    return [shape[axis] for axis in order], [strides[axis] for axis in order]


def readable_in_place(columns: int, dtype: torch.dtype, *inputs: torch.Tensor) -> bool:
    """Whether tiles of [chunk, columns] can be read where inputs [B, T, heads, K] lie."""
    return all(x.dtype is dtype and x.shape[3] == columns and addressable(x) for x in inputs)


def addressable(x: torch.Tensor) -> bool:
    """Whether a descriptor can say where its tiles are."""
    return _steps_addressable(x.stride(), x.element_size()) and x.data_ptr() % ALIGNMENT == 0


@lru_cache(maxsize=512)
def _steps_addressable(steps: tuple[int, ...], size: int) -> bool:
    return steps[3] == 1 and all(step > 0 and step * size % ALIGNMENT == 0 for step in steps[:3])


def readable(x: torch.Tensor) -> torch.Tensor:
    """An input that was readable in place, once autograd gives it back: hooks may have laid it out anew."""
    return x if addressable(x) else x.clone(memory_format=torch.contiguous_format)


def room_within(scratch: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """fp32 scratch [NT, HV, rows, columns]: the memory of scratch that is written after its last use, if just as large.

    What is written twice in a short time goes from the cache to memory once.
    """
    shape = (*scratch.shape[:2], rows, columns)
    if scratch.shape[2] * scratch.shape[3] * scratch.element_size() == 4 * rows * columns:
        return scratch.view(torch.float32).view(shape)
    return scratch.new_empty(shape, dtype=torch.float32)


def padded(width: int) -> int:
    """The power of two a tile axis is padded to; a dot needs at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def scratch_dtype(dtype: torch.dtype) -> torch.dtype:
    """What operands of dots are rounded to. fp16 inputs go through fp32 scratch: a state can leave fp16's range."""
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float32


def dot_precision(dtype: torch.dtype) -> str:
    """tf32 holds an fp16 value exactly; fp32 inputs need the three-product split. Without effect on bf16."""
    return "tf32x3" if dtype is torch.float32 else "tf32"


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """`x` itself when its last axis is dense, else a contiguous copy; kernels take any other stride as it is."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 or x.dim() == 3 else x.contiguous()


def gradient_buffer(x: torch.Tensor, heads: int, carrying: bool = False) -> torch.Tensor:
    """Contiguous [B, T, HV, ...] to be written by every head.

    fp32 when heads of a group are still to be summed, or when the kernel carries partial results in it.
    """
    shape = (*x.shape[:2], heads, *x.shape[3:])
    return x.new_empty(shape, dtype=torch.float32 if carrying or heads != x.shape[2] else x.dtype)


def partial_sums(param: torch.Tensor | None, chunks: int, heads: int) -> torch.Tensor | None:
    """fp32 [NT, HV, ...], one share of a parameter's gradient per chunk; None for a parameter that is not used."""
    return None if param is None else param.new_empty((chunks, heads, param.numel() // heads), dtype=torch.float32)


def sum_over_chunks(shares: torch.Tensor | None, param: torch.Tensor | None) -> torch.Tensor | None:
    return None if shares is None or param is None else shares.sum(0).reshape(param.shape)


def within_block_range(promise: float | None) -> bool:
    """Whether log decays promised to be >= `promise` per token let all pairs of a chunk of 32 meet at its middle.

    exp(16 * 5) leaves fp32 a factor of 6000 for the vectors that it scales.
    """
    return promise is not None and promise >= -5.0
