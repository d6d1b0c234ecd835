"""Tiles that were tuned for a GPU: found by its name and a call's structure, valid before they are shipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kcpgen.runtime import tuned, tuned_table
from kcpgen.runtime.launch import choose_tiles
from kcpgen.runtime.tuned import looked_up_by, on_device, shipped, tiles_for
from kcpgen.runtime.tuned_table import Form, TableError, as_text, overridden, parse
from kcpgen.verify.cases import Case
from kcpgen.verify.op import load_op
from kcpgen.verify.resources import resources, tuned_cases

ROOT = Path(__file__).resolve().parent.parent.parent
BF16, CPU, GPU = torch.bfloat16, torch.device("cpu"), torch.device("cuda", 0)
FORM = Form(decay="scalar", terms=1, erases=1)
SIZES = {"key_width": 128, "value_width": 128, "scratch_bits": 16, "chunk": 64}
STRUCTURE = {"decay": "scalar", "terms": 1, "erases": 1, "whole_value_axis": False, **SIZES}
ABOUT = {"date": "2026-11-29", "versions": {}, "shape": "1x8192x32", "ms_before": 0.4, "ms_after": 0.3}
ENTRY: dict[str, Any] = {
    "structure": STRUCTURE,
    "tiles": {"gradients": {"key_block": 32, "registers": None}, "scan": {"stages": 2}},
    "measured": {"gradients": ABOUT},
}


def written(*entries: dict[str, Any]) -> str:
    return json.dumps({"format": 1, "devices": {"A GPU": list(entries)}})


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A table that knows "A GPU" in the place of what is shipped; append the name of the GPU that is there."""
    (tmp_path / "tuned.json").write_text(written(ENTRY), encoding="utf-8")
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "tuned.json")
    names: list[str] = []
    monkeypatch.setattr(tuned, "_name", lambda device: names[-1])
    for cached in (tuned.shipped, tuned._tiles):
        cached.cache_clear()
    yield names
    for cached in (tuned.shipped, tuned._tiles):
        cached.cache_clear()


def plain(form: Form = FORM, keys: int = 128, dtype: torch.dtype = BF16) -> Any:
    return choose_tiles(keys=keys, values=128, decay=form.decay, terms=form.terms, dtype=dtype)


def test_a_known_device_has_what_was_tuned_for_it(named: list[str]) -> None:
    named.append("A GPU")
    found = tiles_for(FORM, 128, 128, BF16, GPU)
    assert (found.gradients.key_block, found.gradients.registers, found.scan.stages) == (32, None, 2)
    assert found == overridden(plain(), ENTRY["tiles"])
    assert (found.prepare, found.reverse) == (plain().prepare, plain().reverse)
    assert tiles_for(FORM, 128, 128, BF16, GPU) is found
    assert tiles_for(FORM, 100, 120, BF16, GPU) == found  # padded widths count


def test_another_gpu_and_a_cpu_have_the_portable_choice(named: list[str]) -> None:
    named.append("Another GPU")
    assert tiles_for(FORM, 128, 128, BF16, GPU) == plain()
    named.append("A GPU")  # never asked for
    assert tiles_for(FORM, 128, 128, BF16, CPU) == plain()


@pytest.mark.parametrize(
    ("form", "keys", "dtype"),
    [
        (Form(decay="none", terms=1, erases=1), 128, BF16),
        (Form(decay="scalar", terms=1, erases=0), 128, BF16),
        (FORM, 64, BF16),
        (FORM, 128, torch.float32),
    ],
)
def test_another_structure_has_the_portable_choice(named: list[str], form: Form, keys: int, dtype: torch.dtype) -> None:
    named.append("A GPU")
    assert tiles_for(form, keys, 128, dtype, GPU) == plain(form, keys, dtype)


def test_ops_share_an_entry_by_their_structure_not_their_name() -> None:
    forms = {name: load_op(ROOT / "generated" / name).form for name in ("gdn", "comba", "simple_gla", "dplr")}
    assert forms["gdn"] == forms["comba"] == FORM
    assert forms["simple_gla"] == Form(decay="scalar", terms=1, erases=0)
    assert forms["dplr"] == Form(decay="vector", terms=2, erases=1)


