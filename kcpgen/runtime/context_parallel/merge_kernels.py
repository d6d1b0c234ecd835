"""The merge of dense summaries in Triton. Products run in tf32x3: float32's accuracy, which tf32 is not."""

from __future__ import annotations

import os

import triton
import triton.language as tl
from torch import Tensor

from kcpgen.runtime.context_parallel.merge import Method, in_order, merge_elementwise, scan
from kcpgen.runtime.context_parallel.payload import Kind

# Triton's interpreter has nothing to time.
TILES = [triton.Config({"BV": width}, num_warps=warps) for width, warps in ((32, 4), (16, 4), (64, 4), (64, 8))]
TILES = TILES[:1] if os.environ.get("TRITON_INTERPRET") == "1" else TILES


@triton.autotune(configs=TILES, key=["K", "V"])
@triton.jit
def fold_kernel(
    states_ptr, state_stride, transitions_ptr, transition_stride, merged_ptr, ranks,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, BACKWARD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program folds BV columns of one head's state over all ranks. `merged` holds the state between two ranks."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    head = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    rows = tl.arange(0, KP)
    tile = head * K * V + rows[:, None] * V + columns[None, :]
    inside = (rows < K)[:, None] & (columns < V)[None, :]

    first = ranks - 1 if BACKWARD else 0
    S = tl.load(states_ptr + first * state_stride + tile, mask=inside, other=0.0)
    for step in tl.range(1, ranks):
        tl.store(merged_ptr + tile, S, mask=inside)
        tl.debug_barrier()
        rank = tl.zeros((), tl.int64) + (ranks - 1 - step if BACKWARD else step)
        M_ptr = transitions_ptr + (rank if BACKWARD else rank - 1) * transition_stride + head * K * K
        S = tl.load(states_ptr + rank * state_stride + tile, mask=inside, other=0.0)
        for start in tl.static_range(0, KP, BK):
            inner = start + tl.arange(0, BK)
            M_tile = inner[None, :] * K + rows[:, None] if BACKWARD else rows[:, None] * K + inner[None, :]
            M = tl.load(M_ptr + M_tile, mask=(rows < K)[:, None] & (inner < K)[None, :], other=0.0)
            part = (inner < K)[:, None] & (columns < V)[None, :]
            before = tl.load(merged_ptr + head * K * V + inner[:, None] * V + columns[None, :], mask=part, other=0.0)
            S += tl.dot(M, before, input_precision="tf32x3")
        tl.debug_barrier()
    tl.store(merged_ptr + tile, S, mask=inside)


@triton.jit
def product_kernel(
    A_ptr, A_batch, A_head, A_row, A_column, B_ptr, B_batch, B_head, D_ptr, D_batch, D_head, out_ptr,
    K: tl.constexpr, N: tl.constexpr, HV: tl.constexpr, ADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """out = A B + D, [K, K] by [K, N], for every pair of neighbours and every head; one program a tile."""
    tiles: tl.constexpr = ((K + BM - 1) // BM) * ((N + BN - 1) // BN)
    pair = (tl.program_id(0) // tiles // HV).to(tl.int64)
    head = (tl.program_id(0) // tiles) % HV
    tile = tl.program_id(0) % tiles
    rows = (tile // ((N + BN - 1) // BN)) * BM + tl.arange(0, BM)
    columns = (tile % ((N + BN - 1) // BN)) * BN + tl.arange(0, BN)
    inside = (rows < K)[:, None] & (columns < N)[None, :]
    A_ptr += pair * A_batch + head.to(tl.int64) * A_head
    B_ptr += pair * B_batch + head.to(tl.int64) * B_head
    total = tl.zeros((BM, BN), tl.float32)
    if ADDED:
        D_ptr += pair * D_batch + head.to(tl.int64) * D_head
        total += tl.load(D_ptr + rows[:, None] * N + columns[None, :], mask=inside, other=0.0)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        A_inside = (rows < K)[:, None] & (inner < K)[None, :]
        B_inside = (inner < K)[:, None] & (columns < N)[None, :]
        A = tl.load(A_ptr + rows[:, None] * A_row + inner[None, :] * A_column, mask=A_inside, other=0.0)
        B = tl.load(B_ptr + inner[:, None] * N + columns[None, :], mask=B_inside, other=0.0)
        total += tl.dot(A, B, input_precision="tf32x3")
    out = out_ptr + (pair * HV + head) * K * N + rows[:, None] * N + columns[None, :]
    tl.store(out, total, mask=inside)


def merge_in_triton(
    states: Tensor, transitions: Tensor | None, *, kind: Kind, backward: bool, method: Method = "fold"
) -> Tensor:
    """As `merge_in_torch`, in float32."""
    if kind != "dense" or transitions is None or len(states) == 1:
        return merge_elementwise(states, transitions, kind=kind, backward=backward, method=method)
    if method == "scan":
        return scan(*in_order(states, transitions, kind=kind, backward=backward), product)
    return _fold(states, transitions, backward)


def _fold(states: Tensor, transitions: Tensor, backward: bool) -> Tensor:
    ranks, HV, K, V = states.shape
    merged = states.new_empty(HV, K, V)
    KP = max(16, triton.next_power_of_2(K))
    fold_kernel[lambda meta: (HV * triton.cdiv(V, meta["BV"]),)](
        states, states.stride(0), transitions, transitions.stride(0), merged, ranks,
        K=K, V=V, KP=KP, BK=min(KP, 32), BACKWARD=backward,
    )  # fmt: skip
    return merged


def product(left: Tensor, right: Tensor, added: Tensor | None) -> Tensor:
    """left [n, HV, K, K] right [n, HV, K, N] + added; any strides on the left, dense matrices on the right."""
    pairs, HV, K, N = right.shape
    right = _dense_matrices(right)
    added = None if added is None else _dense_matrices(added)
    out = right.new_empty(pairs, HV, K, N)
    tile = min(64, max(16, triton.next_power_of_2(max(K, N))))
    grid = (pairs * HV * triton.cdiv(K, tile) * triton.cdiv(N, tile),)
    product_kernel[grid](
        left, *left.stride(), right, *right.stride()[:2],
        added, *((0, 0) if added is None else added.stride()[:2]), out,
        K=K, N=N, HV=HV, ADDED=added is not None, BM=tile, BN=tile, BK=min(32, tile), num_warps=4,
    )  # fmt: skip
    return out


def _dense_matrices(x: Tensor) -> Tensor:
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()
