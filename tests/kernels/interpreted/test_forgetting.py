"""Segments whose gates forget are summarised from few chunks: what a kernel takes as forgotten is, and results stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

from kcpgen.runtime import chunk_op, forgetting, split_passes
from kcpgen.runtime.launch import choose_tiles
from kcpgen.runtime.layout import ChunkLayout
from kcpgen.runtime.split import forced_segments
from kcpgen.simulate.call import Spread, on_ranks
from kcpgen.verify.cases import Case, option_keywords
from kcpgen.verify.compare import evaluate, relative_rms
from kcpgen.verify.inputs import Inputs, in_float64, make_inputs
from kcpgen.verify.op import Op, load_op
from tests.kernels.gluon_in_roles import launcher

GENERATED = Path(__file__).resolve().parent.parent.parent.parent / "generated"
OPS = sorted(path.parent.name for path in GENERATED.glob("*/forgetting.py"))
ERASING = [name for name in OPS if (GENERATED / name / "summary.py").exists()]
NOISE = 1e-6  # float32 differences of states that were added up in another order
LEFT = 2.0**forgetting.FORGOTTEN.value
TOKENS = 256  # eight chunks of 32
CASE = Case(
    label="forgetting",
    backend="triton",
    dtype="float32",
    tokens=TOKENS,
    heads=1,
    value_heads=2,
    key_width=12,
    value_width=12,
    segments=2,
)


def generated(name: str) -> Op:
    return load_op(GENERATED / name)


@dataclass(frozen=True)
class Seen:
    """What one launch found: which rows, how many of their chunks are needed by head, and from which end."""

    layout: ChunkLayout
    needed: Tensor
    from_the_start: bool

    @property
    def chunks(self) -> Tensor:
        return torch.tensor(self.layout.lengths)[:, None].expand_as(self.needed)

    @property
    def forgotten(self) -> Tensor:
        return self.needed < self.chunks


@contextmanager
def watched(change: Callable[[Tensor], Tensor] = lambda needed: needed) -> Iterator[list[Seen]]:
    """What every summary is told, after a change of it."""
    seen: list[Seen] = []
    needed = chunk_op._Op._needed

    def observed(self: Any, layout: ChunkLayout, from_the_start: bool = False) -> Tensor | None:
        found = needed(self, layout, from_the_start)
        if found is None or not layout.sequence_count:
            return found
        found = change(found)
        seen.append(Seen(layout, found.clone(), from_the_start))
        return found

    chunk_op._Op._needed = observed  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        chunk_op._Op._needed = needed  # type: ignore[method-assign]


def inputs_with(op: Op, case: Case, decay: Callable[[Tensor], Tensor], **others: Callable[[Tensor], Tensor]) -> Inputs:
    """Drawn as usual, log decays and other inputs changed."""
    inputs = make_inputs(op, case, "cpu")
    changes = {**dict.fromkeys(op.description.log_decays, decay), **others}

    def changed(name: str, x: Tensor) -> Tensor:
        return changes[name](x.detach()).to(x.dtype).requires_grad_() if name in changes else x

    return replace(inputs, tokens={name: changed(name, x) for name, x in inputs.tokens.items()})


def about(mean: float) -> Callable[[Tensor], Tensor]:
    return lambda g: mean * (0.75 + 0.5 * torch.rand(g.shape, generator=torch.Generator().manual_seed(0)))


def norms(op: Op, inputs: Inputs, begin: int, end: int) -> Tensor:
    """Of the transition over some tokens of the first row, by head, from the reference in float64."""
    exact = in_float64(inputs)
    tokens = {name: x.detach()[:1, begin:end] for name, x in exact.tokens.items()}
    silent = {name: torch.zeros_like(x) if op.axis(name) == "V" else x for name, x in tokens.items()}
    width = next(x.shape[3] for name, x in tokens.items() if op.axis(name) == "K")
    heads = inputs.initial_state.shape[1] if inputs.initial_state is not None else 1
    identity = torch.eye(width, dtype=torch.float64).expand(1, heads, width, width)
    _, M = op.naive(**silent, **exact.params, **exact.keywords, initial_state=identity, output_final_state=True)
    assert M is not None
    return torch.linalg.matrix_norm(M.detach()[0], ord=2)


def excess(op: Op, inputs: Inputs, seen: list[Seen]) -> float:
    """The most that is left of what was taken as forgotten, beside what may be."""
    worst = 0.0
    for found in seen:
        C = found.layout.chunk
        for (_, first, tokens, _), needed in zip(found.layout.sequences.tolist(), found.needed, strict=True):
            for head, count in enumerate(needed.tolist()):
                if count * C < tokens:
                    skipped = -(-tokens // C) - count
                    span = (first, first + count * C) if found.from_the_start else (first + skipped * C, first + tokens)
                    worst = max(worst, float(norms(op, inputs, *span)[head]) / LEFT)
    return worst


@dataclass(frozen=True)
class Nothing:
    """In place of an op's `Prepared`."""

    def for_backward(self) -> Nothing:
        return self


