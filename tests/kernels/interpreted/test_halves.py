"""Sequences whose heads run in halves where they forget, against the same sequences whole, and what decides on that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kcpgen.runtime import chunk_op, halves
from kcpgen.runtime.context_parallel.context import CPContext
from kcpgen.runtime.halves import Chosen, forced_halves
from kcpgen.runtime.layout import chunk_layout
from kcpgen.runtime.tuned import tiles_for
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate, relative_rms
from kcpgen.verify.inputs import Inputs, make_inputs
from kcpgen.verify.op import Op, load_op
from tests.conftest import ROOT

NOISE = 1e-6
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "backend": "triton",
    "dtype": "float32",
    "heads": 1,
    "value_heads": 2,
    "key_width": 12,
    "value_width": 20,
}
PACKED = Case(label="packed", tokens=270, offsets=(0, 135, 270), gates="heads", **SIZES)
BATCH = Case(label="batch", tokens=130, batch=2, gates="heads", initial_state=False, **SIZES)
HALVED = [path.parent.name for path in sorted(ROOT.glob("generated/*/autograd.py"))]
HALVED = [name for name in HALVED if load_op(ROOT / "generated" / name).has_halves]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def generated(name: str) -> Op:
    return load_op(ROOT / "generated" / name)


def outcomes(op: Op, inputs: Inputs, case: Case, choice: bool) -> dict[str, Tensor]:
    return evaluate(op.chunk, inputs, replace(case, halves=choice), backend="triton")


def difference(op: Op, inputs: Inputs, case: Case) -> float:
    whole, found = (outcomes(op, inputs, case, choice) for choice in (False, True))
    errors = [relative_rms(found[name], x.double()) for name, x in whole.items() if not torch.equal(found[name], x)]
    return max((float("inf") if error != error else error for error in errors), default=0.0)


@contextmanager
def watched(change: Callable[[Chosen], Chosen] = lambda chosen: chosen) -> Iterator[list[Chosen]]:
    """What launches are told of heads, which may be something else then."""
    seen: list[Chosen] = []

    def told(**fields: Any) -> Chosen:
        seen.append(change(Chosen(**fields)))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "Chosen", told)
        yield seen


def test_the_ops_that_forget_and_have_programs_of_32_columns() -> None:
    assert HALVED == ["gdn", "simple_gla"]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("gdn", PACKED),
        ("gdn", replace(BATCH, replayed=True)),
        ("simple_gla", replace(PACKED, replayed=True)),
        ("simple_gla", BATCH),
    ],
    ids=lambda x: getattr(x, "label", x),
)
def test_heads_in_halves_and_whole_ones_together(name: str, case: Case) -> None:
    """Half of the heads forget, in either direction; what one launch leaves out the other does."""
    op = generated(name)
    inputs = make_inputs(op, case, "cpu")
    with watched() as seen:
        assert difference(op, inputs, case) < NOISE
    assert len(seen) == 6
    for chosen in seen:
        assert ((chosen.forgotten > 0).sum(-1) == 1).all()
    assert sum(chosen.forgetting for chosen in seen) == 4
    assert sum(chosen.needed is not None for chosen in seen) == 2


@pytest.mark.parametrize("gates", ["zero", "reset", "spikes"])
def test_all_heads_one_way_or_the_other(gates: str) -> None:
    op, case = generated("simple_gla"), replace(PACKED, gates=gates)
    assert difference(op, make_inputs(op, case, "cpu"), case) < NOISE


@pytest.mark.parametrize("alone", ["d_state", "d_output"])
def test_a_loss_on_one_result(alone: str) -> None:
    op = generated("simple_gla")
    inputs = replace(make_inputs(op, PACKED, "cpu"), **{alone: None})
    assert difference(op, inputs, PACKED) < NOISE


def told(**changed: Callable[[Chosen], Any]) -> Callable[[Chosen], Chosen]:
    return lambda chosen: replace(chosen, **{name: change(chosen) for name, change in changed.items()})


WRONG = {
    "all heads in halves": told(forgotten=lambda chosen: torch.ones_like(chosen.forgotten)),
    "all heads whole": told(forgotten=lambda chosen: torch.zeros_like(chosen.forgotten) + (not chosen.forgetting)),
    "others": told(forgetting=lambda chosen: not chosen.forgetting),
    "heads of another": told(forgotten=lambda chosen: chosen.forgotten.roll(1, -1)),
    "a chunk too few": told(needed=lambda chosen: None if chosen.needed is None else chosen.needed - 1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_heads_are_seen(wrong: str) -> None:
    op = generated("gdn")
    inputs = make_inputs(op, PACKED, "cpu")
    if wrong == "a chunk too few":  # of gates that would leave something of the one that is missing
        with torch.no_grad():
            inputs.tokens["g"].clamp_(min=-1.0)
    if wrong in ("others", "heads of another"):  # of one launch alone: of all of them heads change their places
        calls = iter(range(100))
        change = WRONG[wrong]
        with watched(lambda chosen: change(chosen) if next(calls) == 0 else chosen):
            assert not difference(op, inputs, PACKED) < 1e-3
        return
    with watched(WRONG[wrong]):
        assert not difference(op, inputs, PACKED) < 1e-3


@dataclass(frozen=True)
class Sizes:
    """Of a call of gdn with K = V = 128, for a device of 132 multiprocessors."""

    lengths: tuple[int, ...]
    heads: int
    op: str = "gdn"
    segments: int | None = None
    cp: bool = False
    roles: bool = True


def run_of(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> chunk_op.Run:
    op = generated(sizes.op)
    kernels = import_module(f"{op.chunk.__module__.rpartition('.')[0]}.autograd").KERNELS
    tiles = tiles_for(op.form, 128, 128, torch.bfloat16, CPU)
    scan = replace(tiles.scan, roles=sizes.roles)
    ends = (0, *torch.tensor(sizes.lengths).cumsum(0).tolist())
    layout = chunk_layout(1, ends[-1], ends, tiles.chunk, CPU)
    monkeypatch.setattr(chunk_op, "multiprocessors", lambda device: 132)
    return chunk_op.Run(
        kernels=kernels,
        keywords={},
        promises={},
        layout=layout,
        heads=sizes.heads,
        batch=1,
        starts=ends,
        tiles=replace(tiles, scan=scan),
        cp=CPContext.__new__(CPContext) if sizes.cp else None,
        differentiable=True,
        segments=sizes.segments,
        replays=False,
    )


@pytest.mark.parametrize(
    ("sizes", "halved", "stretched"),
    [
        (Sizes((8192,), 32), True, False),
        (Sizes((8192, 9000), 16), True, False),
        (Sizes((8128,), 32), False, False),  # a half of 63 chunks
        (Sizes((16384, 100), 16), False, False),
        (Sizes((8192,), 33), True, False),
        (Sizes((8192,), 34), False, True),  # more programs of 32 columns than multiprocessors
        (Sizes((8192,), 32, segments=1), False, False),
        (Sizes((8192,), 32, roles=False), False, True),
        (Sizes((8192,), 32, "delta_rule"), False, False),  # which forgets nothing
        (Sizes((8192,), 32, "kda"), False, True),
        (Sizes((32768,), 8), False, False),  # segments
    ],
    ids=str,
)
def test_sizes_decide(sizes: Sizes, halved: bool, stretched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(sizes, monkeypatch)
    assert (run.halves is not None, bool(run.stretches)) == (halved, stretched)
    if run.halves:
        assert run.halves.first.lengths == tuple(n // 2 for n in run.layout.lengths)
        assert run.halves.both.lengths == (*run.halves.first.lengths, *run.halves.second.lengths)


def test_who_asks_gets_them_of_two_chunks_or_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for length, expected in ((64, False), (65, True)):
        with forced_halves(True):
            assert (run_of(Sizes((length,), 40), monkeypatch).halves is not None) == expected
    with forced_halves(False):
        assert run_of(Sizes((8192,), 32), monkeypatch).halves is None
