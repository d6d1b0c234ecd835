"""What all kernels in Gluon use, in torch: functions as plain Python, memory, barriers and numbers.

What is under way meanwhile is in `gluon_by_chunks.py`, and roles beside each other in `gluon_in_roles.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kcpgen.runtime import forgetting, hopper_ops


def define(path: Path, functions: Iterable[str], names: dict[str, Any]) -> None:
    """Those functions of a file of kernels as plain Python, in `names`."""
    found = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)]
    kept = [function for function in found if function.name in functions]
    for function in kept:
        function.decorator_list = []
    module = _ValuesOnly().visit(ast.Module(body=kept, type_ignores=[]))
    exec(compile(ast.fix_missing_locations(module), str(path), "exec"), names)


class _ValuesOnly(ast.NodeTransformer):
    """In Triton x += y makes a new x; torch would change every other name of it. Layouts of values are dropped."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name)
        before = ast.Name(id=node.target.id, ctx=ast.Load())
        return ast.Assign(targets=[node.target], value=ast.BinOp(before, node.op, self.visit(node.value)))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "layout" and isinstance(node.value, ast.Attribute) and node.value.attr == "type":
            return ast.Constant(None)
        return self.generic_visit(node)


@dataclass
class Pointer:
    base: Tensor
    offset: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.base, self.offset + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return self + -offset

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.base.dtype)

    def memory(self) -> Tensor:
        """All of the tensor, whatever its strides, by the offsets that kernels count."""
        extent = 1 + sum((n - 1) * step for n, step in zip(self.base.shape, self.base.stride(), strict=True))
        return self.base.as_strided((extent,), (1,))


class Described:
    """A tensor that tiles are copied from."""

    def __init__(self, descriptor: Any) -> None:
        self.tensor = descriptor.base.as_strided(tuple(descriptor.shape), tuple(descriptor.strides))
        self.block = tuple(descriptor.block_shape)
        self.dtype = descriptor.base.dtype

    def tile(self, corner: Sequence[Any]) -> Tensor:
        """Zero outside the tensor."""
        found = torch.zeros(self.block, dtype=self.dtype)
        inside = self.inside(corner)
        found[tuple(slice(0, n) for n in inside.shape)] = inside
        return found

    def fill(self, corner: Sequence[Any], value: Tensor) -> None:
        """What is outside the tensor is dropped."""
        inside = self.inside(corner)
        inside.copy_(value.reshape(self.block)[tuple(slice(0, n) for n in inside.shape)])

    def inside(self, corner: Sequence[Any]) -> Tensor:
        starts = [int(start) for start in corner]
        assert min(starts) >= 0
        return self.tensor[tuple(slice(start, start + n) for start, n in zip(starts, self.block, strict=True))]


@dataclass
class Barrier:
    """Complete once one has arrived and the bytes that it expects, if any, are there."""

    phase: int = 0
    arrived: bool = False
    missing: int = 0

    def arrive(self, count: int = 1) -> None:
        assert count == 1
        assert not self.arrived, "somebody arrives at a barrier before its phase is over"
        self.arrived = True
        self._complete()

    def expect(self, count: int) -> None:
        self.missing += count
        self.arrive()

    def receive(self, count: int) -> None:
        self.missing -= count
        assert self.missing >= 0, "more bytes than a barrier expects"
        self._complete()

    def _complete(self) -> None:
        if self.arrived and not self.missing:
            self.phase, self.arrived = self.phase + 1, False


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    low = x.to(torch.bfloat16)
    return low, x - low.float()


def rounded_in_columns(tile: Any, C: int) -> tuple[Tensor, Tensor]:
    x = torch.tril(tile if isinstance(tile, Tensor) else tile.load(None), -1)
    low = torch.zeros(C, C, dtype=torch.bfloat16)
    for row in range(C):
        if row % hopper_ops.CARRIED.value == 0:
            lost = torch.zeros(C)
        some, carried = x[row] != 0, x[row] + lost
        low[row] = torch.where(some, carried, 0.0).to(torch.bfloat16)
        lost = torch.where(some, carried - low[row].float(), lost)
    return low, x - low.float()


def loaded(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    places, chosen = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
    found = torch.full(places.shape, other, dtype=pointer.base.dtype)
    found[chosen] = pointer.memory()[within(pointer, places[chosen])]
    return found


def stored(pointer: Pointer, value: Any, mask: Any = True) -> None:
    given = (torch.as_tensor(x) for x in (pointer.offset, mask, value))
    places, chosen, values = torch.broadcast_tensors(*given)
    assert values.shape == torch.as_tensor(pointer.offset).shape
    pointer.memory()[within(pointer, places[chosen])] = values[chosen].to(pointer.base.dtype)


def within(pointer: Pointer, places: Tensor) -> Tensor:
    assert ((places >= 0) & (places < len(pointer.memory()))).all(), "a place outside the tensor"
    return places


def chosen(condition: Any, one: Any, other: Any) -> Tensor:
    return torch.where(*(torch.as_tensor(x) for x in (condition, one, other)))


def globals_of_kernels() -> dict[str, Any]:
    def no_layout(*arguments: Any) -> None:
        return None

    layouts = ("NVMMASharedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout")
    gl = SimpleNamespace(
        **dict.fromkeys(layouts, no_layout),
        constexpr=int,
        cdiv=lambda n, size: int(-(-n // size)),
        arange=lambda start, stop, layout: torch.arange(start, stop),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    )
    rounding = {"rounded": rounded, "rounded_in_columns": rounded_in_columns, "in_bf16": lambda x: x.to(torch.bfloat16)}
    names = {"gl": gl, **rounding}
    products = ("product", "fresh_product", "product_fp32", "fresh_product_fp32", "in_three")
    define(Path(hopper_ops.__file__), ("fetch_vectors", "clear_behind", *products), names)
    define(Path(forgetting.__file__), ("forgotten", "is_chosen"), names)
    return names
