"""A generated package as data, and the two things done with it: write it whole, or compare it with what is on disk."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kcpgen.emit.stamp import is_stamped, stamped_spec

SHOWN_DIFF_LINES = 80


class ForeignFilesError(Exception):
    """The place of a generated package is taken by files that kcpgen did not make."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """One generated op: the name of its directory and the text of every file in it."""

    name: str
    spec_path: str  # as stamped
    files: Mapping[str, str]

    @property
    def lines(self) -> int:
        return sum(text.count("\n") for text in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One file that is not on disk as it would be generated."""

    path: Path
    kind: str  # "changed", "missing" or "extra"
    diff: str  # of a changed file; one that is missing or extra would only be shown whole


def files_on_disk(directory: Path) -> dict[str, Path]:
    """Relative name -> path of all below that is no directory, links to nowhere included, Python's caches left out."""
    paths = sorted(path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(directory).as_posix(): path for path in paths if not _is_cache(path)}


def _is_cache(path: Path) -> bool:
    """What an import writes, and the temporary file that an interrupted one leaves."""
    return path.parent.name == "__pycache__" and ".pyc" in path.suffixes


def _content(path: Path) -> bytes:
    """The bytes of a file; a phrase that no generated file starts with for a dangling link, a socket or the like."""
    return path.read_bytes() if path.is_file() else b"neither a file nor a directory\n"


def differences(package: Package, output: Path) -> tuple[Difference, ...]:
    """What distinguishes `output/<name>/` from the package: the set of files first, then each file's text."""
    directory = output / package.name
    present = files_on_disk(directory)
    return tuple(_compare(package, directory, present))


def _compare(package: Package, directory: Path, present: Mapping[str, Path]) -> Iterator[Difference]:
    for name in sorted({*package.files, *present}):
        path = directory / name
        old = _content(present[name]) if name in present else None
        new = package.files[name].encode() if name in package.files else None
        if old != new:
            kind = "missing" if old is None else "extra" if new is None else "changed"
            yield Difference(path=path, kind=kind, diff="" if old is None or new is None else _unified(path, old, new))


def _unified(path: Path, old: bytes, new: bytes) -> str:
    lines = list(difflib.unified_diff(_lines(old), _lines(new), str(path), f"{path} (generated)"))
    if len(lines) > SHOWN_DIFF_LINES:
        lines = [*lines[:SHOWN_DIFF_LINES], f"... {len(lines) - SHOWN_DIFF_LINES} more lines\n"]
    return "".join(lines)


def _text(path: Path) -> str:
    return _content(path).decode("utf-8", errors="replace").replace("\r\n", "\n")


def _lines(content: bytes) -> list[str]:
    """Lines with what a terminal does not show spelled out: bytes that are not UTF-8, carriage returns."""
    text = content.decode("utf-8", errors="backslashreplace").replace("\r", "\\r")
    return text.splitlines(keepends=True)


def orphans(output: Path) -> tuple[tuple[Path, str], ...]:
    """Generated packages in `output` whose spec is gone, each with the path it was generated from."""
    if not output.is_dir():
        return ()
    found = []
    for directory in sorted(path for path in output.iterdir() if path.is_dir() and not path.name.startswith(".")):
        specs = {stamped_spec(_text(path)) for path in directory.glob("*.py")}
        found += [(directory, spec) for spec in sorted(specs - {""}) if not (output.parent / spec).is_file()]
    return tuple(found)


def write(package: Package, output: Path) -> bool:
    """Put the package at `output/<name>/`, whole or not at all; False when it was there already, to the byte.

    Raises ForeignFilesError rather than replace a directory that holds anything kcpgen did not generate.
    """
    target = output / package.name
    _refuse_foreign(target)
    if target.is_dir() and not differences(package, output):
        return False
    output.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{package.name}-", dir=output))
    fresh, aside = scratch / "fresh", scratch / "old"
    try:
        for name, text in package.files.items():
            path = fresh / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        _swap(fresh, target, aside)
    finally:
        if target.exists() or not aside.exists():  # else an interrupted roll-back: the old package is kept in there
            shutil.rmtree(scratch, ignore_errors=True)
    return True


def _swap(fresh: Path, target: Path, aside: Path) -> None:
    """Put `fresh` in the place of `target`; whatever stops it, an interrupt too, the old one is put back."""
    try:
        if target.exists():
            os.replace(target, aside)
        os.replace(fresh, target)
    except BaseException:
        if aside.exists() and not target.exists():
            os.replace(aside, target)
        raise


def _refuse_foreign(target: Path) -> None:
    if target.is_symlink():
        raise ForeignFilesError(f"{target} is a symbolic link; remove it or choose another -o")
    if target.exists() and not target.is_dir():
        raise ForeignFilesError(f"{target} is in the way: it is not a directory")
    foreign = [name for name, path in files_on_disk(target).items() if not is_stamped(_text(path))]
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise ForeignFilesError(
            f"{target} holds files that kcpgen did not generate ({shown}); move them or choose another -o"
        )
