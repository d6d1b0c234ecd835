"""The op is linear in its values, so large ones must not cost digits on ranks: M is a difference of two states."""

from __future__ import annotations

import pytest
import torch
from cp_rows import op
from torch import Tensor

from kcpgen.runtime import build_cp_context
from kcpgen.simulate.ranks import SimulatedTransport, run_ranks

T, H, K, V = 64, 2, 8, 6
OFFSETS = torch.tensor([0, T])


@pytest.mark.parametrize("name", ["kda", "gla", "simple_gla"])
def test_large_values_keep_their_digits_in_fp32(name: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, T, H, K) / K**0.5
    v = 1e5 * torch.randn(1, T, H, V)
    g = -0.02 * torch.rand((1, T, H) if name == "simple_gla" else (1, T, H, K))
    tokens = [q, k, v, g, *([torch.rand(1, T, H)] if name == "kda" else [])]
    exact, _ = op(name).chunk(*(x.double() for x in tokens), cu_seqlens=OFFSETS, backend="eager")

    def on_rank(transport: SimulatedTransport) -> Tensor:
        cp = build_cp_context(OFFSETS, transport)
        own = [x[:, cp.shard.start : cp.shard.stop] for x in tokens]
        return op(name).chunk(*own, cp_context=cp, backend="eager")[0]

    found = torch.cat(run_ranks(4, on_rank), dim=1)
    assert float((found.double() - exact).norm() / exact.norm()) < 2e-6
