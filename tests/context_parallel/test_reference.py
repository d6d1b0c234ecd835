"""Inputs and references of the check at full size, at sizes that a CPU gets through."""

from __future__ import annotations

import math

import pytest
import torch
from cp_rows import OPS, Spread, on_ranks, op, row

from kcpgen.simulate.call import MEMORIES, ordinary_memory
from kcpgen.simulate.merges import observed_merges
from kcpgen.simulate.reference import _in_float64, _in_segments, exact
from kcpgen.verify.compare import evaluate, relative_rms


@pytest.mark.parametrize("name", OPS)
def test_the_chunked_reference_is_the_recurrence(name: str) -> None:
    case = row((0, 50, 37, 0), dtype="float32")
    inputs = MEMORIES["ordinary"](op(name), case, "cpu")
    naive, eager = (exact(op(name), case, inputs, reference) for reference in ("naive", "eager"))
    assert all(x.dtype == torch.float64 for x in eager.values())
    assert set(eager) == set(naive)
    assert max(relative_rms(eager[n], x) for n, x in naive.items()) < 1e-10


@pytest.mark.parametrize("changes", [{}, {"initial_state": False}, {"loss": "output"}])
def test_segments_change_nothing(changes: dict[str, object]) -> None:
    case = row((0, 50, 37, 0), **changes)
    inputs = _in_float64(ordinary_memory(op("kda"), case, "cpu"))
    whole = evaluate(op("kda").naive, inputs, case)
    parts = evaluate(_in_segments(op("kda"), segment=16), inputs, case)
    assert max(relative_rms(parts[n], x) for n, x in whole.items()) < 1e-10


@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_ordinary_memory_halves_in_a_few_tokens_on_one_head_and_in_hundreds_on_another(name: str) -> None:
    case = row((4096,), heads=3, value_heads=3)
    inputs = ordinary_memory(op(name), case, "cpu")
    (decay,) = (x for n, x in inputs.tokens.items() if n in op(name).description.log_decays)
    axes = [axis for axis in range(decay.ndim) if axis != 2]
    half_lives = -math.log(2) / decay.detach().mean(dim=axes)
    assert torch.allclose(half_lives, half_lives.new_tensor([4.0, 40.0, 400.0]), rtol=1e-6)
    assert decay.max() <= 0


def test_merges_are_observed_once_for_each_state_that_crosses() -> None:
    case = row((70, 34))
    with observed_merges() as merged:
        on_ranks(op("kda"), case, ordinary_memory(op("kda"), case, "cpu"), Spread(ranks=4))
    forward = {m.rank for m in merged if not m.backward}
    backward = {m.rank for m in merged if m.backward}
    assert (forward, backward, len(merged)) == ({1, 2, 3}, {0, 1, 2}, 6)
    assert all(m.from_fold < 1e-14 for m in merged)
