"""What `kcpgen derive` prints: complete, the same in every run, and honest about a proof that fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_specs import examples

from kcpgen.derivation import derive_chunk_form, derive_normal_form
from kcpgen.derivation.chunk_form import ChunkForm, Monomial
from kcpgen.derivation.proof import Proof, prove
from kcpgen.derivation.show import PARTS, to_json, to_latex, to_text

EXAMPLES = examples()
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "derivation.md"


def shown(write: Callable[[ChunkForm, Proof], str], form: ChunkForm) -> str:
    return write(form, prove(form))


def form_of(name: str) -> ChunkForm:
    return derive_chunk_form(derive_normal_form(EXAMPLES[name]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_names_every_equation(name: str) -> None:
    form = form_of(name)
    text = to_text(form, prove(form))
    assert max(map(len, text.splitlines())) <= 140
    for part, heading in PARTS:
        section = text.split(f"\n{heading}\n")[1].split("\n\n")[0]
        assert [line.split(" = ")[0].strip() for line in section.splitlines()] == [
            str(equation.target) for equation in getattr(form, part)
        ]
    assert "exactly" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("gla", ["0 erasing, 1 pure writes", "one per key channel", "none, nothing is erased", "diagonal, K numbers"]),
        (
            "gdn",
            ["1 erasing, 0 pure writes", "one per head", "C x C a chunk", "dense", "w_0 and a_0 along k", "after its"],
        ),
        ("comba", ["reads the state before its decay", "shared key vectors: none"]),
        ("delta_rule", ["decay: none", "no decay to read through", "decay_out = I"]),
        ("three_terms", ["2 erasing, 1 pure writes", "2C x 2C a chunk", "erases only", "writes only"]),
    ],
)
def test_structure_in_words(name: str, facts: list[str]) -> None:
    text = shown(to_text, form_of(name))
    assert [fact for fact in facts if fact not in text] == []


def test_json_holds_every_stage() -> None:
    document = json.loads(shown(to_json, form_of("dplr")))
    assert document["normal_form"]["terms"][1] == {
        "write": "b",
        "value": "0",
        "erase": "a",
        "erase_reads_decayed": False,
    }
    assert document["equations"]["gradients"][1] == {
        "target": "dV[0]",
        "mask": "",
        "terms": [{"sign": 1, "factors": ["dU[0]"]}, {"sign": 1, "factors": ["L[1,0]^T", "dR[1]"]}],
    }
    assert document["proof"]["holds"] is True


@pytest.mark.parametrize("name", EXAMPLES)
def test_latex_is_balanced(name: str) -> None:
    text = shown(to_latex, form_of(name))
    assert text.count(r"\begin{align*}") == text.count(r"\end{align*}") == len(PARTS) + 3
    assert text.count(r"\left") == text.count(r"\right")
    assert text.count("{") == text.count("}")
    assert not re.search(r"(?<!\\)_(?![\w{])|[⊙β]", text)


def test_a_failed_proof_says_what_failed() -> None:
    form = form_of("kda")
    M, *rest = form.summary
    terms = (M.terms[0], Monomial(sign=-1, factors=M.terms[1].factors))
    wrong = replace(form, summary=(replace(M, terms=terms), *rest))
    text = shown(to_text, wrong)
    assert "M   " in text
    assert "decay_out - w_out[0]^T W[0]" in text
    assert text.splitlines()[-1].strip() == "FAILED for 3 tokens, K = 2, V = 1: M S + S_ext, dS"
    assert json.loads(shown(to_json, wrong))["proof"]["holds"] is False


PRINT_ALL = """
import hashlib, sys
sys.path.insert(0, "tests/derivation")
from made_specs import examples
from kcpgen.derivation import derive_chunk_form, derive_normal_form
from kcpgen.derivation.proof import prove
from kcpgen.derivation.show import to_json, to_latex, to_text
for name, spec in examples().items():
    form = derive_chunk_form(derive_normal_form(spec))
    proof = prove(form)
    text = "".join(write(form, proof) for write in (to_text, to_latex, to_json))
    print(name, hashlib.sha256(text.encode()).hexdigest())
"""


def test_the_same_bytes_under_every_hash_seed() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", PRINT_ALL],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "31337")
    ]
    assert len(runs[0].splitlines()) == len(EXAMPLES)
    assert len(set(runs)) == 1


def test_the_documentation_shows_what_is_printed() -> None:
    """Every output block of docs/derivation.md is part of what `kcpgen derive specs/kda.kcp` prints."""
    text = shown(to_text, form_of("kda"))
    blocks = re.findall(r"```text\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) > 5
    assert [block for block in blocks if block not in text] == []
