"""A sequence in stretches of chunks, whose chunk-parallel kernels run beside serial ones, computes the same numbers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kcpgen.runtime import chunk_op, stretches
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import make_inputs
from kcpgen.verify.op import load_op
from tests.conftest import ROOT, SPECS

CASE = Case(label="stretches", backend="triton", tokens=1100, heads=1, value_heads=1, key_width=16, value_width=64)


@pytest.mark.parametrize("name", [path.stem for path in SPECS])
def test_stretches_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = load_op(ROOT / "generated" / name)
    inputs = make_inputs(op, CASE, "cpu")
    whole = evaluate(op.chunk, inputs, CASE, backend="triton")
    launched = []

    def cut(chunks: tuple[int, ...], *_: int) -> tuple[range, ...]:
        launched.append(chunks)
        return (range(16), range(16, chunks[0]))

    monkeypatch.setattr(stretches, "side_by_side", cut)
    found = evaluate(op.chunk, inputs, CASE, backend="triton")
    assert launched
    for tensor in whole:
        assert torch.equal(found[tensor], whole[tensor]), tensor


def test_what_a_backward_works_with_goes_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when Python next looks for cycles: it is most of a step's memory."""
    op = load_op(ROOT / "generated" / "simple_gla")
    made = []
    enter = chunk_op.Backward.__enter__

    def entered(self: chunk_op.Backward) -> chunk_op.Backward:
        made.append(weakref.ref(self))
        return enter(self)

    monkeypatch.setattr(chunk_op.Backward, "__enter__", entered)
    monkeypatch.setattr(stretches, "side_by_side", lambda chunks, *_: (range(16), range(16, chunks[0])))
    gc.disable()
    try:
        evaluate(op.chunk, make_inputs(op, CASE, "cpu"), CASE, backend="triton")
        assert [it() for it in made] == [None]
    finally:
        gc.enable()
