"""Diagnostics as data, and the one renderer that shows them.

Every stage that can find fault with a spec raises `SpecError` with all the faults it found, each a `Diagnostic` that
points at the smallest wrong piece of the source. `CODES` holds the codes of the language stage, those of the derivation
are in `kcpgen.derivation.faults`, those of the kernels in `kcpgen.plan_faults`; docs/language.md explains them all.
Codes are stable: a meaning keeps its number.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from kcpgen.language.syntax import Span

TAB_STOP = 4
MAX_LINE = 120
MAX_SHOWN = 50

CODES = {
    "KCP001": "the file cannot be read",
    "KCP002": "the file is not UTF-8",
    "KCP003": "the spec is empty",
    "KCP004": "the file is too large",
    "KCP005": "an invisible or control character",
    "KCP010": "a word or symbol that does not belong here, or a line that ends too early",
    "KCP011": "a bracket without its partner",
    "KCP012": "a number out of range",
    "KCP013": "a token index other than `t`, or a target not at `t`",
    "KCP014": "an ambiguous denominator",
    "KCP015": "a spec too long, too deep or with too many names",
    "KCP016": "a character the language does not use",
    "KCP101": "a name that is not declared",
    "KCP102": "a name declared twice",
    "KCP103": "a reserved name",
    "KCP104": "a name that generated code cannot carry",
    "KCP105": "a title that a docstring cannot carry",
    "KCP106": "a token index on something that has none",
    "KCP107": "a read of a future token",
    "KCP108": "a read of an input at an earlier token",
    "KCP109": "the state read at the wrong token, or not at all",
    "KCP110": "a missing declaration or equation",
    "KCP111": "a declaration or equation too many",
    "KCP112": "an option that rewrites something else than a token input",
    "KCP113": "a token input rewritten twice",
    "KCP114": "a rewrite that reads what it cannot have",
    "KCP115": "an option that does nothing, or a rewrite outside of one",
    "KCP116": "a `when` that tests no flag or constant, or one twice",
    "KCP117": "a constant read where it may not be given",
    "KCP118": "`scale` missing from the readout, or outside of it",
    "KCP119": "something declared for nothing",
    "KCP120": "shapes that do not fit together",
    "KCP121": "a result of the wrong shape",
    "KCP122": "a shape that cannot be declared, or a dimension no input has",
    "KCP123": "a promise that cannot be made",
    "KCP124": "a name that the code generated for the spec uses for something else",
}


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One fault. `label` stands beside the carets, `notes` say why, `hints` what to write instead."""

    code: str
    message: str
    span: Span
    label: str = ""
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


class SpecError(Exception):
    """A spec was rejected. Carries every diagnostic of the stage that rejected it; str() is the rendered text.

    `text` is the source the spans point into; without it only positions and messages are shown.
    """

    def __init__(self, diagnostics: Iterable[Diagnostic], text: str = "") -> None:
        self.diagnostics = tuple(sorted(diagnostics, key=_position))
        self.text = text
        super().__init__(self.diagnostics, text)

    def __str__(self) -> str:
        return render(self.diagnostics, self.text)


class Faults:
    """Collects what one stage finds, so that all of it is reported together."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []

    def add(self, code: str, message: str, span: Span, *, label: str = "", note: str = "", hint: str = "") -> None:
        notes, hints = (tuple(filter(None, [text])) for text in (note, hint))
        self.found.append(Diagnostic(code=code, message=message, span=span, label=label, notes=notes, hints=hints))


def render(diagnostics: Iterable[Diagnostic], text: str) -> str:
    """Diagnostics as text, one block each, separated by an empty line; the first `MAX_SHOWN` of them."""
    lines, found = text.split("\n"), list(diagnostics)
    blocks = [_block(diagnostic, lines) for diagnostic in found[:MAX_SHOWN]]
    more = [f"... and {len(found) - MAX_SHOWN} more errors\n"] if len(found) > MAX_SHOWN else []
    return "\n".join(blocks + more)


def _position(diagnostic: Diagnostic) -> tuple[int, int, str]:
    return diagnostic.span.line, diagnostic.span.column, diagnostic.code


def _block(diagnostic: Diagnostic, lines: list[str]) -> str:
    span = diagnostic.span
    margin = " " * len(str(span.line))
    body = [
        f"error[{diagnostic.code}]: {diagnostic.message}",
        f"{margin}--> {span.path}:{span.line}:{span.column}",
        *_excerpt(span, lines, diagnostic.label, margin),
        *(f"{margin} = note: {note}" for note in diagnostic.notes),
        *(f"{margin} = hint: {hint}" for hint in diagnostic.hints),
    ]
    return "\n".join(body) + "\n"


def _excerpt(span: Span, lines: list[str], label: str, margin: str) -> list[str]:
    line = lines[span.line - 1] if span.line <= len(lines) else ""
    if not line.strip():
        return []
    start = span.column - 1
    end = span.end_column - 1 if span.end_line == span.line else len(line)
    line, start, end = _window(line.rstrip(), start, end)
    before, marked = _columns(line[:start]), _columns(line[:end])
    before -= before == marked and before > 0  # what takes no column is shown by the character it stands on
    carets = "^" * max(1, marked - before)
    return [
        f"{margin} |",
        f"{span.line} | {_visible(line)}",
        f"{margin} | {' ' * before}{carets} {label}".rstrip(),
    ]


def _window(line: str, start: int, end: int) -> tuple[str, int, int]:
    """The part of an over-long line around what is marked, and where the mark is in it."""
    if len(line) <= MAX_LINE:
        return line, start, end
    first, last = max(0, start - MAX_LINE // 2), min(len(line), start + MAX_LINE // 2)
    head, tail = "..." if first else "", "..." if last < len(line) else ""
    shift = len(head) - first
    return f"{head}{line[first:last]}{tail}", start + shift, min(end, last) + shift


def _columns(text: str) -> int:
    """Terminal columns that `text` takes: tabs run to the next stop, wide characters take two, combining marks none."""
    columns = 0
    for character in text:
        columns += TAB_STOP - columns % TAB_STOP if character == "\t" else _width(character)
    return columns


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _visible(line: str) -> str:
    """The line as shown: tabs expanded, everything that cannot be printed replaced."""
    shown = ""
    for character in line:
        if character == "\t":
            shown += " " * (TAB_STOP - _columns(shown) % TAB_STOP)
        elif character == " " or character.isprintable() or not _width(character):
            shown += character if character.isprintable() else ""
        else:
            shown += "\N{REPLACEMENT CHARACTER}"
    return shown
