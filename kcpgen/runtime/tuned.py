"""The tiles of a call: what `choose_tiles` chooses, or what was tuned for the GPU that its tensors are on.

A GPU is known by its name, which the driver keeps on the host: nothing waits for the device. Every other device is
unknown and has the portable choice: the CPU, the interpreter, and a GPU that is compiled for but not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

import torch

from kcpgen.runtime.launch import Tiles
from kcpgen.runtime.tuned_table import Form, Overrides, Structure, Table, TableError, chosen, overridden, parse

SHIPPED = Path(__file__).with_name("tuned.json")

Find = Callable[[Structure], Overrides]

_instead: ContextVar[Find | None] = ContextVar("tiles", default=None)


def tiles_for(form: Form, keys: int, values: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Tiles of a call on inputs of `dtype`, K = `keys`, V = `values`. Less than a microsecond after the first."""
    find = _instead.get()
    if find is None:
        return _tiles(form, keys, values, dtype, device)
    structure, tiles = chosen(form, keys, values, dtype)
    return overridden(tiles, find(structure))


@contextmanager
def looked_up_by(find: Find) -> Iterator[None]:
    """Calls made inside, on any device, ask `find` instead of the table: a tuner, or a check of what is tuned.

    A forward that a checkpointed backward repeats in another thread asks the table again.
    """
    token = _instead.set(find)
    try:
        yield
    finally:
        _instead.reset(token)


def on_device(name: str) -> Find:
    """What the table has for the device of that name, nothing where it does not know it."""
    return lambda structure: overrides(name, structure)


def overrides(device: str, structure: Structure) -> Overrides:
    entry = shipped().get(device, {}).get(structure)
    return {} if entry is None else entry.tiles


@lru_cache(maxsize=1)
def shipped() -> Table:
    """The table of this package, read once. Raises TableError for one that was edited into something else."""
    try:
        return parse(SHIPPED.read_text(encoding="utf-8"))
    except TableError as error:
        raise TableError(f"{SHIPPED}: {error}") from None


@lru_cache(maxsize=256)
def _tiles(form: Form, keys: int, values: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    structure, tiles = chosen(form, keys, values, dtype)
    return overridden(tiles, overrides(_name(device), structure)) if device.type == "cuda" else tiles


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
