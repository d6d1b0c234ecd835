"""Vectors that serial kernels read where the inputs lie, and memory that the solve borrows."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kcpgen.runtime.launch import readable_in_place
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


@pytest.mark.parametrize(("border", "in_place"), [(64, True), (40, False)])
def test_what_is_not_finite_stays_in_its_sequence(border: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last chunk that is shorter than others would reach into the next sequence."""
    op = load_op(GENERATED / "gdn")
    case = Case(label="", backend="triton", dtype="bfloat16", tokens=70, offsets=(0, border, 70), **SIZES)
    inputs = make_inputs(op, case, "cpu")
    decided = decide(op, monkeypatch)
    before = {name: x.clone() for name, x in evaluate(op.chunk, inputs, case, backend="triton").items()}
    for x in inputs.tokens.values():
        x.data[:, border:] = math.nan
    after = evaluate(op.chunk, inputs, case, backend="triton")
    assert set(decided) == {in_place}
    assert torch.equal(after["o"][:, :border], before["o"][:, :border])
    assert torch.equal(after["final_state"][0], before["final_state"][0])
    assert all(torch.equal(after[f"d{name}"][:, :border], before[f"d{name}"][:, :border]) for name in inputs.tokens)
    assert after["o"][:, border:].isnan().all()


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
