"""A file's bytes -> text that may be looked at: UTF-8, of sane size, without invisible characters."""

from __future__ import annotations

import unicodedata
from pathlib import Path

from kcpgen.diagnostics import Diagnostic, SpecError
from kcpgen.language.limits import MAX_BYTES
from kcpgen.language.syntax import Span


def read(path: str | Path) -> str:
    """The text of a spec file. Raises SpecError when it cannot be read as one."""
    shown = str(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError([_whole_file("KCP001", f"cannot read the file: {reason}", shown)]) from error
    try:
        return data[:MAX_BYTES].decode() if len(data) > MAX_BYTES else data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"line {line} is not UTF-8 (byte 0x{data[error.start]:02x})"
        raise SpecError([_whole_file("KCP002", message, shown, line)]) from error


def clean(text: str, path: str) -> str:
    """`text` with line ends unified. Raises SpecError when it is empty, too large or contains invisible characters."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise SpecError([_whole_file("KCP004", f"a spec has at most {MAX_BYTES} bytes", path)])
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.split("\n")):
        hints = ("docs/language.md shows a whole spec",)
        raise SpecError([_whole_file("KCP003", "the spec is empty", path, hints=hints)], text)
    faults = list(_invisible(text, path))
    if faults:
        raise SpecError(faults, text)
    return text


def _invisible(text: str, path: str) -> list[Diagnostic]:
    faults = []
    for number, line in enumerate(text.split("\n"), start=1):
        for column, character in enumerate(line, start=1):
            if character != "\t" and not character.isprintable():
                name = unicodedata.name(character, f"U+{ord(character):04X}")
                span = Span(path=path, line=number, column=column, end_line=number, end_column=column + 1)
                hints = ("replace it by an ordinary space or delete it",)
                faults.append(Diagnostic(code="KCP005", message=f"invisible character: {name}", span=span, hints=hints))
    return faults


def _whole_file(code: str, message: str, path: str, line: int = 1, hints: tuple[str, ...] = ()) -> Diagnostic:
    span = Span(path=path, line=line, column=1, end_line=line, end_column=2)
    return Diagnostic(code=code, message=message, span=span, hints=hints)
