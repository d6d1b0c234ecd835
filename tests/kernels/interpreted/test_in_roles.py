"""Serial kernels in roles give what the portable ones do, emulated, and keep sequences apart where they lie packed.

A sequence's last chunk may be shorter than others: its tiles, read where the inputs lie, end in rows of the sequence
behind it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kcpgen.runtime import hopper
from kcpgen.runtime.launch import Tiles
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import Inputs, make_inputs
from kcpgen.verify.op import load_op
from tests.conftest import ROOT
from tests.kernels import gluon_by_chunks
from tests.kernels.gluon_in_roles import launcher

GENERATED = ROOT / "generated"
OPS = sorted(path.parent.name for path in GENERATED.glob("*/scan_hopper.py"))
IN_PLACE = [name for name in OPS if "clear_behind" in (GENERATED / name / "scan_hopper.py").read_text(encoding="utf-8")]
SERIAL = ("scan", "reverse")
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


@contextmanager
def in_roles(name: str, sources: Mapping[str, Path] | None = None) -> Iterator[list[str]]:
    """Serial kernels of an op are emulated, from these files or else the generated ones; which of them are launched."""
    package = load_op(GENERATED / name).chunk.__module__.rpartition(".")[0]
    settled, launched = hopper.settled, []
    scan = (GENERATED / name / "scan_hopper.py").read_text(encoding="utf-8")
    solves = "prepared.inverse_0 is None" in scan  # and then `prepare` has left that to it

    def asked(tiles: Tiles, device: torch.device) -> Tiles:
        portable = settled(tiles, device)
        return replace(
            portable,
            prepare=replace(portable.prepare, in_flight=solves),
            scan=replace(portable.scan, roles=True),
            reverse=replace(portable.reverse, roles=True),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "settled", asked)
        if solves:
            prepare = gluon_by_chunks.launcher(GENERATED / name / "prepare_hopper.py")
            patch.setattr(import_module(f"{package}.prepare_hopper"), "prepare_kernel", prepare)
        for stem in SERIAL:
            file = (sources or {}).get(stem, GENERATED / name / f"{stem}_hopper.py")
            emulated = launcher(file)

            class Launched:
                def __getitem__(self, grid: tuple[int], stem: str = stem, emulated: Any = emulated) -> Any:
                    launched.append(stem)
                    return emulated[grid]

            patch.setattr(import_module(f"{package}.{stem}_hopper"), f"{stem}_kernel", Launched())
        yield launched


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("name", OPS)
def test_results_are_those_of_the_portable_kernels(name: str) -> None:
    inputs = make_inputs(load_op(GENERATED / name), case(), "cpu")
    expected = called(name, inputs, case())
    with in_roles(name) as launched:
        found = called(name, inputs, case())
    assert launched == ["scan", "reverse"]
    errors = {key: apart(found[key], x) for key, x in expected.items() if x.any()}
    assert {key: error for key, error in errors.items() if not error < CLOSE} == {}


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
    with in_roles(name):
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
    with in_roles(name, sources):
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
    assert text.count(line) == 1
    source = tmp_path / "reverse_hopper.py"
    source.write_text(text.replace(line, "\n"), encoding="utf-8")
    with pytest.raises(AssertionError, match=said):
        differences("gdn", {"reverse": source})
