"""What is tuned together, and the tiles that are tried for it: a declared list, not a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from kcpgen.runtime.launch import Tiles
from kcpgen.runtime.tuned_table import DECAYS, Structure, faults

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Fields of one group of `Tiles` that decide on the time of some kernels, and on no other part's.

    axes: what is tried is their product. decays: of the forms that have these kernels.
    """

    name: str
    group: str
    kernels: tuple[str, ...]
    axes: tuple[tuple[Fields, ...], ...]
    decays: tuple[str, ...] = DECAYS

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for axis in self.axes for name in axis[0])


def _each(name: str, *values: int | None) -> tuple[Fields, ...]:
    return tuple({name: value} for value in values)


def _warps(*pairs: tuple[int, int | None]) -> tuple[Fields, ...]:
    """Warps of a program with the registers that one of their threads may have, None for all there are."""
    return tuple({"warps": warps, "registers": registers} for warps, registers in pairs)


def _serial(name: str) -> Part:
    axes = (_each("value_block", 32, 64), _each("warps", 4, 8), _each("stages", 1, 2, 3, 4))
    return Part(name=name, group=name, kernels=(f"{name}_kernel",), axes=axes)


PARTS = {
    part.name: part
    for part in (
        Part(
            name="prepare",
            group="prepare",
            kernels=("prepare_kernel",),
            # limits on registers: so that a program more fits a multiprocessor
            axes=(_each("key_block", 32, 64, 128), _warps((1, None), (2, None), (2, 168), (4, None), (4, 168))),
        ),
        _serial("scan"),
        _serial("states"),
        _serial("reverse"),
        Part(
            name="scores",
            group="gradients",
            kernels=("score_gradients_kernel",),
            axes=(_each("score_block", 32, 64, 128), _each("score_warps", 2, 4, 8)),
        ),
        Part(
            name="gradients",
            group="gradients",
            kernels=("gradients_kernel", "far_gradients_kernel"),
            axes=(
                _each("key_block", 32, 64),
                _each("value_block", 32, 64, 128),
                _warps((4, None), (4, 168), (8, None), (8, 128)),
            ),
        ),
        Part(
            name="pairs",
            group="gradients",
            kernels=("near_gradients_kernel", "finish_kernel"),
            axes=(_each("pair_block", 32, 64, 128), _each("pair_warps", 2, 4, 8)),
            decays=("vector",),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """fields: those in which it differs from what `choose_tiles` chose, {} for that choice itself."""

    part: Part
    fields: Fields

    @property
    def overrides(self) -> dict[str, Fields]:
        return {self.part.group: self.fields} if self.fields else {}

    @property
    def label(self) -> str:
        return f"{self.part.name} {written(self.fields)}"


def written(fields: Fields) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items()) or "as chosen"


def candidates(part: Part, structure: Structure, tiles: Tiles) -> Iterator[Candidate]:
    """The choice itself, then what differs from it and is allowed, that which differs in the fewest fields first."""
    now = getattr(tiles, part.group)
    tried: list[Fields] = [{}]
    for point in product(*part.axes):
        wanted = {name: value for axis in point for name, value in axis.items()}
        fields = {name: value for name, value in wanted.items() if value != getattr(now, name)}
        if fields not in tried and not any(faults(structure, {part.group: fields})):
            tried.append(fields)
    return (Candidate(part=part, fields=fields) for fields in sorted(tried, key=len))


def parts_of(structure: Structure, names: Sequence[str] = ()) -> list[Part]:
    """The parts that this form has, those of the names if any are given."""
    return [p for p in PARTS.values() if structure.form.decay in p.decays and (not names or p.name in names)]