def test_a_check_can_ask_for_the_tiles_of_a_device_that_is_not_there(named: list[str]) -> None:
    with looked_up_by(on_device("A GPU")):
        assert tiles_for(FORM, 128, 128, BF16, CPU).scan.stages == 2
    assert tiles_for(FORM, 128, 128, BF16, CPU) == plain()


def test_what_is_shipped_is_valid_and_in_its_order() -> None:
    assert as_text(shipped()) == tuned.SHIPPED.read_text(encoding="utf-8")


def test_a_table_is_read_as_it_was_written() -> None:
    table = parse(written(ENTRY))
    assert parse(as_text(table)) == table


def tiles(group: str, **fields: Any) -> dict[str, Any]:
    return {**ENTRY, "tiles": {group: fields}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ('{"format": 2, "devices": {}}', 'not {"format": 1'),
        (written(tiles("prepare", colour=1)), "entry 0: prepare.colour is no field to be tuned; allowed: key_block"),
        (written(tiles("prepare", key_width=64)), "prepare.key_width is no field to be tuned"),
        (written(tiles("chunk", chunk=64)), "'chunk' is no kernel group; allowed: prepare, scan"),
        (written(tiles("prepare", key_block=48)), "prepare.key_block is 48; allowed: a power of two"),
        (written(tiles("prepare", key_block=256)), "prepare.key_block is 256; allowed: at most 128"),
        (written(tiles("scan", warps=True)), "scan.warps is True; allowed: an integer from 1 to 16"),
        (written(tiles("prepare", registers=7)), "an integer from 24 to 255 or null"),
        (written({**ENTRY, "structure": {**STRUCTURE, "chunk": 32}}), "no call has this structure"),
        (written({**ENTRY, "structure": {**STRUCTURE, "decay": "slow"}}), "decay 'slow'"),
        (written({**ENTRY, "structure": SIZES}), "not an entry: KeyError: 'decay'"),
        (written({**ENTRY, "colour": 1}), "not an entry: TypeError"),
        (written({**ENTRY, "measured": {}}), "nothing says how"),
        (written({**ENTRY, "measured": {"scan": {"date": ""}}}), "measured.scan lacks versions, shape, ms_before"),
        (written(ENTRY, ENTRY), "entry 1: the structure has an entry already"),
    ],
)
def test_a_wrong_table_is_named(text: str, said: str) -> None:
    with pytest.raises(TableError) as raised:
        parse(text)
    assert said in str(raised.value)


def test_an_axis_that_is_summed_over_stays_whole() -> None:
    structure, _ = tuned_table.chosen(Form(decay="none", terms=1, erases=0, whole_value_axis=True), 64, 128, BF16)
    assert list(tuned_table.faults(structure, {"gradients": {"score_block": 64}})) == [
        "gradients.score_block is 64; allowed: 128, since something is summed over the value axis"
    ]


def test_what_was_tuned_is_what_is_compiled_and_fits() -> None:
    op = load_op(ROOT / "generated" / "simple_gla")
    case = Case(label="", backend="triton", dtype="bfloat16", tokens=64, key_width=32, value_width=64)
    with looked_up_by(lambda structure: {"scan": {"warps": 2}, "gradients": {"key_block": 16}}):
        found = resources(op, case)
    assert all(kernel.fits for kernel in found)
    assert {kernel.warps for kernel in found if kernel.kernel == "scan_kernel"} == {2}


def test_what_is_shipped_fits() -> None:
    """One entry, with one op; `make sm90` compiles all entries with every op that has their structure."""
    ops = [load_op(path.parent) for path in sorted((ROOT / "generated").glob("*/autograd.py"))]
    entries = [(op, *found) for op in ops for found in tuned_cases(op)]
    for tuned_op, device, case in entries[:1]:
        with looked_up_by(on_device(device)):
            assert all(kernel.fits for kernel in resources(tuned_op, replace(case, tokens=128, segments=1)))


def test_the_devices_of_the_table_are_compiled_for(named: list[str]) -> None:
    assert [(device, case.key_width) for device, case in tuned_cases(load_op(ROOT / "generated" / "gdn"))] == [
        ("A GPU", 128)
    ]
    assert list(tuned_cases(load_op(ROOT / "generated" / "kda"))) == []
