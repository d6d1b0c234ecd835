"""Vectors that serial kernels read where the inputs lie, and memory that the solve borrows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kcpgen.runtime import chunk_op
from kcpgen.runtime.launch import readable_in_place
from kcpgen.runtime.layout import ChunkLayout
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import make_inputs
from kcpgen.verify.op import Op, load_op

GENERATED = Path(__file__).resolve().parents[3] / "generated"
SIZES = {"heads": 1, "value_heads": 2, "key_width": 16, "value_width": 64}


def decide(op: Op, monkeypatch: pytest.MonkeyPatch, answer: bool | None = None) -> list[bool]:
    """What an op decides from now on, or has to take for an answer."""
    decided: list[bool] = []

    def readable(*arguments: Any) -> bool:
        decided.append(readable_in_place(*arguments) if answer is None else answer)
        return decided[-1]

    prepare = import_module(f"{op.chunk.__module__.rpartition('.')[0]}.prepare")
    monkeypatch.setattr(prepare, "readable_in_place", readable)
    return decided


@pytest.mark.parametrize("name", ["gdn", "simple_gla", "comba"])
def test_reading_in_place_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = load_op(GENERATED / name)
    case = Case(label="", backend="triton", dtype="bfloat16", batch=2, tokens=70, **SIZES)
    inputs = make_inputs(op, case, "cpu")
    decided = decide(op, monkeypatch)
    found = evaluate(op.chunk, inputs, case, backend="triton")
    found = {name: x.clone() for name, x in found.items()}
    assert decided
    assert all(decided)
    decide(op, monkeypatch, answer=False)
    expected = evaluate(op.chunk, inputs, case, backend="triton")
    assert [name for name, x in expected.items() if not torch.equal(found[name], x)] == []


@pytest.mark.parametrize(
    ("name", "border"),
    [("gdn", 64), ("gdn", 100), *((n, 40) for n in ("gdn", "delta_rule", "simple_gla", "comba", "kda"))],
)
def test_what_is_not_finite_stays_in_its_sequence(name: str, border: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last chunk that is shorter than others reaches into the next sequence."""
    op = load_op(GENERATED / name)
    tokens = border + 30
    case = Case(label="", backend="triton", dtype="bfloat16", tokens=tokens, offsets=(0, border, tokens), **SIZES)
    inputs = make_inputs(op, case, "cpu")
    decided = decide(op, monkeypatch)
    before = {name: x.clone() for name, x in evaluate(op.chunk, inputs, case, backend="triton").items()}
    for x in inputs.tokens.values():
        x.data[:, border:] = math.nan
    after = evaluate(op.chunk, inputs, case, backend="triton")
    assert set(decided) == {True}
    assert torch.equal(after["o"][:, :border], before["o"][:, :border])
    assert torch.equal(after["final_state"][0], before["final_state"][0])
    assert all(torch.equal(after[f"d{name}"][:, :border], before[f"d{name}"][:, :border]) for name in inputs.tokens)
    assert after["o"][:, border:].isnan().all()