def found_by(op: Op, inputs: Inputs, case: Case = CASE) -> list[Seen]:
    """By a forward of which only the kernel that looks at gates runs; then of the same segments, from their start."""
    module = import_module(f"{op.chunk.__module__.rpartition('.')[0]}.autograd")
    idle = dict.fromkeys(("scan", "transitions"), lambda *given, **more: None)
    kernels = replace(module.KERNELS, prepare=lambda *given, **more: Nothing(), **idle)
    tensors = {name: x.detach() for name, x in {**inputs.tokens, **inputs.params}.items()}

    def both(self: Any, layout: ChunkLayout, from_the_start: bool = False) -> Tensor | None:
        needed(self, layout, True)
        return needed(self, layout, False)

    with (
        watched() as seen,
        mock.patch.object(module, "KERNELS", kernels),
        mock.patch.object(split_passes, "fold"),
        forced_segments(case.segments),
    ):
        needed = chunk_op._Op._needed
        with mock.patch.object(chunk_op._Op, "_needed", both):
            op.chunk(**tensors, **inputs.keywords, backend="triton")
    backwards, forwards = seen
    assert (backwards.from_the_start, forwards.from_the_start) == (True, False)
    return seen


@pytest.mark.parametrize("at_once", [None, 0], ids=["segments at once", "chunk after chunk"])
@pytest.mark.parametrize("name", OPS)
def test_what_is_forgotten_is_gone(name: str, at_once: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every option, of gates of every strength. Strong ones are seen, weak ones never."""
    if at_once is not None:  # as of segments longer than what is looked at at once
        monkeypatch.setattr("kcpgen.runtime.forgetting.AT_ONCE", at_once)
    op = generated(name)
    for _, keywords in [("", {}), *option_keywords(op)]:
        case = replace(CASE, keywords=keywords)
        inputs = make_inputs(op, case, "cpu")
        assert excess(op, inputs, found_by(op, inputs, case)) <= 1.0, keywords
    strong, medium, weak = (inputs_with(op, CASE, about(mean)) for mean in (-1.5, -0.5, -0.01))
    for inputs in (strong, medium):
        assert excess(op, inputs, found_by(op, inputs)) <= 1.0
    assert all(found.forgotten.all() for found in found_by(op, strong))
    assert not any(found.forgotten.any() for found in found_by(op, weak))


def test_a_head_that_forgets_beside_one_that_does_not() -> None:
    op = generated("gdn")
    inputs = inputs_with(op, CASE, lambda g: about(-1.0)(g) * torch.tensor([1.0, 0.001]))
    assert [found.needed.tolist() for found in found_by(op, inputs)] == [[[1, 4]], [[1, 4]]]


@pytest.mark.parametrize("at_once", [0, 2, 4], ids="{} chunks at once".format)
def test_gates_that_stop_early_count_where_they_are(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens of a segment do not decay: one look more is taken, then nothing is expected any more."""
    op = generated("gdn")
    monkeypatch.setattr("kcpgen.runtime.forgetting.AT_ONCE", at_once * 32 * 128)
    for kept, expected in ((20, 2), (70, 4 if at_once < 2 else 3)):
        decay = torch.ones(TOKENS)
        decay[128 - kept : 128] = 0.0
        inputs = inputs_with(op, CASE, lambda g: about(-2.0)(g) * decay[None, :, None])  # noqa: B023
        from_the_start, from_the_end = found_by(op, inputs)
        assert from_the_start.needed.tolist() == [[1, 1]]
        assert from_the_end.needed.tolist() == [[expected] * 2], kept


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_keys_that_expand_the_state_forget_nothing(name: str) -> None:
    """|k| = 10 and beta = 1: I - k k^T stretches a state a hundredfold along k."""
    op = generated(name)
    changes = {"k": lambda k: 10 * normalize(k, dim=-1), "beta": torch.ones_like}
    inputs = inputs_with(op, CASE, about(-1.0), **changes)
    assert not any(found.forgotten.any() for found in found_by(op, inputs))
    slower = inputs_with(op, CASE, about(-9.0), **changes)  # which e^-9 a token makes up for
    found = found_by(op, slower)
    assert all(one.forgotten.all() for one in found)
    assert excess(op, slower, found) <= 1.0


def spoiled(wrong: float) -> Callable[[Tensor], Tensor]:
    """In the first head, a number of the tokens that are looked at first, from either end of the first segment."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        for token in (0, 127):
            x[0, token, 0].reshape(-1)[0] = wrong
        return x

    return change


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_forgets_nothing(name: str, wrong: float) -> None:
    op = generated(name)
    changed = [inputs_with(op, CASE, lambda g: spoiled(wrong)(about(-1.5)(g)))]
    changed += [inputs_with(op, CASE, about(-1.5), k=spoiled(wrong))] if name in ERASING else []
    for inputs in changed:
        assert not any(found.forgotten[0, 0] for found in found_by(op, inputs))


@triton.jit
def _wrong_erase_along(share):
    return -tl.log2(0.5 * (tl.abs(share) + tl.abs(2.0 - share)))


def test_a_bound_of_the_wrong_sign_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    op = generated("gdn")
    module = import_module(f"{op.chunk.__module__.rpartition('.')[0]}.forgetting")
    monkeypatch.setattr(module, "erase_along", _wrong_erase_along)
    inputs = inputs_with(op, CASE, about(-1.0), k=lambda k: 10 * normalize(k, dim=-1), beta=torch.ones_like)
    assert excess(op, inputs, found_by(op, inputs)) > 1e3


@pytest.mark.parametrize("name", ["gdn", "kda", "gla"])
def test_summaries_in_roles_run_the_chunks_that_are_needed(name: str) -> None:
    """As the portable kernels do, from the same scratch, emulated; each head and sequence from chunks of its own."""
    op = generated(name)
    ends = (0, 192, 192, 320)
    case = replace(CASE, dtype="bfloat16", key_width=64, value_width=64, offsets=ends, tokens=ends[-1], heads=2)
    modules = {
        part: import_module(f"{op.chunk.__module__.rpartition('.')[0]}.{part}")
        for part in ("autograd", "scan_hopper", "reverse_hopper")
    }
    inputs, kernels = inputs_with(op, case, about(-0.01)), modules["autograd"].KERNELS
    made: list[tuple[ChunkLayout, Any]] = []

    def prepare(*arguments: Any, **keywords: Any) -> Any:
        made.append((arguments[-2], kernels.prepare(*arguments, **keywords)))
        return made[0][1]

    alone = replace(kernels, prepare=prepare, scan=lambda *arguments, **keywords: None)
    with mock.patch.object(modules["autograd"], "KERNELS", alone):
        tensors = {name: x.detach() for name, x in {**inputs.tokens, **inputs.params}.items()}
        op.chunk(**tensors, cu_seqlens=torch.tensor(ends), backend="triton")
    ((layout, prepared),) = made
    needed = torch.tensor(layout.lengths, dtype=torch.int32)[:, None].repeat(1, 2)
    needed[0, 0], needed[2, 1] = 2, 1
    torch.manual_seed(0)
    given, do = torch.randn(3, 2, 64, 64), torch.randn(1, ends[-1], 2, 64).to(torch.bfloat16)
    tiles = choose_tiles(keys=64, values=64, decay=kernels.form.decay, terms=1, dtype=torch.bfloat16)

    def summary(roles: bool, backward: bool, needed: Tensor | None) -> Tensor:
        out = given.clone()
        if backward:
            states = {"initial_state_gradient": out, "final_state_gradient": out}
            kernels.reverse_summary(
                prepared, layout, replace(tiles.reverse, roles=roles), do=do, **states, chunks_needed=needed
            )
        else:
            states = {"o": None, "initial_state": out, "final_state": out}
            kernels.scan(prepared, layout, replace(tiles.scan, roles=roles), **states, chunks_needed=needed)
        return out

    for backward, part in ((False, "scan"), (True, "reverse")):
        module, path = modules[f"{part}_hopper"], GENERATED / name / f"{part}_hopper.py"
        with mock.patch.object(module, f"{part}_kernel", launcher(path)):
            found = [summary(True, backward, n) for n in (None, needed)]
        expected = [summary(False, backward, n) for n in (None, needed)]
        for one, other in zip(found, expected, strict=True):
            assert relative_rms(one, other.double()) < 1e-4
        changed = (expected[0] != expected[1]).flatten(2).any(2)
        assert changed.tolist() == [[True, False], [False, False], [False, True]]


LONG = replace(CASE, segments=4)
PACKED = replace(CASE, tokens=327, offsets=(0, 0, 7, 199, 199, 327), segments=3)


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_rms(other[name], x.double()) for name, x in one.items()}


@pytest.mark.parametrize(("name", "case"), [("gdn", LONG), ("gdn", PACKED), ("gla", PACKED)])
def test_results_are_those_of_whole_sequences(name: str, case: Case) -> None:
    """Initial and final states, and the gradients of both, among them; one head forgets, the other one half as fast."""
    op = generated(name)
    heads = torch.tensor([1.5, 0.75])
    inputs = inputs_with(op, case, lambda g: about(-1.0)(g) * heads.reshape(1, 1, 2, *[1] * (g.ndim - 3)))
    whole = evaluate(op.chunk, inputs, replace(case, segments=1), backend="triton")
    with watched() as seen:
        cut = evaluate(op.chunk, inputs, case, backend="triton")
    assert {"final_state", "dinitial_state"} < set(whole)
    assert {found.from_the_start for found in seen} == {False, True}
    assert len(seen) == (3 if name in ERASING else 2)  # summaries of both passes, and M
    assert all(found.forgotten.any() for found in seen)
    found = differences(whole, cut)
    assert max(found.values()) < NOISE, found


def test_chunks_that_are_forgotten_do_not_run() -> None:
    """A summary that is told of one chunk depends on that one alone: told wrongly, it is wrong."""
    op = generated("gdn")
    inputs = inputs_with(op, LONG, about(-0.005))
    whole = evaluate(op.chunk, inputs, replace(LONG, segments=1), backend="triton")
    with watched() as seen:
        found = differences(whole, evaluate(op.chunk, inputs, LONG, backend="triton"))
    assert not any(one.forgotten.any() for one in seen)
    assert max(found.values()) < NOISE, found
    with watched(torch.ones_like):
        found = differences(whole, evaluate(op.chunk, inputs, LONG, backend="triton"))
    assert min(found[name] for name in ("o", "final_state", "dk", "dinitial_state")) > 1e4 * NOISE, found


@pytest.mark.parametrize("segments", [1, 2])
def test_ranks_forget_likewise(segments: int) -> None:
    """Three of them, whole or in segments: the one inside a sequence says that nothing comes through it."""
    op = generated("gdn")
    tokens = 3 * segments * 64
    case = replace(CASE, tokens=tokens, offsets=(0, tokens), segments=1, value_heads=1)
    inputs = inputs_with(op, case, about(-1.0))
    one = evaluate(op.chunk, inputs, case, backend="triton")
    with watched() as seen:
        ranks = on_ranks(op, case, inputs, Spread(ranks=3, segments=segments))
    assert all(found.forgotten.all() for found in seen)
    assert {found.from_the_start for found in seen} == {False, True}
    found = differences(one, ranks)
    assert max(found.values()) < NOISE, found
