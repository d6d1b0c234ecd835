"""The table of tiles that were tuned on known GPUs, `tuned.json`: how it is written down, and what is allowed in it.

    {"format": 1, "devices": {"a device's name": [{"structure": ..., "tiles": ..., "measured": ...}]}}

structure: the fields of `Form` and `Structure`. tiles: kernel group of `Tiles` -> field -> value, in the place of what
`choose_tiles` chose. measured: what was tuned together -> date, versions, shape, ms of its kernels before and after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from kcpgen.runtime.launch import GradientTiles, PrepareTiles, ScanTiles, Tiles, choose_tiles, scratch_dtype

FORMAT = 1
DECAYS = ("none", "scalar", "vector")
GROUPS = {
    "prepare": PrepareTiles,
    "scan": ScanTiles,
    "states": ScanTiles,
    "reverse": ScanTiles,
    "gradients": GradientTiles,
}
PROVENANCE = ("date", "versions", "shape", "ms_before", "ms_after")
KEY_BLOCKS, VALUE_BLOCKS = ("key_block", "pair_block"), ("value_block", "score_block")
WHOLE = {("prepare", "value_block"), ("gradients", "value_block"), ("gradients", "score_block")}
LEAST = {"warps": 1, "stages": 1, "registers": 24, "rows": 2, "block": 16}
MOST = {"warps": 16, "stages": 8, "registers": 255, "rows": 16, "block": 256}

Overrides = Mapping[str, Mapping[str, int | None]]


class TableError(ValueError):
    """The table is not what this module's first lines say; the text names the entry and what would be allowed."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """What tiles depend on of an op: its equation's structure, never its name.

    decay: "none", "scalar" (one a token and head) or "vector" (one a key channel). terms: rank-1 parts of the update;
    erases: how many of them read the state. whole_value_axis: whether something is summed over V.
    """

    decay: str
    terms: int
    erases: int
    whole_value_axis: bool = False


@dataclass(frozen=True, kw_only=True)
class Structure:
    """All that tiles depend on of a call: the form, padded widths, bits of a scratch element, tokens of a chunk."""

    form: Form
    key_width: int
    value_width: int
    scratch_bits: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    structure: Structure
    tiles: Overrides
    measured: Mapping[str, Mapping[str, Any]]

    def as_data(self) -> dict[str, Any]:
        flat = asdict(self.structure)
        return {"structure": {**flat.pop("form"), **flat}, "tiles": self.tiles, "measured": self.measured}


Table = dict[str, dict[Structure, Entry]]


def chosen(form: Form, keys: int, values: int, dtype: torch.dtype) -> tuple[Structure, Tiles]:
    """What `choose_tiles` chooses for a call, and the structure under which a table may know better."""
    tiles = choose_tiles(
        keys=keys,
        values=values,
        decay=form.decay,
        terms=form.terms,
        dtype=dtype,
        whole_value_axis=form.whole_value_axis,
    )
    structure = Structure(
        form=form,
        key_width=tiles.prepare.key_width,
        value_width=tiles.prepare.value_width,
        scratch_bits=8 * scratch_dtype(dtype).itemsize,
        chunk=tiles.chunk,
    )
    return structure, tiles


def overridden(tiles: Tiles, overrides: Overrides) -> Tiles:
    """`tiles` with the fields that `overrides` has; these must be free of `faults`."""
    return replace(tiles, **{group: replace(getattr(tiles, group), **found) for group, found in overrides.items()})


def faults(structure: Structure, overrides: Overrides) -> Iterator[str]:
    """What is wrong with an entry's tiles, field by field."""
    form, bits = structure.form, structure.scratch_bits
    if form.decay not in DECAYS or bits not in (16, 32):
        yield f"decay {form.decay!r}, scratch_bits {bits!r}; allowed: {', '.join(DECAYS)}; 16, 32"
        return
    widths = (structure.key_width, structure.value_width)
    known, _ = chosen(form, *widths, torch.bfloat16 if bits == 16 else torch.float32)
    if known != structure:
        yield f"no call has this structure: with it choose_tiles comes to {known}"
    for group, found in overrides.items():
        names = {field.name for field in fields(GROUPS[group])} if group in GROUPS else set()
        names -= {"key_width", "value_width", "roles", "in_flight"}  # not tuned: the structure, or the device, has them
        if not names:
            yield f"{group!r} is no kernel group; allowed: {', '.join(GROUPS)}"
        for name, value in found.items():
            if name not in names:
                yield f"{group}.{name} is no field to be tuned; allowed: {', '.join(sorted(names))}"
            elif fault := _fault(structure, group, name, value):
                yield f"{group}.{name} is {value!r}; allowed: {fault}"


def _fault(structure: Structure, group: str, name: str, value: object) -> str:
    """What is allowed instead, "" where the value is."""
    kind = name.rpartition("_")[2]
    if value is None and kind == "registers":
        return ""
    if type(value) is not int or not LEAST[kind] <= value <= MOST[kind]:
        return f"an integer from {LEAST[kind]} to {MOST[kind]}" + (" or null" if kind == "registers" else "")
    if kind in ("warps", "block", "rows") and value & (value - 1):
        return "a power of two"
    width = structure.key_width if name in KEY_BLOCKS else structure.value_width if name in VALUE_BLOCKS else value
    if value > width:
        return f"at most {width}"
    if structure.form.whole_value_axis and (group, name) in WHOLE and value != width:
        return f"{width}, since something is summed over the value axis"
    return ""


def parse(text: str) -> Table:
    """The table written as `text`. Raises TableError, which names every fault of it."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise TableError(f"no JSON: {error}") from None
    if not isinstance(whole, dict) or set(whole) != {"format", "devices"} or whole["format"] != FORMAT:
        raise TableError(f'not {{"format": {FORMAT}, "devices": ...}}')
    table: Table = {}
    said: list[str] = []
    for device, entries in whole["devices"].items():
        table[device] = {}
        for at, data in enumerate(entries):
            try:
                entry = _entry(data)
                found = [*faults(entry.structure, entry.tiles), *_unsaid(entry)]
            except (TypeError, KeyError, AttributeError) as error:
                found = [f"not an entry: {type(error).__name__}: {error}"]
            else:
                if entry.structure in table[device]:
                    found.append("the structure has an entry already")
                table[device][entry.structure] = entry
            said += [f"{device}, entry {at}: {fault}" for fault in found]
    if said:
        raise TableError("; ".join(said))
    return table


def _entry(data: Mapping[str, Any]) -> Entry:
    """Raises TypeError or KeyError for what is missing or too much."""
    flat = dict(data["structure"])
    form = Form(**{field.name: flat.pop(field.name) for field in fields(Form)})
    return Entry(structure=Structure(form=form, **flat), **{k: v for k, v in data.items() if k != "structure"})


def _unsaid(entry: Entry) -> Iterator[str]:
    """What an entry does not say of how it came about."""
    if not entry.measured:
        yield "nothing says how its tiles were measured"
    for part, about in entry.measured.items():
        missing = [name for name in PROVENANCE if name not in about]
        if missing:
            yield f"measured.{part} lacks {', '.join(missing)}"


def as_text(table: Table) -> str:
    """The inverse of `parse`, in a stable order."""
    devices = {
        device: sorted((entry.as_data() for entry in entries.values()), key=lambda data: json.dumps(data["structure"]))
        for device, entries in sorted(table.items())
    }
    return json.dumps({"format": FORMAT, "devices": devices}, indent=1) + "\n"
