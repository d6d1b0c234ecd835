"""As much of Gluon as kernels by chunks use, in torch: a program is one thread, and whatever may be late is.

A copy arrives when its barrier is waited for and a product is there once it has been waited for, neither any earlier.
A tile knows what is under way from and to it: read or written over at the wrong time, it raises AssertionError. So do a
barrier that nothing completes and a program that ends while something is under way. Layouts are dropped, and so is the
order of what several threads write and read in global memory.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from kcpgen.runtime import hopper_ops, hopper_solve, ops
from tests.kernels.gluon_emulated import (
    Barrier,
    Described,
    Pointer,
    chosen,
    define,
    globals_of_kernels,
    loaded,
    stored,
)

BLOCKS_OF_VECTORS = 5  # axes of several tiles [1, 1, tokens, keys]
REGISTERS = 1 << 16  # of a multiprocessor, which is to hold two programs


def _asserted(condition: bool) -> None:
    assert condition


def launcher(path: Path) -> Any:
    """In place of the kernel of a generated file: kernel[grid](...) runs its programs one after another.

    The last one first: what a program writes behind its chunk stays there, in place of what the next one had written.
    """
    names = globals_of_kernels()
    define(Path(ops.__file__), jitted(Path(ops.__file__)), names)
    define(
        Path(hopper_ops.__file__),
        {
            *("running_sum", "by_rows", "by_keys", "handed_over", "sum_of_parts"),
            *("laid_by_rows", "store_rows", "_store_within"),
        },
        names,
    )
    define(path, jitted(path), names)
    names["BLOCK"] = hopper_solve.BLOCK.value
    define(Path(hopper_solve.__file__), jitted(Path(hopper_solve.__file__)), names)
    names |= {name: getattr(ops, name).value for name in ("NO_DECAY_BELOW", "LOG2_E", "REACH")}
    (kernel,) = (names[name] for name in jitted(path) if name.endswith("_kernel"))

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*operands: Any, num_warps: int, maxnreg: int | None = None, **sizes: int) -> None:
                assert 2 * 32 * num_warps * (maxnreg or 255) <= REGISTERS
                seen = [as_kernels_see(x) for x in operands]
                for number in reversed(range(grid[0])):
                    program = Program()
                    program.into(names, number)
                    with torch.no_grad():
                        kernel(*seen, **sizes)
                    program.end()

            return launch

    return Kernel()


def jitted(path: Path) -> list[str]:
    """Functions of a file that run on a device."""
    found = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)]
    return [n.name for n in found if any(ast.unparse(d) in ("triton.jit", "gluon.jit") for d in n.decorator_list)]


def as_kernels_see(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x)
    return Source(x) if hasattr(x, "block_shape") else x


class Source(Described):
    layout = None

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=torch.Size(self.block).numel() * self.dtype.itemsize)


@dataclass(eq=False)
class Memory:
    """What is under way to and from a tile, by whatever name it goes."""

    arriving: bool = False
    leaving: bool = False
    products: int = 0  # that are begun and read it
    read: bool = False  # since all threads met
    written: bool = False  # by threads, and not fenced: the tensor cores and copies need not see it
    unmet: bool = False  # whether other threads than one may still write, or fence, what they wrote
    ordered: bool = False  # whether threads meet before they write what they have read: then Triton sees to it
    kept: bool = False  # whether a compiler may not give its place to what is allocated later

    def check_read(self) -> None:
        assert not self.arriving, "a tile is read before it is there"

    def check_write(self) -> None:
        assert not self.arriving, "a tile is written while it is copied"
        assert not self.leaving, "a tile is written while it is copied out"
        assert not self.products, "a tile is written while a product reads it"
        assert self.ordered or not self.read, "a tile is written that some thread may still read"


@dataclass
class Tile:
    """A tile in shared memory, or a part of one."""

    held: Tensor
    memory: Memory = field(default_factory=Memory)
    parts: tuple[Memory, ...] = ()  # of tiles that were allocated together, each copied on its own

    layout = None

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def shape(self) -> torch.Size:
        return self.held.shape

    def index(self, number: int) -> Tile:
        return Tile(self.held[number], self.parts[number] if self.parts else self.memory)

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.held.permute(order), self.memory)

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.held.view(shape), self.memory)

    def slice(self, start: int, length: int, dim: int) -> Tile:
        return Tile(self.held.narrow(dim, start, length), self.memory)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: None) -> Tile:
        shares = shape[0] // len(self.parts) if self.parts else 0  # of what was one of several tiles
        parts = tuple(part for part in self.parts for _ in range(shares))
        return Tile(self.held.view(dtype).view(tuple(shape)), self.memory, parts)

    def load(self, layout: None) -> Tensor:
        self.memory.check_read()
        self.memory.read = True
        return self.held.clone()

    def _keep_alive(self) -> None:
        """Until here, and with all its parts."""
        for memory in (self.memory, *self.parts):
            memory.kept = not memory.leaving

    def store(self, value: Tensor) -> None:
        self.memory.check_write()
        assert (value.shape, value.dtype) == (self.shape, self.dtype)
        self.held.copy_(value)
        self.memory.written = self.memory.unmet = True


@dataclass
class Arrivals(Barrier):
    """Copies on their way arrive when somebody waits for them."""

    coming: list[tuple[Tile, Tensor]] = field(default_factory=list)

    def can_complete(self, parity: int) -> bool:
        """Whether that phase is over, or will be once copies on their way are here."""
        coming = sum(found.numel() * found.element_size() for _, found in self.coming)
        return self.phase & 1 != parity or (self.arrived and coming >= self.missing)

    def wait(self, parity: int) -> None:
        if self.phase & 1 == parity:
            for tile, found in self.coming:
                tile.held.copy_(found.view(tile.shape))
                tile.memory.arriving = False
                self.receive(found.numel() * found.element_size())
            self.coming.clear()
        assert self.phase & 1 != parity, "nothing completes a barrier"


@dataclass(eq=False)
class Product:
    """What a product will be. No tensor: it can be added to, and waited for."""

    value: Tensor
    reads: list[Memory]
    done: bool = False

    def read_too_early(self, *others: Any) -> None:
        raise AssertionError("a product is read before it is there")

    to = __add__ = __mul__ = __rmul__ = __radd__ = read_too_early


class Program:
    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self.barriers: list[Arrivals] = []
        self.under_way: list[Product] = []
        self.leaving: list[tuple[Source, Sequence[Any], Tile]] = []
        self.copied_out: list[Memory] = []

    def into(self, names: dict[str, Any], number: int) -> None:
        """What kernels call, for this program."""
        common = {
            "cdiv": names["gl"].cdiv,
            "program_id": lambda axis: torch.tensor(number),
            "load": loaded,
            "store": stored,
            "where": chosen,
            "exp2": torch.exp2,
            "fma": lambda x, y, z: ((1.0 * x).double() * y + z).float(),  # a product under way cannot be multiplied
            "sqrt": torch.sqrt,
            "rsqrt": torch.rsqrt,
            "abs": torch.abs,
            "minimum": lambda x, y: torch.fmin(x, torch.as_tensor(y)),  # NaN is no number to compare with, on a GPU
            "maximum": lambda x, y: torch.fmax(torch.as_tensor(x), torch.as_tensor(y)),
            "min": torch.min,
            "sum": torch.sum,
            "cumsum": summed,
            "static_range": range,
            "static_assert": _asserted,
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "int32": torch.int32,
            "int64": torch.int64,
        }
        more = {
            **dict.fromkeys(("BlockedLayout", "NVMMASharedLayout", "SwizzledSharedLayout"), lambda *arguments: None),
            "DistributedLinearLayout": lambda **bases: None,
            "num_warps": lambda: 4,
            "to_tensor": torch.tensor,
            "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            "convert_layout": converted,
            "allocate_shared_memory": self.allocate,
            "thread_barrier": self.meet,
            "join": lambda one, other: torch.stack([one, other], -1),
        }
        vars(names["gl"]).update(common, **more)
        names["tl"] = SimpleNamespace(**common)
        names |= {
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self.copy,
                async_copy_shared_to_global=self.copy_out,
                store_wait=self.wait_for_copies,
            ),
            "mma_v2": lambda left, right, into: into + left.float() @ right.float(),
            "mbarrier": SimpleNamespace(wait=Arrivals.wait, expect=Arrivals.expect),
            "fence_async_shared": self.fence,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait,
            "barriers": self.make_barriers,
        }

    def end(self) -> None:
        assert not self.under_way, "a program ends while it multiplies"
        assert not any(barrier.coming for barrier in self.barriers), "a program ends while tiles are copied"
        assert not self.leaving, "a program ends while tiles are copied out"
        assert all(memory.kept for memory in self.copied_out), "a tile may lose its place while it is copied out"

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: None, value: Tensor | None = None) -> Tile:
        tile = Tile(torch.full(tuple(shape), torch.nan, dtype=dtype))
        if len(shape) == BLOCKS_OF_VECTORS:
            tile.parts = tuple(Memory() for _ in range(shape[0]))
        self.memories += [tile.memory, *tile.parts]
        if value is not None:
            tile.store(value)
        return tile

    def make_barriers(self, count: int) -> SimpleNamespace:
        made = [Arrivals() for _ in range(count)]
        self.barriers += made
        return SimpleNamespace(index=made.__getitem__)

    def meet(self) -> None:
        for memory in self.memories:
            memory.read = False
            memory.unmet = memory.written

    def fence(self) -> None:
        for memory in self.memories:
            memory.written = False

    def copy(self, source: Source, corner: Sequence[Any], barrier: Arrivals, tile: Tile) -> None:
        tile.memory.check_write()
        assert not tile.memory.written, "a tile is copied over what was not fenced"
        found = source.tile(corner)
        assert found.dtype is tile.dtype
        assert [n for n in found.shape if n > 1] == [n for n in tile.shape if n > 1]
        tile.held.fill_(torch.nan)
        tile.memory.arriving = True
        barrier.coming.append((tile, found))

    def copy_out(self, target: Source, corner: Sequence[Any], tile: Tile) -> None:
        tile.memory.check_read()
        assert not tile.memory.written, "what was not fenced is copied out"
        assert tile.dtype is target.dtype
        tile.memory.leaving = True
        self.copied_out.append(tile.memory)
        self.leaving.append((target, corner, tile))

    def wait_for_copies(self, later: int) -> None:
        """Only now is a tile read. Copies are done in the order in which they were begun."""
        count = max(0, len(self.leaving) - later)
        for target, corner, tile in self.leaving[:count]:
            target.fill(corner, tile.held)
            tile.memory.leaving = False
        self.leaving = self.leaving[count:]
        for _, _, tile in self.leaving:
            tile.memory.leaving = True

    def multiply(
        self, left: Tensor | Tile, right: Tile, into: Tensor | Product, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async
        tiles = [x for x in (left, right) if isinstance(x, Tile)]
        for tile in tiles:
            tile.memory.check_read()
            assert not tile.memory.written, "a product reads what was not fenced"
            tile.memory.products += 1
        row, column = (x.held if isinstance(x, Tile) else x for x in (left, right))
        assert row.dtype is column.dtype is torch.bfloat16
        before = into.value if isinstance(into, Product) else into
        value = row.float() @ column.float()
        assert value.shape == before.shape
        self.under_way.append(Product(before + value if use_acc else value, [tile.memory for tile in tiles]))
        return self.under_way[-1]

    def wait(self, later: int, deps: Sequence[Product]) -> Any:
        """Products are done in the order in which they were begun."""
        count = max(0, len(self.under_way) - later)
        for product in self.under_way[:count]:
            product.done = True
            for memory in product.reads:
                memory.products -= 1
                memory.read = True
        self.under_way = self.under_way[count:]
        assert all(product.done for product in deps), "a product is read before it is there"
        found = tuple(product.value for product in deps)
        return found if len(found) > 1 else found[0]


def converted(x: Tensor, layout: None) -> Tensor:
    assert isinstance(x, Tensor), "a product is read before it is there"
    return x


def summed(x: Tensor, axis: int, reverse: bool = False) -> Tensor:
    """One after another in fp32, as Triton's interpreter does: torch takes the sums in between in fp64, and decays of
    pairs, differences of large ones, would be rounded to 16 bits the other way."""
    if reverse:
        return summed(x.flip(axis), axis).flip(axis)
    return torch.from_numpy(numpy.cumsum(x.numpy(), axis))
