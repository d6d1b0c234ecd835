"""A file's bytes -> text that may be looked at: UTF-8, of sane size, without invisible characters."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

from kcpgen.diagnostics import Diagnostic, Faults, SpecError
from kcpgen.language.limits import MAX_BYTES
from kcpgen.language.syntax import Span

_MAX_INVISIBLE = 10
_UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")  # a path ends in a comment of generated code


def read(path: str | Path) -> str:
    """The text of a spec file. Raises SpecError when it cannot be read as one."""
    shown = str(path)
    try:
        if any(unicodedata.category(character) in _UNPRINTABLE for character in os.path.abspath(shown)):
            raise _whole_file("KCP001", "the file's path contains control characters", repr(shown))
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _whole_file("KCP001", f"cannot read the file: {reason}", shown) from None
    if len(data) > MAX_BYTES:
        raise _whole_file("KCP004", f"a spec has at most {MAX_BYTES} bytes", shown)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"line {line} is not UTF-8 (byte 0x{data[error.start]:02x})"
        raise _whole_file("KCP002", message, shown, line) from None


def clean(text: str, path: str) -> str:
    """`text` with line ends unified. Raises SpecError when it is empty, too large or contains invisible characters."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise _whole_file("KCP004", f"a spec has at most {MAX_BYTES} bytes", path)
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.split("\n")):
        raise _whole_file("KCP003", "the spec is empty", path, hint="docs/language.md shows a whole spec")
    faults = Faults()
    _check_visible(text, path, faults)
    if faults.found:
        raise SpecError(faults.found[:_MAX_INVISIBLE], text)
    return text


def _check_visible(text: str, path: str, faults: Faults) -> None:
    for number, line in enumerate(text.split("\n"), start=1):
        for column, character in enumerate(line, start=1):
            if character != "\t" and not character.isprintable():
                name = unicodedata.name(character, f"U+{ord(character):04X}")
                span = Span(path=path, line=number, column=column, end_line=number, end_column=column + 1)
                faults.add("KCP005", f"invisible character: {name}", span, hint="delete it, or type an ordinary space")


def _whole_file(code: str, message: str, path: str, line: int = 1, hint: str = "") -> SpecError:
    span = Span(path=path, line=line, column=1, end_line=line, end_column=2)
    return SpecError([Diagnostic(code=code, message=message, span=span, hints=(hint,) if hint else ())])
