"""`build_cp_context`: what it says of a rank, what it refuses, and that it looks at values, not at objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cp_rows import op, row

from kcpgen.runtime import CPContext, build_cp_context
from kcpgen.simulate.call import long_memory
from kcpgen.simulate.ranks import SimulatedTransport, run_ranks


def contexts(ranks: int, offsets: list[int], **keywords: Any) -> list[CPContext]:
    return run_ranks(ranks, lambda transport: build_cp_context(torch.tensor(offsets), transport, **keywords))


def test_fields() -> None:
    found = contexts(4, [0, 700, 1024], conv1d_kernel_size=4)
    assert [cp.cu_seqlens.tolist() for cp in found] == [[0, 256], [0, 256], [0, 188, 256], [0, 256]]
    assert all(cp.cu_seqlens.dtype == torch.int32 and cp.cu_seqlens_cpu.dtype == torch.int32 for cp in found)
    assert [cp.pre_num_ranks for cp in found] == [0, 1, 2, 1]
    assert [cp.post_num_ranks for cp in found] == [2, 1, 1, 0]
    assert [cp.is_first_rank for cp in found] == [True, False, False, False]
    assert [cp.is_last_rank for cp in found] == [False, False, False, True]
    assert [cp.pre_num_conv_tokens for cp in found] == [0, 3, 3, 3]
    assert [(cp.rank, cp.world_size, cp.tokens) for cp in found] == [(rank, 4, 256) for rank in range(4)]


def test_the_conv_halo_stays_inside_a_document() -> None:
    """Documents of 37, 51 and 40 tokens on 2 ranks: the second rank begins with token 27 of the second document."""
    assert [cp.pre_num_conv_tokens for cp in contexts(2, [0, 37, 88, 128], conv1d_kernel_size=4)] == [0, 3]
    assert [cp.pre_num_conv_tokens for cp in contexts(2, [0, 63, 128], conv1d_kernel_size=4)] == [0, 1]
    assert [cp.pre_num_conv_tokens for cp in contexts(2, [0, 64, 128], conv1d_kernel_size=4)] == [0, 0]
    assert [cp.pre_num_conv_tokens for cp in contexts(2, [0, 37, 88, 128])] == [0, 0]


def test_offsets_are_read_by_value() -> None:
    """The same tensor with other numbers in it is another row."""
    offsets = torch.tensor([0, 20, 64])

    def twice(transport: SimulatedTransport) -> tuple[list[int], list[int]]:
        before = build_cp_context(offsets, transport).cu_seqlens.tolist()
        return before, build_cp_context(torch.tensor([0, 40, 64]), transport).cu_seqlens.tolist()

    assert run_ranks(2, twice)[0] == ([0, 20, 32], [0, 32])
    offsets[1] = 40
    assert run_ranks(2, twice)[0] == ([0, 32], [0, 32])


def test_host_offsets_are_used_without_a_look_at_the_device_ones() -> None:
    def body(transport: SimulatedTransport) -> CPContext:
        meta = torch.empty(3, dtype=torch.int64, device="meta")  # reading it would raise
        return build_cp_context(meta, transport, cu_seqlens_cpu=torch.tensor([0, 20, 64]))

    first, _ = run_ranks(2, body)
    assert first.cu_seqlens_cpu.tolist() == [0, 20, 32]


def test_layouts() -> None:
    assert [cp.tokens for cp in contexts(3, [0, 10], layout="uneven")] == [4, 3, 3]
    assert [cp.tokens for cp in contexts(3, [0, 10], layout=(1, 7, 2))] == [1, 7, 2]


@pytest.mark.parametrize(
    ("error", "text", "ranks", "offsets", "keywords"),
    [
        (ValueError, "10 tokens do not divide into 4 equal shards", 4, [0, 10], {}),
        (ValueError, "layout='uneven'", 4, [0, 10], {}),
        (ValueError, "3 tokens on 4 ranks", 4, [0, 3], {}),
        (ValueError, "3 tokens on 4 ranks", 4, [0, 3], {"layout": "uneven"}),
        (ValueError, "layout is 'zigzag'", 2, [0, 10], {"layout": "zigzag"}),
        (ValueError, "2 token counts of at least 1 that add up to 10", 2, [0, 10], {"layout": (5, 6)}),
        (ValueError, "2 token counts of at least 1 that add up to 10", 2, [0, 10], {"layout": (0, 10)}),
        (ValueError, "cu_seqlens falls from 8 to 4 at sequence 1", 2, [0, 8, 4], {}),
        (ValueError, "begin at 0", 2, [1, 8], {}),
        (ValueError, "merge is 'tree'", 2, [0, 8], {"merge": "tree"}),
        (ValueError, "timeout is 0", 2, [0, 8], {"timeout": 0}),
        (ValueError, "check is 'never'", 2, [0, 8], {"check": "never"}),
        (ValueError, "conv1d_kernel_size is 0", 2, [0, 8], {"conv1d_kernel_size": 0}),
        (ValueError, "cu_seqlens_cpu has 2 values", 2, [0, 4, 8], {"cu_seqlens_cpu": torch.tensor([0, 8])}),
        (TypeError, "cu_seqlens_cpu is of type list", 2, [0, 8], {"cu_seqlens_cpu": [0, 8]}),
        (TypeError, "unexpected keyword argument 'cu_seqlen'", 2, [0, 8], {"cu_seqlen": None}),
    ],
)
def test_refusals(error: type[Exception], text: str, ranks: int, offsets: list[int], keywords: dict[str, Any]) -> None:
    with pytest.raises(error, match=text.replace("(", r"\(")):
        contexts(ranks, offsets, **keywords)


def test_wrong_offsets_and_no_group() -> None:
    with pytest.raises(TypeError, match="float32; allowed: int32, int64"):
        run_ranks(2, lambda transport: build_cp_context(torch.tensor([0.0, 8.0]), transport))
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        build_cp_context(torch.tensor([0, 8]))


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (ValueError, "`cu_seqlens` is given; allowed: None together with `cp_context`", {"cu_seqlens": [0, 32]}),
        (ValueError, "T = 31 tokens; allowed: the 32 tokens that rank 0 of 2 holds", {"tokens": 31}),
        (ValueError, r"`initial_state` is of shape \[1, 2, 8, 6\]; allowed: \[N, HV, K, V\] = \[3,", {"states": 1}),
        (ValueError, "given with a batch of B = 2", {"batch": 2}),
        (TypeError, "`cp_context` is of type str", {"cp_context": "rank 0"}),
        (TypeError, "cp_contxt", {"cp_contxt": None}),
    ],
)
def test_the_op_refuses(error: type[Exception], text: str, change: dict[str, Any]) -> None:
    case = row((20, 14, 30))
    inputs = long_memory(op("kda"), case, "cpu")

    def body(transport: SimulatedTransport) -> None:
        keywords: dict[str, Any] = {"cp_context": build_cp_context(torch.tensor(case.offsets), transport)}
        tokens = {n: x.detach()[:, : change.get("tokens", 32)] for n, x in inputs.tokens.items()}
        if "batch" in change:
            tokens = {n: x.repeat(2, *[1] * (x.ndim - 1)) for n, x in tokens.items()}
        if "states" in change:
            keywords["initial_state"] = torch.zeros(1, 2, 8, 6, dtype=torch.float64)
        if "cu_seqlens" in change:
            keywords["cu_seqlens"] = torch.tensor(change["cu_seqlens"])
        keywords |= {n: x for n, x in change.items() if n.startswith("cp_con")}
        op("kda").chunk(**tokens, **keywords)

    with pytest.raises(error, match=text):
        run_ranks(2, body)
