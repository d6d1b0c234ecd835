"""`build_cp_context`: global sequence offsets to what one rank must know, on the host and without another rank."""

from __future__ import annotations

import atexit
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from kcpgen.runtime.context_parallel.deferred import check_deferred
from kcpgen.runtime.context_parallel.merge import Method
from kcpgen.runtime.context_parallel.payload import fingerprint, shown
from kcpgen.runtime.context_parallel.shard import Shard, check_offsets, even_bounds, make_shard
from kcpgen.runtime.context_parallel.transport import GroupTransport, Transport

TIMEOUT = 300.0


@dataclass(frozen=True, kw_only=True, eq=False)
class CPContext:
    """One rank's place in a row of tokens that is spread over a group of ranks, for `chunk_<op>(..., cp_context=)`.

    cu_seqlens: int32 [n + 1], offsets of this rank's own sequences in its own tokens, on the device of the global
    ones; cu_seqlens_cpu: the same on the host. pre_num_conv_tokens: how many tokens just before this rank's first one
    a causal convolution of `conv1d_kernel_size` may look at: never those of another sequence. bounds: token offsets
    of all ranks in the global row, [W + 1]. timeout: seconds that a rank waits for the others.
    """

    transport: Transport
    shard: Shard
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    conv1d_kernel_size: int | None
    pre_num_conv_tokens: int
    merge: Method
    timeout: float
    check: str

    @property
    def group(self) -> dist.ProcessGroup | Transport:
        return self.transport.group if isinstance(self.transport, GroupTransport) else self.transport

    @property
    def rank(self) -> int:
        return self.shard.rank

    @property
    def world_size(self) -> int:
        return self.shard.world_size

    @property
    def tokens(self) -> int:
        """How many tokens this rank holds."""
        return self.shard.tokens

    @property
    def global_sequences(self) -> int:
        """How many sequences the whole row has: initial and final states have a row for each."""
        return self.shard.global_sequences

    @property
    def pre_num_ranks(self) -> int:
        """How many ranks before hold tokens of this rank's first sequence."""
        return self.shard.pre_num_ranks

    @property
    def post_num_ranks(self) -> int:
        """How many ranks after hold tokens of this rank's last sequence."""
        return self.shard.post_num_ranks

    @cached_property
    def about(self) -> Mapping[str, str | int]:
        """What has to be the same on every rank, in a form to be compared and shown."""
        return {"cu_seqlens": shown(self.offsets), "shards": shown(self.bounds)}

    @cached_property
    def fingerprints(self) -> tuple[int, int]:
        """The same as numbers, for headers."""
        return fingerprint(self.offsets), fingerprint(self.bounds)

    def meet(self) -> None:
        """The first time, compare with the other ranks. Raises RankMismatchError; see `Transport.meet`."""
        self.transport.meet(self, self.about, self.timeout, alone=not self.shard.crossing)

    def settle(self) -> None:
        """Wait until the device has done what it was given, and check the exchanges that this rank has had so far.

        After it, and until the next call, nothing of ours touches the device, in any thread: a CUDA graph can be
        captured. Raises what went wrong in an earlier call, see docs/context_parallel.md.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        if isinstance(self.transport, GroupTransport):
            self.transport.settle(self.timeout)
        check_deferred(wait=True)

    @property
    def is_first_rank(self) -> bool:
        """This rank's first sequence begins here."""
        return not self.shard.receives

    @property
    def is_last_rank(self) -> bool:
        """This rank's last sequence ends here."""
        return not self.shard.sends


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup | Transport | None = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    layout: str | Sequence[int] = "contiguous",
    *,
    merge: Method = "fold",
    timeout: float = TIMEOUT,
    check: str = "deferred",
) -> CPContext:
    """What this rank of `group` holds of one packed row, given the offsets of the whole row.

    Rank r holds the tokens [r T / W, (r + 1) T / W). Nothing is exchanged here; every rank must be given the same.

    Args:
        cu_seqlens: int32 or int64 [N + 1], from 0 to the T tokens of all ranks together. On a device it is read back,
            which waits for the device, unless `cu_seqlens_cpu` is given.
        group: a torch.distributed group, by default the one of all ranks. conv1d_kernel_size: width of a causal
        convolution before the op, for `pre_num_conv_tokens`. cu_seqlens_cpu: the same offsets on the CPU; trusted to
        equal `cu_seqlens`. layout: "contiguous" needs T to be a multiple of W; "uneven" gives the first T % W ranks
        one token more; or the
            token count of each rank.
        merge: how summaries of ranks are put together, "fold" (a step a rank) or "scan" (log2 of that, more work).
        timeout: seconds that a rank waits for the others in one exchange before it raises. check: when the ranks'
        headers are compared on a CUDA device: "deferred" (with the next exchange, the host never
            waits) or "now".

    Raises:
        TypeError, ValueError: an argument of a wrong type or value; T that W does not divide; fewer tokens than
        ranks. RuntimeError: torch.distributed is not initialised, or this process is not in the group.
    """
    transport = _transport(group)
    offsets = _offsets(cu_seqlens, cu_seqlens_cpu)
    bounds = shard_bounds(offsets[-1], transport.size, layout)
    if conv1d_kernel_size is not None and (not _is_count(conv1d_kernel_size) or conv1d_kernel_size < 1):
        raise ValueError(f"conv1d_kernel_size is {conv1d_kernel_size!r}; allowed: None or an integer of at least 1")
    if merge not in ("fold", "scan"):
        raise ValueError(f"merge is {merge!r}; allowed: 'fold', 'scan'")
    if check not in ("deferred", "now"):
        raise ValueError(f"check is {check!r}; allowed: 'deferred', 'now'")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}; allowed: a positive number of seconds")
    shard = make_shard(offsets, bounds, transport.rank)
    host, device = _local_offsets(shard.offsets, str(cu_seqlens.device))
    return CPContext(
        transport=transport,
        shard=shard,
        offsets=offsets,
        bounds=bounds,
        cu_seqlens=device,
        cu_seqlens_cpu=host,
        conv1d_kernel_size=conv1d_kernel_size,
        pre_num_conv_tokens=min((conv1d_kernel_size or 1) - 1, shard.pre_num_tokens),
        merge=merge,
        timeout=float(timeout),
        check=check,
    )


