"""docs/language.md: its example parses, its table has every code, its lists of names are the compiler's."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

from kcpgen.derivation.faults import DERIVATION_CODES
from kcpgen.diagnostics import CODES
from kcpgen.language import names, parse
from kcpgen.plan_faults import PLAN_CODES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "language.md").read_text(encoding="utf-8")


def test_example_is_a_spec() -> None:
    block = re.search(r"(?:^    .*\n|^\n)+", TEXT[TEXT.index("    # ") :], flags=re.MULTILINE)
    assert block
    assert parse(dedent(block.group()), "example.kcp").name == "kda"


def test_every_code_is_explained() -> None:
    rows = dict(re.findall(r"^\| (KCP\d+) \| (.*) \|$", TEXT, flags=re.MULTILINE))
    assert rows == CODES | DERIVATION_CODES | PLAN_CODES


def test_reserved_words_are_listed() -> None:
    assert f"`{' '.join(names.KEYWORDS)}`" in TEXT
    assert f"`{' '.join(names.FUNCTIONS)}`" in TEXT
    assert f"`{' '.join(names.PREDECLARED)}`" in TEXT
    assert f"`{' '.join(names.DIMENSIONS)}`" in TEXT
