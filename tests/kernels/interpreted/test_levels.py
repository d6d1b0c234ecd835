"""Device functions for decays between tokens, against a loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kcpgen.runtime.ops import (
    block_anchor,
    decay_from_edge,
    decays,
    in_block,
    level_decay,
    level_edge,
    log2_decay,
    same_level,
    same_level_T,
    unit_lower_inverse,
)

WIDTH = 16


@triton.jit
def masks_kernel(out_ptr, out_T_ptr, block_ptr, C: tl.constexpr, LEVELS: tl.constexpr):
    rows = tl.arange(0, C)
    tile = rows[:, None] * C + rows[None, :]
    for level in tl.static_range(LEVELS):
        tl.store(out_ptr + level * C * C + tile, same_level(rows, rows, level).to(tl.int32))
        tl.store(out_T_ptr + level * C * C + tile, same_level_T(rows, rows, level).to(tl.int32))
    tl.store(block_ptr + tile, in_block(rows).to(tl.int32))


@pytest.mark.parametrize("C", [16, 32, 64])
def test_levels_share_out_every_pair_of_tokens_once(C: int) -> None:
    levels = C.bit_length() - 1
    owned, owned_T = torch.zeros(2, levels, C, C, dtype=torch.int32)
    block = torch.zeros(C, C, dtype=torch.int32)
    masks_kernel[(1,)](owned, owned_T, block, C=C, LEVELS=levels)
    assert torch.equal(owned.sum(0), torch.ones(C, C, dtype=torch.int32).tril(-1))
    assert torch.equal(owned_T, owned.mT)
    within = owned[:4].sum(0)  # what the levels below blocks of 16 own is what an anchor per block takes over
    assert torch.equal(within, block.tril(-1))
    for level in range(levels):
        for t, s in owned[level].nonzero().tolist():
            size = 2 << level
            assert t // size == s // size, (level, t, s)
            assert t % size >= size // 2 > s % size, (level, t, s)


@triton.jit
def decays_kernel(
    g_ptr, work_ptr, inclusive_ptr, exclusive_ptr, live_ptr, C: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr
):
    """The decay of every pair at its level, one column per channel, as kernels form it."""
    rows = tl.arange(0, C)
    columns = tl.arange(0, WIDTH)
    tile = rows[:, None] * WIDTH + columns[None, :]
    log_decay = log2_decay(tl.load(g_ptr + tile))
    G = tl.cumsum(log_decay, axis=0)
    tl.store(work_ptr + tile, G)
    tl.store(live_ptr + tile, decays(log_decay).to(tl.int32))
    tl.debug_barrier()
    for level in tl.static_range(LEVELS):
        edge = level_edge(work_ptr, rows, columns, level, WIDTH)
        factor = level_decay(G, edge, rows, level)
        row = decay_from_edge(G - log_decay, edge)
        owned = same_level(rows, rows, level)[:, :, None]
        pair = (rows[:, None] * C + rows[None, :])[:, :, None] * WIDTH + columns[None, None, :]
        tl.store(inclusive_ptr + pair, factor[:, None, :] * factor[None, :, :], mask=owned)
        tl.store(exclusive_ptr + pair, row[:, None, :] * factor[None, :, :], mask=owned)


def loop(g: Tensor, exclusive: bool) -> Tensor:
    """[C, C, WIDTH] in float64: the product of exp(g) over s + 1 .. t, or up to t - 1."""
    C = len(g)
    result = torch.full((C, C, g.shape[1]), torch.nan, dtype=torch.float64)
    for s in range(C):
        for t in range(s + 1, C):
            result[t, s] = g[s + 1 : t + (not exclusive)].double().sum(0).exp()
    return result


def gates(kind: str, C: int) -> Tensor:
    torch.manual_seed(0)
    g = -torch.rand(C, WIDTH) * 2
    if kind == "zero":
        return torch.zeros_like(g)
    if kind == "reset":
        g[C // 3] = -math.inf
        g[C // 2 :] = 0
    if kind == "spikes":
        g[torch.rand(C, WIDTH) < 0.2] = -1000.0
    if kind == "resets":
        g[torch.rand(C, WIDTH) < 0.2] = -math.inf
    return g


@pytest.mark.parametrize("kind", ["random", "zero", "reset", "spikes", "resets"])
@pytest.mark.parametrize("C", [16, 32])
def test_decays_between_tokens(kind: str, C: int) -> None:
    g = gates(kind, C)
    inclusive, exclusive = torch.full((2, C, C, WIDTH), torch.nan)
    live = torch.zeros(C, WIDTH, dtype=torch.int32)
    decays_kernel[(1,)](
        g, torch.full((C, WIDTH), torch.nan), inclusive, exclusive, live, C=C, WIDTH=WIDTH, LEVELS=C.bit_length() - 1
    )
    for found, expected in ((inclusive, loop(g, exclusive=False)), (exclusive, loop(g, exclusive=True))):
        assert torch.equal(found.isnan(), expected.isnan())
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6, equal_nan=True)
        if kind in ("random", "zero"):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(live.bool(), g > -120)


@triton.jit
def anchor_kernel(G_ptr, out_ptr, C: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.arange(0, C)
    columns = tl.arange(0, WIDTH)
    tl.store(out_ptr + rows[:, None] * WIDTH + columns[None, :], block_anchor(G_ptr, rows, columns, WIDTH))


@pytest.mark.parametrize("C", [16, 32, 64])
def test_an_anchor_lies_before_its_block_of_16(C: int) -> None:
    around = torch.full((C + 2, WIDTH), torch.nan)  # a read before the first row would show
    G = around[1:-1]
    G.copy_(torch.randn(C, WIDTH))
    out = torch.full((C, WIDTH), torch.nan)
    anchor_kernel[(1,)](G, out, C=C, WIDTH=WIDTH)
    before = torch.cat([torch.zeros(1, WIDTH), G])
    assert torch.equal(out, before[torch.arange(C) // 16 * 16])


@triton.jit
def inverse_kernel(L_ptr, scratch_ptr, out_ptr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    rows = tl.arange(0, C)
    tile = rows[:, None] * C + rows[None, :]
    L = tl.load(L_ptr + tile)
    tl.store(out_ptr + tile, unit_lower_inverse(L, scratch_ptr, rows, C, LEVELS, PRECISION))


def erase_scores(kind: str, C: int) -> Tensor:
    """-beta k k^T below the diagonal: "repeated" keys with beta near 1 are where Neumann series blow up."""
    torch.manual_seed(1)
    noise = torch.randn(C, 32)
    keys = torch.randn(1, 32) + 0.02 * noise if kind == "repeated" else noise
    keys = torch.nn.functional.normalize(keys, dim=-1)
    beta = torch.full((C, 1), 0.999) if kind == "repeated" else torch.rand(C, 1) * (2 if kind == "strong" else 1)
    return (-beta * keys @ keys.mT).tril(-1)


@pytest.mark.parametrize(("precision", "bound"), [("tf32x3", 2e-6), ("tf32", 1e-4)])
@pytest.mark.parametrize("kind", ["random", "strong", "repeated"])
@pytest.mark.parametrize("C", [16, 32, 64])
def test_inverse_of_a_unit_triangular_matrix(C: int, kind: str, precision: str, bound: float) -> None:
    """Of 16-bit inputs, for which PRECISION is "tf32", the merges go through three bf16 products."""
    L, out, scratch = erase_scores(kind, C), torch.full((C, C), torch.nan), torch.full((C * C,), torch.nan)
    inverse_kernel[(1,)](L, scratch, out, C=C, LEVELS=C.bit_length() - 1, PRECISION=precision)
    eye = torch.eye(C, dtype=torch.float64)
    exact = torch.linalg.solve_triangular(eye - L.double(), eye, upper=False, unitriangular=True)
    assert float((out - exact).norm() / exact.norm()) < bound
    assert torch.equal(out.triu(1), torch.zeros(C, C))