_transports: dict[dist.ProcessGroup, GroupTransport] = {}


@atexit.register
def _end_transports() -> None:
    """A group's threads, and ours, need the interpreter, if only to let tensors of the last exchange go. What ends with
    it and not before, as the values of a module do, would have them abort a process that has done its work."""
    for transport in _transports.values():
        transport.end()
    _transports.clear()


def _transport(group: dist.ProcessGroup | Transport | None) -> Transport:
    """One transport for each group: it counts the group's exchanges."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return group
    if not dist.is_initialized():
        raise RuntimeError("build_cp_context needs torch.distributed: call init_process_group first")
    found = dist.group.WORLD if group is None else group
    if found is None or dist.get_rank(found) < 0:
        raise RuntimeError("build_cp_context: this process is not a rank of the group")
    if found not in _transports:
        _transports[found] = GroupTransport(found)
    return _transports[found]


def _offsets(cu_seqlens: object, cu_seqlens_cpu: object) -> tuple[int, ...]:
    _check_tensor("cu_seqlens", cu_seqlens)
    assert isinstance(cu_seqlens, Tensor)
    source = cu_seqlens
    if cu_seqlens_cpu is not None:
        _check_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
        assert isinstance(cu_seqlens_cpu, Tensor)
        if cu_seqlens_cpu.device.type != "cpu" or len(cu_seqlens_cpu) != len(cu_seqlens):
            raise ValueError(
                f"cu_seqlens_cpu has {len(cu_seqlens_cpu)} values on {cu_seqlens_cpu.device}; "
                f"allowed: the {len(cu_seqlens)} values of cu_seqlens, on cpu"
            )
        source = cu_seqlens_cpu
    offsets = tuple(int(value) for value in source.tolist())
    check_offsets(offsets)
    return offsets


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__}; allowed: a torch.Tensor")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {x.dtype}; allowed: int32, int64")
    if x.ndim != 1 or len(x) < 2:
        raise ValueError(f"{name} is of shape {list(x.shape)}; allowed: [N + 1] for N >= 1 sequences")


def shard_bounds(tokens: int, world_size: int, layout: str | Sequence[int]) -> tuple[int, ...]:
    """Token offsets of the ranks, [W + 1]; `layout` as in `build_cp_context`. Raises ValueError."""
    if tokens < world_size:
        raise ValueError(f"{tokens} tokens on {world_size} ranks; allowed: at least one token a rank")
    if isinstance(layout, str):
        return _named_bounds(tokens, world_size, layout)
    counts = tuple(layout)
    if len(counts) != world_size or not all(_is_count(n) and n >= 1 for n in counts) or sum(counts) != tokens:
        raise ValueError(
            f"layout is {list(counts)}; allowed: {world_size} token counts of at least 1 that add up to {tokens}"
        )
    return (0, *accumulate(counts))


def _named_bounds(tokens: int, world_size: int, layout: str) -> tuple[int, ...]:
    if layout not in ("contiguous", "uneven"):
        raise ValueError(f"layout is {layout!r}; allowed: 'contiguous', 'uneven', or the token count of each rank")
    if layout == "contiguous" and tokens % world_size:
        raise ValueError(
            f"{tokens} tokens do not divide into {world_size} equal shards ({tokens} % {world_size} = "
            f"{tokens % world_size}); allowed: a multiple of {world_size}, or layout='uneven' on all ranks"
        )
    return even_bounds(tokens, world_size)


def _is_count(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


@lru_cache(maxsize=64)
def _local_offsets(offsets: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    host = torch.tensor(offsets, dtype=torch.int32)
    return host, host.to(device, non_blocking=True)
