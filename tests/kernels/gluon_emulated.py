"""As much of Gluon as kernels in roles use, in torch: roles are threads, rings and barriers are real.

Products are done as they are begun, and so are copies out; what waits for products is looked at in `test_hopper.py`.
What threads write to a tile takes a fence and then a barrier of theirs before a product may read it, and a fence before
it is copied out. What kernels by chunks use beside is in `gluon_by_chunks.py`.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kcpgen.runtime import forgetting, hopper_ops

LONGEST = 20.0  # seconds that a thread waits before something must be wrong


def launcher(path: Path, kernel: str = "transition_kernel") -> Any:
    """In place of that kernel of a generated file: kernel[grid](...) runs its programs one after another."""
    names = globals_of_kernels()
    define(path, (kernel, "copy", "multiply"), names)

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*tensors: Any, num_warps: int, maxnreg: int, **sizes: int) -> None:
                assert (num_warps, maxnreg) == (4, 128)
                operands = [seen(x) for x in tensors]
                for program in range(grid[0]):
                    names["gl"].program_id = lambda axis, program=program: torch.tensor(program)
                    with torch.no_grad():
                        names[kernel](*operands, **sizes)

            return launch

    return Kernel()


def seen(x: Any) -> Any:
    """As kernels see what they are launched with."""
    if isinstance(x, Tensor):
        return Pointer(x)
    return x if x is None or isinstance(x, int) else Described(x)


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
        return self.tensor[tuple(slice(start, start + n) for start, n in zip(starts, self.block, strict=True))]


@dataclass(eq=False)
class Written:
    """Of what threads wrote to a tile or a ring: whether tensor cores and copies see what a thread has written, and
    whether all threads have."""

    fenced: bool = True
    met: bool = True


@dataclass
class Shared:
    """A tile in shared memory, or a ring of them."""

    held: Tensor
    written: Written = field(default_factory=Written)

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def shape(self) -> torch.Size:
        return self.held.shape

    def index(self, stage: Any) -> Shared:
        return Shared(self.held[int(stage)], self.written)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.held.permute(order), self.written)

    def load(self, layout: None) -> Tensor:
        return self.held.clone()

    def store(self, value: Tensor) -> None:
        assert (value.shape, value.dtype) == (self.shape, self.dtype)
        self.held.copy_(value)
        self.written.fenced = self.written.met = False


class SharedMemory:
    """Of one launch after another."""

    def __init__(self) -> None:
        self.tiles: list[Written] = []

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: None) -> Shared:
        tile = Shared(torch.full(tuple(shape), torch.nan, dtype=dtype))
        self.tiles.append(tile.written)
        return tile

    def fence(self) -> None:
        for written in self.tiles:
            written.fenced = True

    def meet(self) -> None:
        for written in self.tiles:
            written.met = written.fenced


@dataclass
class Barrier:
    """Complete once one has arrived and the bytes that it expects, if any, are there."""

    changed: threading.Condition
    phase: int = 0
    arrived: bool = False
    missing: int = 0

    def arrive(self, count: int = 1) -> None:
        with self.changed:
            assert count == 1
            assert not self.arrived
            self.arrived = True
            self._complete()

    def expect(self, count: int) -> None:
        with self.changed:
            self.missing += count
        self.arrive()

    def receive(self, count: int) -> None:
        with self.changed:
            self.missing -= count
            assert self.missing >= 0, "more bytes than a barrier expects"
            self._complete()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != parity, LONGEST), "nothing completes a barrier"

    def _complete(self) -> None:
        if self.arrived and not self.missing:
            self.phase, self.arrived = self.phase + 1, False
            self.changed.notify_all()


@dataclass
class Barriers:
    made: list[Barrier] = field(default_factory=list)

    def index(self, stage: Any) -> Barrier:
        return self.made[int(stage)]


def barriers(count: int) -> Barriers:
    changed = threading.Condition()
    return Barriers([Barrier(changed) for _ in range(count)])


def specialize(roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: Any) -> None:
    """The first role is this thread's."""
    assert len(roles) == len(warps) + 1
    faults: list[BaseException] = []

    def run(role: Callable[..., None], operands: tuple[Any, ...]) -> None:
        try:
            with torch.no_grad():
                role(*operands)
        except BaseException as fault:
            faults.append(fault)

    others = [threading.Thread(target=run, args=role) for role in roles[1:]]
    for thread in others:
        thread.start()
    run(*roles[0])
    for thread in others:
        thread.join()
    if faults:
        raise faults[0]


def copied(source: Described, corner: Sequence[Any], barrier: Barrier, tile: Shared) -> None:
    assert tile.written.fenced, "a tile is copied over what was not fenced"
    found = source.tile(corner)
    tile.held.copy_(found.reshape(tile.held.shape))
    barrier.receive(found.numel() * found.element_size())


def copied_out(target: Described, corner: Sequence[Any], tile: Shared) -> None:
    assert tile.written.fenced, "what was not fenced is copied out"
    target.fill(corner, tile.held)


def multiplied(
    left: Tensor | Shared, right: Shared, into: Tensor, use_acc: bool = True, is_async: bool = False
) -> Tensor:
    assert is_async
    assert left.dtype is right.dtype is torch.bfloat16
    for tile in (x for x in (left, right) if isinstance(x, Shared)):
        assert tile.written.fenced, "a product reads what was not fenced"
        assert tile.written.met, "a product reads what other threads may still write"
    row, column = (x.held if isinstance(x, Shared) else x for x in (left, right))
    found = row.float() @ column.float()
    assert found.shape == into.shape
    return into + found if use_acc else found


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    low = x.to(torch.bfloat16)
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


def globals_of_kernels() -> dict[str, Any]:
    def no_layout(*arguments: Any) -> None:
        return None

    memory = SharedMemory()
    layouts = ("NVMMASharedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout")
    gl = SimpleNamespace(
        **dict.fromkeys(layouts, no_layout),
        constexpr=int,
        float32=torch.float32,
        bfloat16=torch.bfloat16,
        int64=torch.int64,
        cdiv=lambda n, size: int(-(-n // size)),
        arange=lambda start, stop, layout: torch.arange(start, stop),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        where=lambda *operands: torch.where(*map(torch.as_tensor, operands)),
        maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
        convert_layout=lambda x, layout: x,
        allocate_shared_memory=memory.allocate,
        thread_barrier=memory.meet,
        load=loaded,
        store=stored,
        warp_specialize=specialize,
    )
    names = {
        "gl": gl,
        "tl": gl,
        "tma": SimpleNamespace(
            async_copy_global_to_shared=copied,
            async_copy_shared_to_global=copied_out,
            store_wait=lambda later: None,
        ),
        "fence_async_shared": memory.fence,
        "mbarrier": SimpleNamespace(
            wait=Barrier.wait, expect=Barrier.expect, arrive=lambda barrier, count: barrier.arrive(count)
        ),
        "warpgroup_mma": multiplied,
        "warpgroup_mma_wait": lambda later, deps: deps[0],
        "barriers": barriers,
        "rounded": rounded,
        "in_bf16": lambda x: x.to(torch.bfloat16),
        "NOWHERE": hopper_ops.NOWHERE.value,
    }
    products = ("product", "fresh_product", "product_fp32", "fresh_product_fp32", "in_three")
    define(Path(hopper_ops.__file__), ("fetch_vectors", "clear_behind", *products), names)
    define(Path(forgetting.__file__), ("forgotten",), names)
    return names
