"""Every case of context parallelism, all ranks simulated in float64, against the same op on one device."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from cp_rows import OPS, ROWS, differences, op, row

from kcpgen.runtime import build_cp_context
from kcpgen.runtime.context_parallel.shard import Shard
from kcpgen.runtime.context_parallel.torch_op import TorchRun
from kcpgen.simulate.call import Spread, long_memory
from kcpgen.simulate.ranks import SimulatedTransport, run_ranks

EXACT = 1e-10


@pytest.mark.parametrize(("ranks", "lengths"), ROWS)
@pytest.mark.parametrize("name", OPS)
def test_ranks_agree_with_one_device(name: str, ranks: int, lengths: tuple[int, ...]) -> None:
    found = differences(name, row(lengths), Spread(ranks=ranks))
    assert max(found.values()) < EXACT, found


@pytest.mark.parametrize(("ranks", "lengths"), ROWS)
def test_a_forward_goes_through_a_sequence_once_but_where_it_comes_in_and_goes_on(
    ranks: int, lengths: tuple[int, ...]
) -> None:
    case = row(lengths)
    inputs = long_memory(op("kda"), case, "cpu")
    counts: list[Counter[int]] = [Counter() for _ in range(ranks)]
    call = TorchRun.call

    def counted(run: TorchRun, tensors: Any, sequences: range, initial: Any) -> Any:
        counts[run.cp.rank].update(sequences)
        return call(run, tensors, sequences, initial)

    def body(transport: SimulatedTransport) -> Shard:
        cp = build_cp_context(torch.tensor(case.offsets), transport)
        tokens = {name: x.detach()[:, cp.shard.start : cp.shard.stop] for name, x in inputs.tokens.items()}
        op("kda").chunk(**tokens, cp_context=cp)
        return cp.shard

    with mock.patch.object(TorchRun, "call", counted):
        shards = run_ranks(ranks, body)
    for shard, count in zip(shards, counts, strict=True):
        assert sorted(count) == list(range(shard.sequences))
        assert all((times > 1) is shard.interior for times in count.values())


@pytest.mark.parametrize("name", OPS)
def test_scan_merges_like_fold(name: str) -> None:
    found = differences(name, row((7, 121)), Spread(ranks=8, merge="scan"))
    assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("layout", ["uneven", (5, 40, 1, 55)])
@pytest.mark.parametrize("name", ["dplr", "gla"])
def test_uneven_shards(name: str, layout: str | tuple[int, ...]) -> None:
    found = differences(name, row((33, 60, 8)), Spread(ranks=4, layout=layout))
    assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("changes", [{"initial_state": False}, {"loss": "state"}, {"loss": "output"}])
@pytest.mark.parametrize("name", ["kda", "simple_gla"])
def test_states_may_be_left_out(name: str, changes: dict[str, object]) -> None:
    found = differences(name, row((0, 50, 78), **changes), Spread(ranks=4))
    assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("keywords", [{"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}])
@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_gradients_of_parameters_add_up_over_ranks(name: str, keywords: dict[str, bool]) -> None:
    found = differences(name, row((70, 34), keywords=keywords), Spread(ranks=4))
    assert {"dA_log", "ddt_bias"} <= set(found)
    assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("name", ["kda", "delta_rule"])
def test_head_groups_and_per_token_backend(name: str) -> None:
    grouped = row((21, 43), value_heads=4)
    assert max(differences(name, grouped, Spread(ranks=4)).values()) < EXACT
    assert max(differences(name, row((21, 43), backend="naive"), Spread(ranks=4)).values()) < EXACT


def test_torch_compile_leaves_a_call_on_ranks_out_of_its_graphs() -> None:
    case = row((50, 14))
    inputs = long_memory(op("gla"), case, "cpu")

    def body(transport: SimulatedTransport) -> tuple[torch.Tensor, torch.Tensor]:
        cp = build_cp_context(torch.tensor(case.offsets), transport)
        tokens = {name: x.detach()[:, cp.shard.start : cp.shard.stop] for name, x in inputs.tokens.items()}

        def f(v: torch.Tensor) -> torch.Tensor:
            return 2 * op("gla").chunk(**{**tokens, "v": v}, cp_context=cp)[0]

        return f(tokens["v"]), torch.compile(f, backend="eager")(tokens["v"])

    for plain, compiled in run_ranks(2, body):
        assert torch.equal(plain, compiled)
