"""What kernels in roles use of Gluon beside, in torch: roles take turns, and whatever may be late is.

As in `gluon_by_chunks`, copies and products are there once somebody waits for them. The loading role is as quick as it
can be, and goes on as soon as a place in the ring is given back: what is given back too early is written over before
anything else happens. Where no role can go on, something is never given back.

Between what threads of one role read in shared memory and what they then write there, Triton puts barriers; between
what they write and a product that reads it a kernel has to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcpgen.runtime import hopper_ops
from kcpgen.runtime.hopper_roles import REGISTERS
from tests.kernels.gluon_by_chunks import Arrivals, Product, Program, Source, Tile, as_kernels_see, jitted
from tests.kernels.gluon_emulated import define, globals_of_kernels

RING = 3  # axes of several tiles, of a chunk each


def launcher(path: Path) -> Any:
    """In place of the kernel of a generated file: kernel[grid](...) runs its programs one after another."""
    names = globals_of_kernels()
    names["NOWHERE"] = hopper_ops.NOWHERE.value
    define(path, jitted(path), names)
    (kernel,) = (names[name] for name in jitted(path) if name.endswith("_kernel"))

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*operands: Any, num_warps: int, maxnreg: int, **sizes: int) -> None:
                assert maxnreg == REGISTERS[16 * num_warps]
                seen = [as_kernels_see(x) for x in operands]
                for number in reversed(range(grid[0])):
                    program = ProgramInRoles()
                    program.into(names, number)
                    with torch.no_grad():
                        kernel(*seen, **sizes)
                    program.end()

            return launch

    return Kernel()


class OtherRoleError(Exception):
    pass


class Turns:
    """Of roles, each in a thread of its own, of which one goes on at a time."""

    def __init__(self, count: int) -> None:
        self.changed = threading.Condition()
        self.whose: int | None = 0
        self.ready: dict[int, Callable[[], bool]] = {number: lambda: True for number in range(count)}  # who is not done
        self.fault: BaseException | None = None

    def take(self, number: int, role: Callable[..., None], operands: tuple[Any, ...]) -> None:
        """A whole role."""
        try:
            self._await(number)
            with torch.no_grad():
                role(*operands)
        except OtherRoleError:
            pass
        except BaseException as fault:
            self.fault = self.fault or fault
        with self.changed:
            del self.ready[number]
            self._pass_on(number)

    def until(self, ready: Callable[[], bool]) -> None:
        """Others go on, and this one as soon as it can where `ready` says so."""
        with self.changed:
            mine = self.whose
            assert mine is not None
            self.ready[mine] = ready
            self._pass_on(mine)
        self._await(mine)

    def _pass_on(self, mine: int) -> None:
        others_first = sorted(self.ready, key=lambda number: number == mine)
        self.whose = next((number for number in others_first if self.ready[number]()), None)
        if self.ready and self.whose is None and self.fault is None:
            self.fault = AssertionError("nothing completes a barrier")
        self.changed.notify_all()

    def _await(self, mine: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.whose == mine or self.fault is not None)
            if self.fault is not None:
                raise OtherRoleError


class ProgramInRoles(Program):
    def into(self, names: dict[str, Any], number: int) -> None:
        super().into(names, number)
        names["gl"].warp_specialize = self.specialize
        names["mbarrier"].wait = self.wait_for_barrier
        names["mbarrier"].arrive = self.arrive

    def end(self) -> None:
        for memory in self.copied_out:  # tiles are allocated once, and none takes the place of another
            memory.kept = True
        super().end()

    def specialize(
        self, roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]
    ) -> None:
        """The first role is this thread's."""
        assert len(roles) == len(warps) + 1 == len(registers) + 1
        self.turns = Turns(len(roles))
        others = [
            threading.Thread(target=self.turns.take, args=(number, *role))
            for number, role in enumerate(roles)
            if number > 0
        ]
        for thread in others:
            thread.start()
        self.turns.take(0, *roles[0])
        for thread in others:
            thread.join()
        if self.turns.fault is not None:
            raise self.turns.fault

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: None, value: Tensor | None = None) -> Tile:
        tile = super().allocate(dtype, shape, layout, value)
        if len(shape) == RING:
            tile.parts = tuple(type(tile.memory)() for _ in range(shape[0]))
            self.memories += tile.parts
        for memory in (tile.memory, *tile.parts):
            memory.ordered = True
        return tile

    def copy(self, source: Source, corner: Sequence[Any], barrier: Arrivals, tile: Tile) -> None:
        assert not tile.memory.read, "a tile is copied over that nobody has given back"
        super().copy(source, corner, barrier, tile)

    def multiply(self, left: Tensor | Tile, right: Tile, *operands: Any, **options: Any) -> Product:
        for tile in (x for x in (left, right) if isinstance(x, Tile)):
            assert tile.memory.written or not tile.memory.unmet, "a product reads what other threads may still write"
        return super().multiply(left, right, *operands, **options)

    def wait_for_barrier(self, barrier: Arrivals, parity: int) -> None:
        if not barrier.can_complete(parity):
            self.turns.until(lambda: barrier.can_complete(parity))
        barrier.wait(parity)

    def arrive(self, barrier: Arrivals, count: int) -> None:
        """Who waits for it goes on first."""
        self.meet()
        barrier.arrive(count)
        self.turns.until(lambda: True)
