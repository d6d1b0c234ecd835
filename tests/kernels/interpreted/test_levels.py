"""Device functions for decays between tokens, against a loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kcpgen.runtime.ops import (
    before,
    decays,
    earlier_block,
    later_block,
    level_edge,
    log2_decay,
    of_block,
    same_level,
    same_level_T,
    unit_lower_inverse,
    within_reach,
)

WIDTH = 16


@triton.jit
def masks_kernel(
    out_ptr, out_T_ptr, later_ptr, earlier_ptr, block_ptr, C: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr
):
    rows = tl.arange(0, C)
    tile = rows[:, None] * C + rows[None, :]
    for level in tl.static_range(LEVELS):
        tl.store(out_ptr + level * C * C + tile, same_level(rows, rows, level).to(tl.int32))
        tl.store(out_T_ptr + level * C * C + tile, same_level_T(rows, rows, level).to(tl.int32))
    tl.store(later_ptr + tile, later_block(rows, rows, FIRST).to(tl.int32))
    tl.store(earlier_ptr + tile, earlier_block(rows, rows, FIRST).to(tl.int32))
    tl.store(block_ptr + tile, of_block(rows, rows, FIRST).to(tl.int32))


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("C", [16, 32, 64])
def test_levels_share_out_every_pair_of_tokens_once(C: int, first: int) -> None:
    levels = C.bit_length() - 1
    owned, owned_T = torch.zeros(2, levels, C, C, dtype=torch.int32)
    later, earlier, block = torch.zeros(3, C, C, dtype=torch.int32)
    masks_kernel[(1,)](owned, owned_T, later, earlier, block, C=C, LEVELS=levels, FIRST=first)
    assert torch.equal(owned.sum(0), torch.ones(C, C, dtype=torch.int32).tril(-1))
    assert torch.equal(owned_T, owned.mT)
    assert torch.equal(later, owned[first:].sum(0))  # what is taken at once is what these levels own
    assert torch.equal(earlier, later.mT)
    assert torch.equal(block.sum(0), torch.ones(C, dtype=torch.int32))  # every token is of one block
    for b, s in block.nonzero().tolist():
        assert s >> first == b
    for level in range(levels):
        for t, s in owned[level].nonzero().tolist():
            size = 2 << level
            assert t // size == s // size, (level, t, s)
            assert t % size >= size // 2 > s % size, (level, t, s)


@triton.jit
def decays_kernel(
    g_ptr, work_ptr, inclusive_ptr, exclusive_ptr, live_ptr, together_ptr,
    C: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The decay of every pair over its border, one column per channel, as `prepare` forms it."""
    rows = tl.arange(0, C)
    columns = tl.arange(0, WIDTH)
    tile = rows[:, None] * WIDTH + columns[None, :]
    log_decay = log2_decay(tl.load(g_ptr + tile))
    G = tl.cumsum(log_decay, axis=0)
    tl.store(work_ptr + tile, G)
    tl.store(live_ptr + tile, decays(log_decay).to(tl.int32))
    tl.debug_barrier()
    G_end = tl.load(work_ptr + (C - 1) * WIDTH + columns)
    together = within_reach(tl.load(work_ptr + (C // 2 - 1) * WIDTH + columns), G_end)
    tl.store(together_ptr, together.to(tl.int32))
    for level in tl.range(LEVELS - 1 if together else 0, LEVELS):
        owned = tl.where(together, before(rows), same_level(rows, rows, level))[:, :, None]
        edge = level_edge(work_ptr, rows, columns, level, WIDTH)
        to_edge = tl.exp2(edge - G)
        pair = (rows[:, None] * C + rows[None, :])[:, :, None] * WIDTH + columns[None, None, :]
        tl.store(inclusive_ptr + pair, tl.exp2(G - edge)[:, None, :] * to_edge[None, :, :], mask=owned)
        tl.store(exclusive_ptr + pair, tl.exp2(G - log_decay - edge)[:, None, :] * to_edge[None, :, :], mask=owned)


def loop(g: Tensor, exclusive: bool) -> Tensor:
    """[C, C, WIDTH] in float64: the product of exp(g) over s + 1 .. t, or up to t - 1."""
    C = len(g)
    result = torch.full((C, C, g.shape[1]), torch.nan, dtype=torch.float64)
    for s in range(C):
        for t in range(s + 1, C):
            result[t, s] = g[s + 1 : t + (not exclusive)].double().sum(0).exp()
    return result


# By kind: whether fp32 holds the decay of either half of 16 or 32 tokens.
TOGETHER = {
    "random": True,
    "zero": True,
    "fast": True,
    "faster": False,
    "reset": False,
    "spikes": False,
    "resets": False,
}


def gates(kind: str, C: int) -> Tensor:
    torch.manual_seed(0)
    g = -torch.rand(C, WIDTH) * 2
    if kind == "zero":
        return torch.zeros_like(g)
    if kind in ("fast", "faster"):  # just within 80 log2, in the last half of one channel, and just not
        g[C // 2 :, 3] = -(79 if kind == "fast" else 81) * math.log(2) / (C // 2)
    if kind == "reset":
        g[C // 3] = -math.inf
        g[C // 2 :] = 0
    if kind == "spikes":
        g[torch.rand(C, WIDTH) < 0.2] = -1000.0
    if kind == "resets":
        g[torch.rand(C, WIDTH) < 0.2] = -math.inf
    return g


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of pairs that no level owns
@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("C", [16, 32])
def test_decays_between_tokens(kind: str, C: int) -> None:
    g = gates(kind, C)
    inclusive, exclusive = torch.full((2, C, C, WIDTH), torch.nan)
    live, together = torch.zeros(C, WIDTH, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    decays_kernel[(1,)](
        g, torch.full((C, WIDTH), torch.nan), inclusive, exclusive, live, together,
        C=C, WIDTH=WIDTH, LEVELS=C.bit_length() - 1,
    )  # fmt: skip
    assert bool(together) is TOGETHER[kind]
    for found, expected in ((inclusive, loop(g, exclusive=False)), (exclusive, loop(g, exclusive=True))):
        assert torch.equal(found.isnan(), expected.isnan())
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6, equal_nan=True)
        if kind in ("random", "zero"):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(live.bool(), g > -120)


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