class Unmasked:
    """A kernel that takes what follows a sequence in its last tile for zeros."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *operands, **sizes: self.kernel[grid](*operands, **(sizes | {"APART": True}))


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [(None, ()), ("scan", ("final_state",)), ("reverse", ("dinitial_state",))],
)
def test_a_serial_kernel_that_does_not_mask_is_noticed(
    kernel: str | None, wrong: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = load_op(GENERATED / "gdn")
    case = Case(label="", backend="triton", dtype="bfloat16", tokens=130, offsets=(0, 100, 130), **SIZES)
    inputs = make_inputs(op, case, "cpu")
    for x in inputs.tokens.values():
        x.data[:, 100:] = math.nan
    if kernel:
        module = import_module(f"{op.chunk.__module__.rpartition('.')[0]}.{kernel}")
        monkeypatch.setattr(module, f"{kernel}_kernel", Unmasked(getattr(module, f"{kernel}_kernel")))
    found = evaluate(op.chunk, inputs, case, backend="triton")
    firsts = {name: x[:1] if "state" in name else x[:, :100] for name, x in found.items()}
    spoilt = {name for name, x in firsts.items() if not x.isfinite().all()}
    assert spoilt == set(wrong) if kernel is None else spoilt >= set(wrong)


@pytest.mark.parametrize("mask", [True, False])
def test_m_is_of_one_sequence(mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    op = load_op(GENERATED / "gdn")
    case = Case(label="", backend="triton", dtype="bfloat16", tokens=130, offsets=(0, 100, 130), **SIZES)
    inputs = make_inputs(op, case, "cpu")
    scan, found = chunk_op.Forward.scan, []

    def with_m(self: chunk_op.Forward, layout: ChunkLayout, *states: Any) -> None:
        scan(self, layout, *states)
        seen = layout if mask else replace(layout, apart=True)
        found.append(torch.empty(2, self.heads, self.keys, self.keys))
        assert self._run.kernels.transitions is not None
        self._run.kernels.transitions(self.prepared, seen, self._run.tiles.scan, found[-1])

    monkeypatch.setattr(chunk_op.Forward, "scan", with_m)
    for _ in range(2):
        evaluate(op.chunk, inputs, case, backend="triton")
        for x in inputs.tokens.values():
            x.data[:, 100:] = math.nan
    before, after = found
    assert torch.equal(after[0], before[0]) == mask


@pytest.mark.parametrize("name", ["gdn", "gla", "simple_gla", "dplr"])
def test_a_forward_is_the_same_without_a_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The solve then happens in the memory of what is made from it, and what is written as it is stays where it is."""
    op = load_op(GENERATED / name)
    case = Case(
        label="", backend="triton", dtype="bfloat16", tokens=70, heads=1, value_heads=1, key_width=128, value_width=64
    )
    inputs = make_inputs(op, case, "cpu")

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return op.chunk(**inputs.tokens, initial_state=inputs.initial_state, output_final_state=True, backend="triton")

    decided = decide(op, monkeypatch)
    with torch.no_grad():
        alone = forward()
    assert decided  # something of each of them lies where it can be read
    assert all(decided)
    assert all(map(torch.equal, alone, forward()))


def test_a_backward_reads_states_that_autograd_gives_back() -> None:
    """A hook may lay a state out anew, as it may an input."""
    op = load_op(GENERATED / "gdn")
    case = Case(label="", backend="triton", dtype="float32", tokens=33, **SIZES)
    inputs = make_inputs(op, case, "cpu")
    initial = inputs.initial_state
    assert initial is not None
    leaves = [*inputs.tokens.values(), initial]

    def gradients(kept_turned: bool) -> tuple[torch.Tensor, ...]:
        def turned(x: torch.Tensor) -> torch.Tensor:
            return x.mT.contiguous().mT if kept_turned and x.shape == initial.shape else x

        with torch.autograd.graph.saved_tensors_hooks(turned, lambda x: x):
            o, _ = op.chunk(**inputs.tokens, initial_state=initial, backend="triton")
        return torch.autograd.grad(o, leaves, inputs.d_output)

    assert all(map(torch.equal, gradients(True), gradients(False)))


@pytest.mark.parametrize("name", ["gdn", "delta_rule"])
@pytest.mark.parametrize("gap", [0, 3])
def test_a_backward_reads_what_autograd_gives_back(name: str, gap: int) -> None:
    """A hook may keep an input elsewhere, and lay it out anew; its own memory is then the caller's to write over."""
    op = load_op(GENERATED / name)
    case = Case(label="", backend="triton", dtype="bfloat16", tokens=70, **SIZES)
    inputs = make_inputs(op, case, "cpu")
    leaves = list(inputs.tokens.values())

    def gradients(kept_elsewhere: bool) -> tuple[torch.Tensor, ...]:
        tokens = {name: x * 1 for name, x in inputs.tokens.items()}

        def elsewhere(x: torch.Tensor) -> torch.Tensor:
            room = x.new_empty(*x.shape[:-1], x.shape[-1] + gap)[..., : x.shape[-1]]
            return room.copy_(x)

        with torch.autograd.graph.saved_tensors_hooks(elsewhere if kept_elsewhere else lambda x: x, lambda x: x):
            o, _ = op.chunk(**tokens, backend="triton")
        if kept_elsewhere:
            with torch.no_grad():
                for x in tokens.values():
                    x.zero_()
        return torch.autograd.grad(o, leaves, inputs.d_output)

    assert all(map(torch.equal, gradients(True), gradients(False)))
