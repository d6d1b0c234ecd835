"""Serial kernels in roles give what the portable ones do, emulated, and keep sequences apart where they lie packed.

A sequence's last chunk may be shorter than others: its tiles, read where the inputs lie, end in rows of the sequence
behind it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kcpgen.runtime.split import forced_segments
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import compare, evaluate
from kcpgen.verify.inputs import Inputs, make_inputs
from kcpgen.verify.op import load_op
from tests.conftest import ROOT
from tests.kernels.serial_in_roles import SERIAL, in_roles, left_to_scans

GENERATED = ROOT / "generated"
OPS = sorted(path.parent.name for path in GENERATED.glob("*/scan_hopper.py"))
IN_PLACE = [name for name in OPS if "clear_behind" in (GENERATED / name / "scan_hopper.py").read_text(encoding="utf-8")]
BORDER = 70  # of two sequences; chunks have 64 tokens, or 32
CLOSE = 1e-2  # of results in 16 bits, whose parts are rounded where portable kernels round them


@cache
def case(tokens: int = BORDER + 12, border: int = BORDER) -> Case:
    return Case(
        label="in roles",
        backend="triton",
        dtype="bfloat16",
        tokens=tokens,
        heads=1,
        value_heads=2,
        key_width=64,
        value_width=64,
        offsets=(0, border, tokens) if border < tokens else (0, tokens),
        segments=1,
    )


def called(name: str, inputs: Inputs, given: Case) -> dict[str, Tensor]:
    found = evaluate(load_op(GENERATED / name).chunk, inputs, given, backend="triton")
    return {name: x.clone() for name, x in found.items()}


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("name", OPS)
def test_results_are_those_of_the_portable_kernels(name: str) -> None:
    inputs = make_inputs(load_op(GENERATED / name), case(), "cpu")
    expected = called(name, inputs, case())
    with in_roles(GENERATED / name) as launched:
        found = called(name, inputs, case())
    assert launched == ["scan", "reverse"]
    errors = {key: apart(found[key], x) for key, x in expected.items() if x.any()}
    assert {key: error for key, error in errors.items() if not error < CLOSE} == {}


LEFT_TO_SCANS = [name for name in OPS if left_to_scans(GENERATED / name)]
SOLVING = [n for n in LEFT_TO_SCANS if "inverse_0" in (GENERATED / n / "scan_hopper.py").read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", [name for name in LEFT_TO_SCANS if (GENERATED / name / "summary_hopper.py").exists()])
def test_so_they_are_in_segments_where_scans_solve_and_m_wants_w(name: str) -> None:
    given = replace(case(3 * 64, 3 * 64), segments=3, gates="slow")  # the middle one has M
    inputs = make_inputs(load_op(GENERATED / name), given, "cpu")
    expected = called(name, inputs, given)
    with in_roles(GENERATED / name) as launched:
        found = called(name, inputs, given)
    assert {*launched} == {"scan", "reverse", "summary"}
    errors = {key: apart(found[key], x) for key, x in expected.items() if x.any()}
    assert {key: error for key, error in errors.items() if not error < CLOSE} == {}


@pytest.mark.parametrize("name", SOLVING)
def test_keys_that_repeat_stay_within_the_bounds_of_verify(name: str) -> None:
    """Its own case, in which a token nearly reflects the state: sums of T's columns count, not T's numbers."""
    given = replace(case(200, 200), label="repeated keys", heads=2, keys="repeated", gates="zero", segments=None)
    with in_roles(GENERATED / name):
        found = compare(load_op(GENERATED / name), given, "cpu")
    assert not found.failure
    assert {x.tensor: (x.error, x.bound) for x in found.figures if not x.ok} == {}


@pytest.mark.parametrize("name", LEFT_TO_SCANS)
def test_scans_solve_only_where_prepare_has_left_it_to_them(name: str) -> None:
    """Keys in fp32 beside values in bf16 are the portable kernel's: whatever follows is handed T, dU and its rest."""
    inputs = make_inputs(load_op(GENERATED / name), case(), "cpu")
    whole = {key: x.detach().float().requires_grad_() if key in "qk" else x for key, x in inputs.tokens.items()}
    inputs = replace(inputs, tokens=whole)
    expected = called(name, inputs, case())
    solving = "inverse_0" in (GENERATED / name / "scan_hopper.py").read_text(encoding="utf-8")
    with in_roles(GENERATED / name, gradients=solving) as launched:
        found = called(name, inputs, case())
    assert launched == ([] if solving else ["reverse"])  # which reads A from memory, whoever has made it
    errors = {key: apart(found[key], x) for key, x in expected.items() if x.any()}
    assert {key: error for key, error in errors.items() if not error <= (0 if solving else CLOSE)} == {}


