"""Merging rank summaries, whatever their transitions look like and in whichever way: the same state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kcpgen.runtime.context_parallel.errors import RankFailedError, RankMismatchError
from kcpgen.runtime.context_parallel.merge import merge_in_torch
from kcpgen.runtime.context_parallel.payload import HEADER, Format, check_headers, fingerprint, header

K, V, HV = 5, 3, 2
SHAPES = {"dense": (K, K), "diagonal": (K,), "scalar": ()}


def step(kind: str, M: Tensor | None, S: Tensor) -> Tensor:
    """M S with M written out as a matrix."""
    if M is None or kind == "identity":
        return S
    full = {
        "dense": lambda: M,
        "diagonal": lambda: torch.diag_embed(M),
        "scalar": lambda: M[:, None, None] * torch.eye(K),
    }
    return full[kind]() @ S


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("kind", ["dense", "diagonal", "scalar", "identity"])
@pytest.mark.parametrize("method", ["fold", "scan"])
def test_merge(kind: str, ranks: int, method: str) -> None:
    torch.manual_seed(ranks)
    states = torch.randn(ranks, HV, K, V, dtype=torch.float64)
    M = None if kind == "identity" else torch.randn(ranks - 1, HV, *SHAPES[kind], dtype=torch.float64)
    forward = states[0]
    for j in range(1, ranks):
        forward = step(kind, None if M is None else M[j - 1], forward) + states[j]
    backward = states[-1]
    for j in reversed(range(ranks - 1)):
        turned = None if M is None else M[j].mT if kind == "dense" else M[j]
        backward = step(kind, turned, backward) + states[j]
    for expected, direction in ((forward, False), (backward, True)):
        found = merge_in_torch(states, M, kind=kind, backward=direction, method=method)  # type: ignore[arg-type]
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_one_summary_is_passed_on_to_the_bit() -> None:
    states = torch.randn(1, HV, K, V)
    assert torch.equal(merge_in_torch(states, None, kind="dense", backward=False), states[0])


def test_a_user_who_allows_tf32_does_not_get_it_here() -> None:
    """Products are taken in float64: what a user allows for float32 says nothing about them."""
    states, M = torch.randn(3, HV, K, V), torch.randn(2, HV, K, K)
    exact = merge_in_torch(states.double(), M.double(), kind="dense", backward=False)
    assert torch.equal(merge_in_torch(states, M, kind="dense", backward=False), exact.float())


@pytest.mark.parametrize(
    ("kind", "numbers"), [("dense", 2 * K * K), ("diagonal", 2 * K), ("scalar", 2), ("identity", 0)]
)
def test_what_is_sent(kind: str, numbers: int) -> None:
    """Per rank: a state, and K x K, K, one or no number per head; no transition where no rank is interior."""
    form = Format(heads=2, keys=K, values=V, kind=kind, transitions=kind != "identity")  # type: ignore[arg-type]
    assert form.numbers == HEADER + 2 * K * V + numbers
    without = Format(heads=2, keys=K, values=V, kind=kind, transitions=False)  # type: ignore[arg-type]
    assert without.numbers == HEADER + 2 * K * V
    payload = torch.arange(float(form.numbers))
    assert form.states(payload).flatten()[0] == HEADER
    assert numbers == 0 or form.transition(payload).flatten()[-1] == form.numbers - 1


def made(offsets: Sequence[int] = (0, 2**40), bounds: Sequence[int] = (0, 1, 2**40), **changes: object) -> list[float]:
    usual = {"call": 3, "attempt": 2, "backward": False, "differentiable": True, "failed": False}
    fingerprints = (fingerprint(offsets), fingerprint(bounds))
    return header(fingerprints=fingerprints, **{**usual, **changes})  # type: ignore[arg-type]


def test_headers_are_exact_in_float32() -> None:
    rows = [made(call=(1 << 24) + 3, attempt=(1 << 24) + 2), made()]
    check_headers(torch.tensor(rows, dtype=torch.float32), 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"call": 4}, "rank 1 came with another `call`: rank 0: 3, rank 1: 4, rank 2: 3"),
        ({"attempt": 1}, "rank 1 came with another `attempt`: rank 0: 2, rank 1: 1, rank 2: 2"),
        ({"backward": True}, "another `direction`: rank 0: forward, rank 1: backward, rank 2: forward"),
        ({"differentiable": False}, "another `gradients`: rank 0: required, rank 1: not required, rank 2: required"),
        ({"offsets": (0, 5, 2**40)}, "rank 1 came with another `cu_seqlens`"),
        ({"bounds": (0, 2, 2**40)}, "rank 1 came with another `shards`"),
    ],
)
def test_a_header_names_rank_and_field(change: dict[str, Any], text: str) -> None:
    headers = torch.tensor([made(), made(**change), made()], dtype=torch.float32)
    for rank in range(3):
        with pytest.raises(RankMismatchError, match=re.escape(text)):
            check_headers(headers, rank)


def test_a_failed_rank_is_named_to_the_others() -> None:
    headers = torch.tensor([made(), made(failed=True)], dtype=torch.float32)
    with pytest.raises(RankFailedError, match="rank 1 failed"):
        check_headers(headers, 0)
    check_headers(headers, 1)  # it raises an error of its own
