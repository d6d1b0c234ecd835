"""What a tuner found, put into the table that ships with the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.candidates import Fields, Part
from kcpgen.runtime.tuned import shipped
from kcpgen.runtime.tuned_table import Entry, Structure, Table, as_text, parse


@dataclass(frozen=True, kw_only=True)
class Winner:
    """fields: in which the best differs from the choice of `choose_tiles`; {} where nothing is better. about: how it
    was measured."""

    part: Part
    fields: Fields
    about: Mapping[str, Any]


def merged(table: Table, device: str, structure: Structure, winners: list[Winner]) -> Table:
    """`table` with the winners' fields in the place of what it had for their parts; all else stays."""
    old = table.get(device, {}).get(structure, Entry(structure=structure, tiles={}, measured={}))
    tiles: dict[str, Fields] = {group: dict(fields) for group, fields in old.tiles.items()}
    for winner in winners:
        group, again = winner.part.group, winner.part.fields
        kept = {name: value for name, value in tiles.get(group, {}).items() if name not in again}
        tiles[group] = {**kept, **winner.fields}
    measured = {**old.measured, **{winner.part.name: winner.about for winner in winners}}
    entry = Entry(structure=structure, tiles={g: f for g, f in tiles.items() if f}, measured=measured)
    return {**table, device: {**table.get(device, {}), structure: entry}}


def read(path: Path) -> Table:
    """The table in `path`, that of the package where there is no such file. Raises TableError."""
    return parse(path.read_text(encoding="utf-8")) if path.is_file() else dict(shipped())


def write(path: Path, table: Table) -> None:
    """Checked as a reader checks it, and whole at every moment."""
    text = as_text(table)
    parse(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
