"""fla-core's context parallelism (0.6.0), for comparison: the same call on real ranks and on simulated ones.

Optional, and never imported by the product. Names and signatures as in fla/ops/cp and the ops' chunk.py there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cp_parts import timed
from torch import Tensor

# op of ours -> module and function of theirs, which take token inputs in the same order.
CALLS = {
    "kda": ("fla.ops.kda", "chunk_kda"),
    "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "dplr": ("fla.ops.generalized_delta_rule", "chunk_dplr_delta_rule"),
}
EXCHANGE = "fla.ops.cp.chunk_delta_h"


def available(op: str) -> Callable[..., Any] | None:
    """Their function, or None when fla or the op is not there."""
    if op not in CALLS:
        return None
    module, name = CALLS[op]
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError:
        return None
    return found


def version() -> str:
    try:
        return str(importlib.import_module("fla").__version__)
    except ImportError:
        return "none"


def context(offsets: Tensor, group: Any) -> Any:
    from fla.ops.cp import build_cp_context

    return build_cp_context(offsets, group=group, cu_seqlens_cpu=offsets.cpu())


@contextmanager
def parts() -> Iterator[None]:
    """Inside, their pre-process and merge kernels tell the current clock, and so does the wait in their gather."""
    module = importlib.import_module(EXCHANGE)
    with (
        mock.patch.object(module, "chunk_cp_fwd_h", timed("pre-process", module.chunk_cp_fwd_h)),
        mock.patch.object(module, "chunk_cp_bwd_dh", timed("pre-process", module.chunk_cp_bwd_dh)),
        mock.patch.object(module, "chunk_cp_merge", timed("merge", module.chunk_cp_merge)),
        mock.patch.object(module, "all_gather_into_tensor", timed("gather", module.all_gather_into_tensor)),
    ):
        yield


@contextmanager
def counting(count: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, `count` is shown what a rank sends."""
    module = importlib.import_module(EXCHANGE)
    gather = module.all_gather_into_tensor

    def counted(payload: Tensor, *args: Any, **keywords: Any) -> Any:
        count(payload)
        return gather(payload, *args, **keywords)

    with mock.patch.object(module, "all_gather_into_tensor", counted):
        yield


@contextmanager
def simulated() -> Iterator[None]:
    """Inside, their exchange goes through simulated transports, each the `group` of a `simulated_context`."""
    module = importlib.import_module(EXCHANGE)
    ranks = SimpleNamespace(get_rank=lambda group: group.rank, get_world_size=lambda group: group.size)

    def gather(payload: Tensor, out: Tensor | None = None, group: Any = None, async_op: bool = False) -> Any:
        group.next_call()
        return group.all_gather(payload, 0.0).wait(), None

    with mock.patch.object(module, "dist", ranks), mock.patch.object(module, "all_gather_into_tensor", gather), parts():
        yield


def simulated_context(offsets: Tensor, transport: Any) -> Any:
    from fla.ops.cp.context import get_cp_cu_seqlens

    return get_cp_cu_seqlens(offsets, offsets.cpu(), world_size=transport.size, rank=transport.rank, group=transport)
