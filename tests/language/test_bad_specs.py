"""Every code has a bad spec, every bad spec its whole rendered text.

KCPGEN_UPDATE_GOLDEN=1 rewrites the texts, for review.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kcpgen.compiler import compile_spec
from kcpgen.derivation.faults import DERIVATION_CODES
from kcpgen.diagnostics import CODES, SpecError
from kcpgen.language.limits import MAX_BYTES
from kcpgen.plan_faults import PLAN_CODES

BAD_SPECS = Path(__file__).parent.parent / "bad_specs"
SPECS = sorted(path.stem for path in BAD_SPECS.glob("*.kcp"))


def rendered(path: str) -> str:
    with pytest.raises(SpecError) as rejected:
        compile_spec(Path(path), Path("generated"))
    return str(rejected.value)


def compare(name: str, text: str) -> None:
    golden = BAD_SPECS / f"{name}.txt"
    if os.environ.get("KCPGEN_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SPECS)
def test_rendered_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD_SPECS)
    compare(name, rendered(f"{name}.kcp"))


def test_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD_SPECS)
    compare("kcp001_missing_file", rendered("no_such_file.kcp"))


@pytest.mark.parametrize("path", ["a\nimport os\n#.kcp", "a\0.kcp", "a\u2028.kcp", "a\ud800.kcp"])
def test_path_that_no_comment_can_carry(path: str) -> None:
    assert rendered(path).startswith("error[KCP001]")


def test_directory(tmp_path: Path) -> None:
    assert rendered(str(tmp_path)).startswith("error[KCP001]")


def test_huge_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("huge.kcp").write_text("# " + "x" * MAX_BYTES, encoding="utf-8")
    compare("kcp004_huge_file", rendered("huge.kcp"))


def test_every_code_has_a_bad_spec() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in BAD_SPECS.glob("*.txt"))
    shown = set(re.findall(r"^error\[(KCP\d+)\]", texts, flags=re.MULTILINE))
    assert shown == CODES.keys() | DERIVATION_CODES.keys() | PLAN_CODES.keys()


def test_every_text_has_its_spec() -> None:
    without_file = {"kcp001_missing_file", "kcp004_huge_file"}
    assert {path.stem for path in BAD_SPECS.glob("*.txt")} == {*SPECS, *without_file}


def test_registries_do_not_overlap() -> None:
    registries = (CODES, DERIVATION_CODES, PLAN_CODES)
    assert len({code for registry in registries for code in registry}) == sum(map(len, registries))