@pytest.mark.parametrize("training", [True, False])
def test_W_is_made_of_segments_alone_that_M_is_wanted_of(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one in the middle, of the head whose gates remember. What is not made is NaN here, for nobody."""
    given = replace(case(6 * 64, 6 * 64), segments=3)
    inputs = make_inputs(load_op(GENERATED / "gdn"), given, "cpu")
    with torch.no_grad():
        inputs.tokens["g"][..., 0] = -1.0
        inputs.tokens["g"][..., 1] = -0.01
    call = called if training else in_inference
    expected = call("gdn", inputs, given)
    made: list[Tensor] = []
    with in_roles(GENERATED / "gdn") as launched:
        module = import_module(f"{load_op(GENERATED / 'gdn').chunk.__module__.rpartition('.')[0]}.prepare_hopper")
        prepare = module.prepare_on_hopper

        def prepared(*operands: Any, **keywords: Any) -> bool:
            made.append(next(x.W_0.fill_(math.nan) for x in operands if hasattr(x, "W_0")))
            return bool(prepare(*operands, **keywords))

        monkeypatch.setattr(module, "prepare_on_hopper", prepared)
        found = call("gdn", inputs, given)
    assert {*launched} == {"scan", "summary", *(["reverse"] if training else [])}
    errors = {key: apart(found[key], x) for key, x in expected.items() if x.any()}
    assert {key: error for key, error in errors.items() if not error < CLOSE} == {}
    (W,) = made
    there = [[bool(x.isfinite().all()) for x in chunk] for chunk in W]
    assert there == [[False, chunk in (2, 3)] for chunk in range(6)]


def in_inference(name: str, inputs: Inputs, given: Case) -> dict[str, Tensor]:
    with forced_segments(given.segments):
        return inferred(name, inputs, given)


def behind(x: Tensor, border: int) -> Tensor:
    x = x.detach().clone()
    x[:, border:] = math.nan
    return x.requires_grad_()


@cache
def alone(name: str) -> dict[str, Tensor]:
    """What comes of the first sequence."""
    whole = make_inputs(load_op(GENERATED / name), case(), "cpu")
    first = replace(
        whole,
        tokens={key: x.detach()[:, :BORDER].clone().requires_grad_() for key, x in whole.tokens.items()},
        initial_state=whole.initial_state.detach()[:1].clone().requires_grad_(),
        d_output=whole.d_output[:, :BORDER],
        d_state=whole.d_state[:1],
    )
    with in_roles(GENERATED / name):
        return called(name, first, case(BORDER)) | inferred(name, first, case(BORDER))


def inferred(name: str, inputs: Inputs, given: Case) -> dict[str, Tensor]:
    """The output without gradients to follow: what is written as it is then stays where it is."""
    offsets = torch.tensor(given.offsets)
    with torch.no_grad():
        o, _ = load_op(GENERATED / name).chunk(
            **inputs.tokens, **inputs.params, initial_state=inputs.initial_state, cu_seqlens=offsets, backend="triton"
        )
    return {"o alone": o.clone()}


def differences(name: str, sources: Mapping[str, Path] | None = None) -> list[str]:
    """Results of a sequence that are others with one of NaN behind it than they are alone."""
    whole = make_inputs(load_op(GENERATED / name), case(), "cpu")
    packed = replace(
        whole,
        tokens={key: behind(x, BORDER) for key, x in whole.tokens.items()},
        d_output=behind(whole.d_output, BORDER).detach(),
    )
    with in_roles(GENERATED / name, sources):
        found = called(name, packed, case()) | inferred(name, packed, case())
    expected = alone(name)
    of_tokens = ["o", "o alone", *(f"d{key}" for key in packed.tokens)]
    different = [key for key in of_tokens if not torch.equal(found[key][:, :BORDER], expected[key])]
    return different + [k for k in ("final_state", "dinitial_state") if not torch.equal(found[k][:1], expected[k])]


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_sequence_is_the_same_before_one_of_nan_as_alone(name: str) -> None:
    assert differences(name) == []


def cleared(path: Path) -> list[str]:
    return re.findall(r"clear_behind\((\w+)_tile, ", path.read_text(encoding="utf-8"))


# Where nothing is erased, rows of dU come of write vectors and go nowhere else.
CLEARED = [
    (name, stem, tile)
    for name in ("gdn", "simple_gla", "kda")
    for stem in SERIAL
    for tile in cleared(GENERATED / name / f"{stem}_hopper.py")
    if (name, stem, tile) != ("simple_gla", "reverse", "write_0")
]


@pytest.mark.parametrize(("name", "stem", "tile"), CLEARED)
def test_a_tile_that_is_not_cleared_is_noticed(name: str, stem: str, tile: str, tmp_path: Path) -> None:
    text = (GENERATED / name / f"{stem}_hopper.py").read_text(encoding="utf-8")
    source = tmp_path / f"{stem}_hopper.py"
    source.write_text(re.sub(rf"clear_behind\({tile}_tile, .*", "pass", text), encoding="utf-8")
    assert differences(name, {stem: source}) != []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fence_async_shared()\n            gl.thread_barrier()\n", "not fenced"),
        ("            gl.thread_barrier()\n", "other threads may still write"),
    ],
)
def test_so_is_a_clearing_that_the_tensor_cores_need_not_see(line: str, said: str, tmp_path: Path) -> None:
    text = (GENERATED / "gdn" / "reverse_hopper.py").read_text(encoding="utf-8")
    assert text.count(line) == 2  # of 64 columns and more, and upright
    source = tmp_path / "reverse_hopper.py"
    source.write_text(text.replace(line, "\n"), encoding="utf-8")
    with pytest.raises(AssertionError, match=said):
        differences("gdn", {"reverse": source})
