"""Elementwise functions at their extremes, sums of decays, the solve."""

from __future__ import annotations

import math

import pytest
import torch

from kcpgen.runtime import chunked
from kcpgen.runtime.functions import LOG_ZERO, compute_dtype, exp, log_decay, softplus, without_autocast
from kcpgen.runtime.sequences import by_sequence, host_offsets

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_softplus_is_exact_and_smooth(dtype: torch.dtype) -> None:
    x = torch.tensor([-math.inf, -1e4, -200, -20, -1, 0, 1e-8, 1, 19, 21, 200, 1e4], dtype=dtype, requires_grad=True)
    y = softplus(x)
    expected = torch.tensor([max(v, 0.0) + math.log1p(math.exp(-abs(v))) for v in x.tolist()], dtype=torch.float64)
    assert torch.allclose(y.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(slope, torch.sigmoid(x.detach()), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_saturates_far_above_any_gate(dtype: torch.dtype) -> None:
    x = torch.tensor([-math.inf, -1.0, 0.0, 5.0, 1e4, math.inf], dtype=dtype, requires_grad=True)
    y = exp(x)
    assert y.isfinite().all()
    assert torch.equal(y[:4], torch.exp(x[:4]))
    (slope,) = torch.autograd.grad((y * 0.0).sum(), x)
    assert slope.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_log_decay_is_no_decay_left(dtype: torch.dtype) -> None:
    assert torch.exp(torch.tensor(LOG_ZERO[dtype], dtype=dtype)) == 0
    x = torch.tensor([-math.inf, -1e30, -90.0, 0.0], dtype=dtype)
    assert torch.equal(torch.exp(log_decay(x)), torch.exp(x))
    assert log_decay(x).isfinite().all()


def test_compute_dtype() -> None:
    half, single, double = (torch.zeros(1, dtype=d) for d in (torch.float16, torch.float32, torch.float64))
    assert compute_dtype(half, None) == torch.float32
    assert compute_dtype(single, half) == torch.float32
    assert compute_dtype(half, double, None) == torch.float64


def test_without_autocast() -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert without_autocast(torch.matmul)(x, x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


@pytest.mark.parametrize("n", [1, 3])
def test_decay_sums(n: int) -> None:
    C = 6
    g = -torch.rand(2, C, n, dtype=torch.float64)
    G, R, D = chunked.decay_sums(g)
    X, E = chunked.sums_before(G, D)
    for t in range(C):
        assert torch.allclose(G[:, t], g[:, : t + 1].sum(1))
        assert torch.allclose(X[:, t], g[:, :t].sum(1))
        assert torch.allclose(R[:, t], g[:, t + 1 :].sum(1))
        for s in range(C):
            assert torch.allclose(D[:, t, s], g[:, s + 1 : t + 1].sum(1)) if s <= t else (D[:, t, s] == -math.inf).all()
            assert torch.allclose(E[:, t, s], g[:, s + 1 : t].sum(1)) if s < t else (E[:, t, s] == -math.inf).all()


def test_decays_after_a_strong_one_keep_their_digits() -> None:
    g = torch.full((1, 64, 1), -1e-3)
    g[:, 10] = -math.inf
    _, _, D = chunked.decay_sums(g)
    assert torch.allclose(D[0, 60, 11, 0], torch.tensor(-49e-3), rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_inverse(n: int) -> None:
    C = 5
    L = [[torch.randn(2, C, C, dtype=torch.float64).tril(-1) for _ in range(n)] for _ in range(n)]
    T = chunked.inverse(L)
    for i in range(n):
        for j in range(n):
            product = T[i][j] - sum(L[i][e] @ T[e][j] for e in range(n))
            assert torch.allclose(product, torch.eye(C, dtype=torch.float64).expand(2, C, C) * (i == j), atol=1e-12)


def test_sequences_are_taken_one_by_one() -> None:
    x = torch.arange(6.0).reshape(1, 6)
    calls: list[tuple[float, list[float], float]] = []

    def recurrence(state: torch.Tensor, tokens: list[torch.Tensor], factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((state.item(), tokens[0][0].tolist(), factor))
        return tokens[0] * factor, state + 1

    o, last = by_sequence(recurrence, torch.tensor([[0.0], [10.0], [20.0]]), [x], torch.tensor([0, 2, 2, 6]), factor=2)
    assert calls == [(0.0, [0.0, 1.0], 2), (10.0, [], 2), (20.0, [2.0, 3.0, 4.0, 5.0], 2)]
    assert torch.equal(o, 2 * x)
    assert last.flatten().tolist() == [1.0, 11.0, 21.0]
    assert host_offsets(torch.tensor([0, 3], dtype=torch.int32)) == host_offsets([0, 3]) == (0, 3)
