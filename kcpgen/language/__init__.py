"""The language: a spec's text in, a checked `kcpgen.spec.Spec` out.

    load(path) -> Spec      parse(text, path) -> Spec      format_spec(spec) -> str

All raise `kcpgen.diagnostics.SpecError`, and nothing else, for whatever is wrong with a spec. Imports happen on the
first call: contracts such as `kcpgen.spec` import `kcpgen.language.syntax` and must not drag the parser in.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcpgen.spec import Spec

__all__ = ["format_spec", "load", "parse"]


def load(path: str | Path) -> Spec:
    """The spec in the file at `path`; spans show the path as given. Raises SpecError."""
    from kcpgen.language.source import read

    return parse(read(path), str(path))


def parse(text: str, path: str) -> Spec:
    """The spec written in `text`; `path` is what diagnostics show. Raises SpecError."""
    from kcpgen.language.check import check
    from kcpgen.language.lexer import end_of
    from kcpgen.language.parser import parse_statements
    from kcpgen.language.source import clean

    text = clean(text, path)
    return check(parse_statements(text, path), end_of(text, path), text, path)


def format_spec(spec: Spec) -> str:
    """The spec as canonical source; parsing it gives an equal spec, positions aside."""
    from kcpgen.language.format import format_spec

    return format_spec(spec)
