"""What kernels in roles use of Gluon beside, in torch: roles take turns, and whatever may be late is.

As in `gluon_by_chunks`, copies and products are there once somebody waits for them. In one
program the roles that the first one waits for are as quick as they can be, and go on as soon as a place is given back:
what is given back too early is written over before anything else happens. In the next they are late, and begin when
somebody waits for them. Where no role can go on, something is never given back.

Products and copies out are a role's own, that only it can wait for; so are what its threads wrote and have not fenced,
or may still read or write, till its threads meet. Between what threads of one role read in shared memory and what they
then write there, Triton puts barriers; between what they write and a product that reads it a kernel has to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcpgen.runtime import hopper_ops
from kcpgen.runtime.hopper_roles import REGISTERS, SCORING, WARPS
from tests.kernels.gluon_by_chunks import Arrivals, Memory, Product, Program, Source, Tile, as_kernels_see, jitted
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
                scoring = "SCORE_REGISTERS" in sizes and sizes["STORE_OUTPUT"]
                columns = sizes.get("BV", 16 * num_warps)
                assert num_warps == WARPS[columns]
                assert maxnreg == (SCORING if scoring else REGISTERS)[columns]
                seen = [as_kernels_see(x) for x in operands]
                for number in reversed(range(grid[0])):
                    program = ProgramInRoles(late=number % 2 > 0)
                    program.into(names, number)
                    with torch.no_grad():
                        kernel(*seen, **sizes)
                    program.end()

            return launch

    return Kernel()


class OtherRoleError(Exception):
    pass


class Turns:
    """Of roles, each in a thread of its own, of which one goes on at a time. late: whether it does till it waits, or
    somebody can go on who did; else the first does where no other can."""

    def __init__(self, count: int, late: bool) -> None:
        self.late = late
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

    def waiting(self) -> list[int]:
        return [number for number, ready in self.ready.items() if not ready()]

    def until(self, ready: Callable[[], bool], first: Collection[int] = ()) -> None:
        """Others go on, and this one as soon as it can where `ready` says so. first: who could not till now."""
        with self.changed:
            mine = self.whose
            assert mine is not None
            self.ready[mine] = ready
            self._pass_on(mine, first)
        self._await(mine)

    def _pass_on(self, mine: int, first: Collection[int] = ()) -> None:
        in_turn = sorted(self.ready, key=lambda number: (number == 0, number))
        if self.late:
            in_turn = sorted(self.ready, key=lambda number: (number not in first, number != mine, number))
        self.whose = next((number for number in in_turn if self.ready[number]()), None)
        if self.ready and self.whose is None and self.fault is None:
            self.fault = AssertionError("nothing completes a barrier")
        self.changed.notify_all()

    def _await(self, mine: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.whose == mine or self.fault is not None)
            if self.fault is not None:
                raise OtherRoleError


def _by_role(name: str) -> property:
    """Whether any role has done so; one says so, or takes it back, of itself."""

    def change(memory: MemoryOfRoles, done: bool) -> None:
        roles = memory.roles.setdefault(name, set())
        (roles.add if done else roles.discard)(memory.program.role)

    return property(lambda memory: bool(memory.roles[name]), change)


class MemoryOfRoles(Memory):
    read, written, unmet = (_by_role(name) for name in ("read", "written", "unmet"))  # type: ignore[assignment]

    def __init__(self, program: ProgramInRoles) -> None:
        self.program, self.roles = program, dict[str, set[int]]()
        super().__init__(ordered=True)


class ProgramInRoles(Program):
    def __init__(self, late: bool) -> None:
        self.late = late
        self.turns: Turns | None = None
        self._own: dict[tuple[str, int], list[Any]] = {}
        super().__init__()

    @property
    def role(self) -> int:
        return (self.turns.whose or 0) if self.turns else 0

    under_way, leaving = (
        property(
            lambda self, name=name: self._own.setdefault((name, self.role), []),
            lambda self, found, name=name: self._own.update({(name, self.role): found}),
        )
        for name in ("under_way", "leaving")
    )

    def into(self, names: dict[str, Any], number: int) -> None:
        super().into(names, number)
        names["gl"].warp_specialize = self.specialize
        names["mbarrier"].wait = self.wait_for_barrier
        names["mbarrier"].arrive = self.arrive

    def end(self) -> None:
        for memory in self.copied_out:  # tiles are allocated once, and none takes the place of another
            memory.kept = True
        for (what, _), left in self._own.items():
            assert not left, f"a role ends while {'it multiplies' if what == 'under_way' else 'tiles are copied out'}"
        super().end()

    def specialize(
        self, roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]
    ) -> None:
        """The first role is this thread's."""
        assert len(roles) == len(warps) + 1 == len(registers) + 1
        self.turns = Turns(len(roles), self.late)
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
        tile = super().allocate(dtype, shape, layout)
        self.memories.remove(tile.memory)
        tile.memory = MemoryOfRoles(self)
        if len(shape) == RING:
            tile.parts = tuple(MemoryOfRoles(self) for _ in range(shape[0]))
        self.memories += [tile.memory, *tile.parts]
        if value is not None:
            tile.store(value)
        return tile

    def meet(self) -> None:
        """Threads of one role."""
        for memory in self.memories:
            memory.read = False
            memory.unmet = self.role in memory.roles["written"]

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
        waiting = self.turns.waiting()
        barrier.arrive(count)
        self.turns.until(lambda: True, first=[number for number in waiting if self.turns.ready[number]()])
