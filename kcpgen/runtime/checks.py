"""Checks of single arguments. Every error names the argument, what came and what is allowed.

Wrong types and dtypes raise TypeError, wrong shapes, devices and values ValueError. Nothing here touches a
tensor's data, except `offsets`, which reads `cu_seqlens`.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

from kcpgen.runtime.sequences import host_offsets

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
MAX_STATE = 256

Sizes = dict[str, int]


def refusal(op: str, name: str, given: object, allowed: str) -> str:
    return fault(op, name, f"is {given}", allowed)


def fault(op: str, name: str, what: str, allowed: str) -> str:
    return f"{op}: `{name}` {what}; allowed: {allowed}"


def tensor(op: str, name: str, x: object, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(refusal(op, name, f"of type {type(x).__name__}", "a torch.Tensor"))
    if x.layout != torch.strided:
        raise TypeError(refusal(op, name, f"stored as {x.layout}", "a dense (strided) tensor"))
    if x.dtype not in dtypes:
        raise TypeError(refusal(op, name, x.dtype, ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)))
    return x


def same_device(op: str, tensors: Mapping[str, Tensor]) -> torch.device:
    """The device of the first tensor, on which all others must be."""
    first, *_ = tensors
    device = tensors[first].device
    for name, x in tensors.items():
        if x.device != device:
            raise ValueError(refusal(op, name, f"on {x.device}", f"{device}, where `{first}` is"))
    return device


def sizes(op: str, inputs: Mapping[str, Tensor], axes: Mapping[str, str]) -> Sizes:
    """The size of every axis (B, T, H, HV, K, V), each set by the first input that has it."""
    found: Sizes = {}
    owner: dict[str, str] = {}
    for name, x in inputs.items():
        letters = axes[name].split()
        if x.ndim != len(letters):
            raise ValueError(
                refusal(op, name, f"of shape {list(x.shape)}", f"{len(letters)} dimensions {_listed(letters)}")
            )
        for letter, size in zip(letters, x.shape, strict=True):
            if letter not in found:
                found[letter] = size
                owner[letter] = name
            elif found[letter] != size:
                allowed = f"{_listed(letters)} with {letter} = {found[letter]}, as `{owner[letter]}` has it"
                raise ValueError(refusal(op, name, f"of shape {list(x.shape)}", allowed))
    _check_heads(op, found, owner)
    _check_state_axes(op, found, owner)
    return found


def _check_heads(op: str, found: Sizes, owner: Mapping[str, str]) -> None:
    for letter in ("H", "HV"):
        if found.get(letter) == 0:
            raise ValueError(fault(op, owner[letter], f"has {letter} = 0 heads", "at least one head"))
    H = found.setdefault("H", found.get("HV", 1))
    HV = found.setdefault("HV", H)
    if HV % H:
        raise ValueError(
            fault(op, owner["HV"], f"has HV = {HV} heads", f"a multiple of H = {H}, the heads of `{owner['H']}`")
        )


def _check_state_axes(op: str, found: Sizes, owner: Mapping[str, str]) -> None:
    for letter in ("K", "V"):
        if not 1 <= found[letter] <= MAX_STATE:
            raise ValueError(
                fault(op, owner[letter], f"has {letter} = {found[letter]}", f"{letter} from 1 to {MAX_STATE}")
            )


def shape(op: str, name: str, x: Tensor, letters: list[str], found: Sizes) -> Tensor:
    expected = [found[letter] for letter in letters]
    if list(x.shape) != expected:
        raise ValueError(refusal(op, name, f"of shape {list(x.shape)}", f"{_listed(letters)} = {expected}"))
    return x


def param(op: str, name: str, x: Tensor, letters: list[str], found: Sizes) -> Tensor:
    """A parameter [HV] or [HV, axis]; the latter may come flat, as [HV * axis]."""
    expected = [found[letter] for letter in letters]
    if len(expected) == 2 and list(x.shape) == [math.prod(expected)]:
        return x.reshape(expected)
    return shape(op, name, x, letters, found)


def real(op: str, name: str, x: object) -> float:
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(refusal(op, name, f"of type {type(x).__name__}", "a Python number"))
    if not -math.inf < float(x) < math.inf:  # math.isfinite would break a graph of torch.compile
        raise ValueError(refusal(op, name, x, "a finite number"))
    return float(x)


def boolean(op: str, name: str, x: object) -> bool:
    if not isinstance(x, bool):
        raise TypeError(refusal(op, name, f"of type {type(x).__name__}", "True or False"))
    return x


def offsets(
    op: str, cu_seqlens: object, cu_seqlens_cpu: object, found: Sizes, device: torch.device
) -> tuple[int, ...] | None:
    """`cu_seqlens` as host integers, read from `cu_seqlens_cpu` when given; else a device tensor is waited for.

    Both are int32 or int64 [N + 1], from 0 to T without a step back; sequences of no token are allowed. They pack one
    row: B = 1.
    """
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError(refusal(op, "cu_seqlens_cpu", "given without `cu_seqlens`", "both, or neither"))
        return None
    packed = _offsets_tensor(op, "cu_seqlens", cu_seqlens)
    if packed.device not in (device, torch.device("cpu")):
        raise ValueError(refusal(op, "cu_seqlens", f"on {packed.device}", f"{device}, where the inputs are, or cpu"))
    if found["B"] != 1:
        raise ValueError(
            refusal(op, "cu_seqlens", f"given with a batch of B = {found['B']}", "sequences packed into one row, B = 1")
        )
    if cu_seqlens_cpu is None:
        return _increasing(op, "cu_seqlens", host_offsets(packed), found["T"])
    host = _offsets_tensor(op, "cu_seqlens_cpu", cu_seqlens_cpu)
    _check_copy(op, packed, host)
    return _increasing(op, "cu_seqlens_cpu", host_offsets(host), found["T"])


def _offsets_tensor(op: str, name: str, x: object) -> Tensor:
    x = tensor(op, name, x, INTEGERS)
    if x.ndim != 1 or len(x) < 2:
        raise ValueError(refusal(op, name, f"of shape {list(x.shape)}", "[N + 1] for N >= 1 sequences"))
    return x


def _check_copy(op: str, packed: Tensor, host: Tensor) -> None:
    """Values are compared only where that needs no wait for a device."""
    if host.device.type != "cpu":
        raise ValueError(refusal(op, "cu_seqlens_cpu", f"on {host.device}", "cpu"))
    if len(host) != len(packed) or (packed.device.type == "cpu" and host.tolist() != packed.tolist()):
        raise ValueError(
            refusal(op, "cu_seqlens_cpu", f"different from `cu_seqlens` ({len(host)} values)", "a copy of it")
        )


def _increasing(op: str, name: str, values: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    if values[0] != 0:
        raise ValueError(fault(op, name, f"starts at {values[0]}", "a start at 0"))
    for n, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            raise ValueError(fault(op, name, f"falls from {begin} to {end} at sequence {n}", "values that never fall"))
    if values[-1] != tokens:
        raise ValueError(fault(op, name, f"ends at {values[-1]}", f"an end at T = {tokens}"))
    return values


def _listed(letters: list[str]) -> str:
    return f"[{', '.join(letters)}]"
