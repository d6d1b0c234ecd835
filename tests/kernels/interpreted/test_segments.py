"""Sequences cut into segments on one device, against the same sequences whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kcpgen.compiler import compile_spec
from kcpgen.emit.package import write
from kcpgen.runtime import split_passes
from kcpgen.runtime.chains import products_of_decays
from kcpgen.runtime.layout import chunk_layout
from kcpgen.runtime.pieces import Pieces
from kcpgen.simulate.call import long_memory
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate, relative_rms
from kcpgen.verify.inputs import Inputs
from kcpgen.verify.op import Op, load_op

ROOT = Path(__file__).resolve().parent.parent.parent.parent
NOISE = 1e-6  # float32 differences of states that were added up in another order
SIZES: dict[str, Any] = {"heads": 1, "value_heads": 2, "key_width": 12, "value_width": 20}
PACKED = Case(label="packed", backend="triton", dtype="float32", tokens=211, offsets=(0, 0, 7, 171, 171, 211), **SIZES)
BATCH = Case(label="batch", backend="triton", dtype="float32", tokens=100, batch=2, **{**SIZES, "value_heads": 1})
NOTHING_DECAYS = """
op sums "Linear attention"
token q, k : [H, K]
token v : [HV, V]
state S : [HV, K, V]
S[t] = S[t-1] + k v^T
o[t] = scale S[t]^T q
"""


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def generated(name: str) -> Op:
    return load_op(ROOT / "generated" / name)


def outcomes(op: Op, inputs: Inputs, case: Case, segments: int | None) -> dict[str, Tensor]:
    return evaluate(op.chunk, inputs, replace(case, segments=segments), backend="triton")


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_rms(other[name], x.double()) for name, x in one.items() if not torch.equal(x, other[name])}


# A dense M with a decay per channel and without any, a diagonal, a number.
@pytest.mark.parametrize("name", ["kda", "delta_rule", "gla", "simple_gla"])
def test_packed_sequences_of_all_lengths(name: str) -> None:
    """Two are cut, one of them into as many segments as it has chunks; empty and short ones stay whole."""
    op = generated(name)
    inputs = long_memory(op, PACKED, "cpu")
    whole = outcomes(op, inputs, PACKED, 1)
    assert {"final_state", "dinitial_state"} < set(whole)
    assert differences(whole, outcomes(op, inputs, PACKED, 2)) == {}  # the second one enters with the first one's state
    for segments in (3, 5):
        found = differences(whole, outcomes(op, inputs, PACKED, segments))
        assert max(found.values(), default=0.0) < NOISE, (segments, found)


@pytest.mark.parametrize("name", ["delta_rule", "simple_gla"])
def test_a_batch_without_states_and_a_loss_on_one_result(name: str) -> None:
    op = generated(name)
    inputs = replace(long_memory(op, BATCH, "cpu"), initial_state=None)
    for alone in ({"d_state": None}, {"d_output": None}):
        some = replace(inputs, **alone)
        found = differences(outcomes(op, some, BATCH, 1), outcomes(op, some, BATCH, 3))
        assert max(found.values(), default=0.0) < NOISE, (alone, found)


def test_a_state_that_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "sums.kcp"
    path.write_text(NOTHING_DECAYS, encoding="utf-8")
    write(compile_spec(path, tmp_path / "generated"), tmp_path / "generated")
    op = load_op(tmp_path / "generated" / "sums")
    inputs = long_memory(op, PACKED, "cpu")
    found = differences(outcomes(op, inputs, PACKED, 1), outcomes(op, inputs, PACKED, 5))
    assert max(found.values(), default=0.0) < NOISE, found


def test_segments_run_as_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests above would compare a thing with itself."""
    seen: list[list[list[int]]] = []
    forward = split_passes.forward

    def watched(op: Any, cut: Pieces, *rest: Any) -> Any:
        seen.append(cut.chains[:, :2].tolist())
        return forward(op, cut, *rest)

    monkeypatch.setattr(split_passes, "forward", watched)
    op = generated("simple_gla")
    inputs = long_memory(op, PACKED, "cpu")
    for segments in (1, None, 2, 5):
        outcomes(op, inputs, PACKED, segments)
    assert seen == [[[0, 2], [2, 2]], [[0, 5], [5, 2]]]


WRONG = {
    "transposed": lambda M: M.mT,
    "lost": torch.zeros_like,
    "of another segment": lambda M: M.roll(1, 0),
    "of another head": lambda M: M.roll(1, 1),
}


def test_a_wrong_transition_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    op = generated("delta_rule")
    case = replace(PACKED, tokens=128, offsets=(0, 128))
    inputs = long_memory(op, case, "cpu")
    whole = outcomes(op, inputs, case, 1)
    fold = split_passes.fold
    for wrong, change in WRONG.items():

        def wrongly(*before: Any, backward: bool) -> None:
            *given, M, states = before
            fold(*given, change(M).contiguous(), states, backward=backward)  # noqa: B023

        monkeypatch.setattr(split_passes, "fold", wrongly)
        found = differences(whole, outcomes(op, inputs, case, 4))
        assert min(found[name] for name in ("o", "dk", "dinitial_state")) > 100 * NOISE, (wrong, found)


@pytest.mark.parametrize("shape", [(2, 12), (2,)])
def test_products_of_decays(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layout = chunk_layout(1, 40 * 16 + 3, (0, 17 * 16 + 1, 17 * 16 + 1, 40 * 16 + 3), 16, torch.device("cpu"))
    padded = (shape[0], 16) if len(shape) == 2 else shape
    decays = torch.rand(layout.chunk_count, *padded) ** 0.1
    out = torch.empty(3, *shape)
    products_of_decays(decays, layout.sequences, 16, out)
    exact = decays[..., : shape[-1]].double() if len(shape) == 2 else decays.double()
    expected = torch.stack([exact[:18].prod(0), torch.ones(shape), exact[18:].prod(0)])
    assert torch.allclose(out.double(), expected, rtol=1e-5)
