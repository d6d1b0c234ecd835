"""What lies in, behind and between the tensors of a call is never read: results do not change by a bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kcpgen.verify.cases import Case, option_keywords
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import Inputs, make_inputs
from kcpgen.verify.op import Op, load_op

GENERATED = Path(__file__).resolve().parents[3] / "generated"
Place = Callable[[Tensor], Tensor]


def case_of(op: Op, dtype: str = "float32") -> Case:
    """Packed and grouped, with every option on, widths that are no powers of two, an empty sequence in the middle."""
    *_, keywords = [{}, *(on for _, on in option_keywords(op))]
    sizes = {"heads": 1, "value_heads": 2, "key_width": 20, "value_width": 12}
    return Case(label="", backend="triton", dtype=dtype, tokens=40, offsets=(0, 3, 3, 40), keywords=keywords, **sizes)


def run(op: Op, inputs: Inputs, case: Case) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in evaluate(op.chunk, inputs, case, backend="triton").items()}


def placed(inputs: Inputs, place: Place) -> Inputs:
    """The same numbers, laid out in memory by `place`."""

    def leaf(x: Tensor) -> Tensor:
        moved = place(x.detach())
        assert torch.equal(moved, x)
        return moved.requires_grad_()

    def other(x: Tensor | None) -> Tensor | None:
        return None if x is None else place(x)

    return Inputs(
        tokens={name: leaf(x) for name, x in inputs.tokens.items()},
        params={name: leaf(x) for name, x in inputs.params.items()},
        initial_state=None if inputs.initial_state is None else leaf(inputs.initial_state),
        keywords=inputs.keywords,
        d_output=other(inputs.d_output),
        d_state=other(inputs.d_state),
    )


def test_heads_of_the_outputs_gradient_may_lie_far_apart() -> None:
    """Where it was transposed to heads first, the third head of a long row begins 2**31 elements behind the first."""
    op = load_op(GENERATED / "simple_gla")
    case = Case(label="", backend="triton", tokens=40, heads=3, value_heads=3, key_width=16, value_width=16)
    inputs = make_inputs(op, case, "cpu")
    assert inputs.d_output is not None
    room = torch.empty(2**31 + 40 * 16, dtype=torch.bfloat16)  # of which no more is touched than is written
    far = room.as_strided((1, 40, 3, 16), (40 * 16, 16, 2**30, 1))
    far.copy_(inputs.d_output)
    assert equal(run(op, replace(inputs, d_output=far), case), run(op, inputs, case)) == []


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    assert all(bool(x.isfinite().all()) for x in expected.values())
    return [name for name, x in expected.items() if not torch.equal(found[name], x)]


def filled_with_nan(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrapped(*args: object, **keywords: object) -> Tensor:
        made = make(*args, **keywords)
        return made.fill_(math.nan) if made.is_floating_point() else made

    return wrapped


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("kda", "float32"), ("kda", "bfloat16"), ("dplr", "bfloat16"), ("gdn", "float32"), ("gla", "float32")],
)
def test_scratch_and_results_are_written_before_they_are_read(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = load_op(GENERATED / name)
    case = case_of(op, dtype)
    inputs = make_inputs(op, case, "cpu")
    expected = run(op, inputs, case)
    for where, function in ((torch.Tensor, "new_empty"), (torch, "empty_like"), (torch, "empty")):
        monkeypatch.setattr(where, function, filled_with_nan(getattr(where, function)))
    assert torch.empty(1).isnan()
    assert equal(run(op, inputs, case), expected) == []


def inside(poison: float) -> Place:
    """A view into a larger tensor: something lies before and behind every row of every axis."""

    def place(x: Tensor) -> Tensor:
        around = x.new_full([n + 5 for n in x.shape], poison)
        view = around[tuple(slice(2, 2 + n) for n in x.shape)]
        return view.copy_(x)

    return place


def reversed_heads(x: Tensor) -> Tensor:
    """Heads before tokens in memory, as an attention layer may leave them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 2 else x


def spread_columns(x: Tensor) -> Tensor:
    """No unit stride along the last axis."""
    return torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0]


PLACES: dict[str, Place] = {
    "inside_nan": inside(math.nan),
    "inside_1e30": inside(1e30),
    "heads_first": reversed_heads,
    "spread_columns": spread_columns,
}


@pytest.mark.parametrize(("name", "place"), [*(("kda", place) for place in PLACES), ("gdn", "inside_nan")])
def test_only_the_tensors_themselves_are_read(name: str, place: str) -> None:
    op = load_op(GENERATED / name)
    case = case_of(op)
    inputs = make_inputs(op, case, "cpu")
    expected = run(op, inputs, case)
    assert equal(run(op, placed(inputs, PLACES[place]), case), expected) == []


def test_views_of_one_projection() -> None:
    op = load_op(GENERATED / "gdn")
    case = Case(label="", backend="triton", dtype="float32", tokens=20, key_width=20, value_width=12)
    inputs = make_inputs(op, case, "cpu")
    expected = run(op, inputs, case)
    widths = {name: math.prod(x.shape[2:]) for name, x in inputs.tokens.items()}
    row = torch.cat([x.detach().flatten(2) for x in inputs.tokens.values()], -1).requires_grad_()
    parts = dict(zip(widths, row.split([*widths.values()], -1), strict=True))
    views = {name: parts[name].view_as(x) for name, x in inputs.tokens.items()}
    assert all(not view.is_contiguous() for view in views.values())
    o, state = op.chunk(**views, initial_state=inputs.initial_state, output_final_state=True, backend="triton")
    found = torch.autograd.grad((o, state), row, (inputs.d_output, inputs.d_state))[0]
    assert equal({"o": o, "final_state": state}, {n: expected[n] for n in ("o", "final_state")}) == []
    together = torch.cat([expected[f"d{name}"].flatten(2) for name in inputs.tokens], -1)
    assert torch.equal(found, together)


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_a_gradient_that_is_one_number(name: str) -> None:
    """o.sum() sends back a gradient of stride 0."""
    op = load_op(GENERATED / name)
    case = Case(label="", backend="triton", dtype="float32", tokens=20, key_width=20, value_width=12, loss="output")
    inputs = make_inputs(op, case, "cpu")
    leaves = list(inputs.leaves.values())

    def gradients(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        o, _ = op.chunk(**inputs.tokens, initial_state=inputs.initial_state, backend="triton")
        return torch.autograd.grad(loss(o), leaves)

    dense = torch.ones(1, 20, 2, 12)
    for found, expected in zip(gradients(Tensor.sum), gradients(lambda o: (o * dense).sum()), strict=True):
        assert torch.equal(found, expected)
