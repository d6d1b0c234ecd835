"""What a forward leaves for its backward: all states or few of them, and nothing that autograd does not hold."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from kcpgen.runtime.kept import replayed_states
from kcpgen.runtime.layout import CHECKPOINT
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate, relative_rms
from kcpgen.verify.inputs import make_inputs
from kcpgen.verify.op import Op, load_op

GENERATED = Path(__file__).resolve().parents[3] / "generated"
OPS = sorted(path.parent.name for path in GENERATED.glob("*/autograd.py"))
CHUNKS = CHECKPOINT + 1


def case_of(tokens: int = 64 * CHUNKS - 7, **more: Any) -> Case:
    """Of more chunks than a run has, of 32 tokens or 64."""
    sizes = {"heads": 1, "value_heads": 1, "key_width": 16, "value_width": 16}
    return Case(label="", backend="triton", dtype="float32", tokens=tokens, gates="slow", **sizes, **more)


def call_of(op: Op, case: Case) -> Any:
    """A call on the case's leaves, and these."""
    inputs = make_inputs(op, case, "cpu")
    names = [*inputs.tokens]

    def call(*tensors: Tensor) -> Tensor:
        o: Tensor = op.chunk(**dict(zip(names, tensors, strict=True)), **inputs.params, backend="triton")[0]
        return o

    return call, [*inputs.tokens.values()]


@pytest.mark.parametrize("name", ["gdn", "gla", "dplr"])
def test_replayed_states_are_those_that_were_kept(name: str) -> None:
    """The backward runs where nobody asks for anything."""
    op = load_op(GENERATED / name)
    kept, replayed = (case_of(replayed=choice) for choice in (False, True))
    inputs = make_inputs(op, kept, "cpu")
    one, other = (evaluate(op.chunk, inputs, case, backend="triton") for case in (kept, replayed))
    assert torch.equal(one["o"], other["o"])
    for which, x in one.items():
        assert relative_rms(other[which], x.double()) < 1e-5, which


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_who_asks_for_it_saves_few_states(name: str) -> None:
    op = load_op(GENERATED / name)
    call, leaves = call_of(op, case_of())
    saved: dict[bool, list[Tensor]] = {False: [], True: []}
    for choice, held in saved.items():
        with saved_tensors_hooks(lambda x, held=held: (held.append(x), x)[1], lambda x: x), replayed_states(choice):
            call(*leaves)
    shapes = {choice: [tuple(x.shape) for x in held] for choice, held in saved.items()}
    (chunks,) = {shape[0] for shape in shapes[False] if len(shape) == 4 and shape[0] >= CHUNKS}
    few = -(-chunks // CHECKPOINT)
    assert [shape for shape in shapes[True] if shape[0] == few]
    assert not [shape for shape in shapes[False] if shape[0] == few]


@pytest.mark.parametrize("name", OPS)
def test_a_checkpoint_without_reentry_keeps_nothing_of_a_call(name: str) -> None:
    """Scratch that the autograd node itself held would stay, for every layer, until the backward."""
    op = load_op(GENERATED / name)
    call, leaves = call_of(op, case_of(tokens=70))
    call(*leaves)  # tables and caches are made once
    gc.collect()
    before = {id(x) for x in gc.get_objects() if type(x) is Tensor}
    o = checkpoint(call, *leaves, use_reentrant=False, preserve_rng_state=False)
    gc.collect()
    left = [tuple(x.shape) for x in gc.get_objects() if type(x) is Tensor and id(x) not in before and x is not o]
    assert left == []
    plain = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    assert all(map(torch.equal, torch.autograd.grad(o.square().sum(), leaves), plain))


def test_a_checkpoint_recomputes_in_another_thread() -> None:
    """As autograd's threads of devices do: few states are saved there too."""
    call, leaves = call_of(load_op(GENERATED / "gdn"), case_of(tokens=70))
    plain = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    with replayed_states(), ThreadPoolExecutor(1) as other:
        o = checkpoint(call, *leaves, use_reentrant=False, preserve_rng_state=False)
        found = other.submit(torch.autograd.grad, o.square().sum(), leaves).result()
    assert all(relative_rms(a, b.double()) < 1e-5 for a, b in zip(found, plain, strict=True))


def test_hooks_may_put_what_is_saved_elsewhere() -> None:
    """As offloading does: what was saved is gone by the time of the backward."""
    call, leaves = call_of(load_op(GENERATED / "gdn"), case_of(tokens=70))
    scratch: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        if not any(x is leaf for leaf in leaves):
            scratch.append(x)
        return x.detach().clone()

    with saved_tensors_hooks(pack, lambda x: x):
        o = call(*leaves)
    plain = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    assert len(scratch) > 3
    for x in scratch:
        x.detach().fill_(float("nan"))
    assert all(map(torch.equal, torch.autograd.grad(o.square().sum(), leaves), plain))
