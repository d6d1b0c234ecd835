"""What enters each segment of a cut sequence, from summaries of the segments: kernels over all chains at once.

    S[j + 1] = M[j] S[j] + S_ext[j]     backward    dS[j] = M[j]^T dS[j + 1] + dS_ext[j]

Where the sequence's own initial state is known before summaries are made, the first segment starts from it, and its
S_ext has it in it already; so has the last one's dS_ext the gradient of the final state: M is that of inner segments
only. What is made while that state is still awaited (`ahead`) starts from zero, and has an M for every summary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kcpgen.runtime.context_parallel.payload import Kind


@triton.jit
def fold_kernel(
    chains_ptr, given_ptr, summaries_ptr, transitions_ptr, states_ptr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BACKWARD: tl.constexpr, GIVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Dense M. One program folds BV columns of one head's state along one chain, handing it on through `states`."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    chain = (tl.program_id(0) // blocks // HV).to(tl.int64)
    head = (tl.program_id(0) // blocks) % HV
    columns = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    rows = tl.arange(0, KP)
    tile = rows[:, None] * V + columns[None, :]
    inside = (rows < K)[:, None] & (columns < V)[None, :]
    first = tl.load(chains_ptr + 3 * chain).to(tl.int64)
    steps = tl.load(chains_ptr + 3 * chain + 1) - 1

    S = tl.zeros((KP, BV), tl.float32)
    if GIVEN:
        sequence = tl.load(chains_ptr + 3 * chain + 2).to(tl.int64)
        S += tl.load(given_ptr + (sequence * HV + head) * K * V + tile, mask=inside, other=0.0)
    tl.store(states_ptr + ((first + steps if BACKWARD else first) * HV + head) * K * V + tile, S, mask=inside)
    tl.debug_barrier()
    for step in tl.range(0, steps, num_stages=1):  # nothing may be loaded ahead: a step reads what the last one stored
        at = steps - 1 - step if BACKWARD else step
        target = first + at if BACKWARD else first + at + 1
        S = tl.load(summaries_ptr + ((first - chain + at) * HV + head) * K * V + tile, mask=inside, other=0.0)
        if step >= (0 if AHEAD else 1):
            source = target + 1 if BACKWARD else target - 1
            inner = first - chain + at if AHEAD else first - 2 * chain + (at if BACKWARD else at - 1)
            M_ptr = transitions_ptr + (inner * HV + head) * K * K
            S_ptr = states_ptr + (source * HV + head) * K * V
            for start in tl.static_range(0, KP, BK):
                some = start + tl.arange(0, BK)
                M_tile = some[None, :] * K + rows[:, None] if BACKWARD else rows[:, None] * K + some[None, :]
                M = tl.load(M_ptr + M_tile, mask=(rows < K)[:, None] & (some < K)[None, :], other=0.0)
                part = (some < K)[:, None] & (columns < V)[None, :]
                before = tl.load(S_ptr + some[:, None] * V + columns[None, :], mask=part, other=0.0)
                S += tl.dot(M, before, input_precision="tf32x3")
        tl.store(states_ptr + (target * HV + head) * K * V + tile, S, mask=inside)
        tl.debug_barrier()


@triton.jit
def fold_decays_kernel(
    chains_ptr, given_ptr, summaries_ptr, transitions_ptr, states_ptr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, BACKWARD: tl.constexpr, GIVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Likewise for M of K numbers a head (DECAY 2), of one (1), or none at all (0)."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    chain = (tl.program_id(0) // blocks // HV).to(tl.int64)
    head = (tl.program_id(0) // blocks) % HV
    columns = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    rows = tl.arange(0, KP)
    tile = rows[:, None] * V + columns[None, :]
    inside = (rows < K)[:, None] & (columns < V)[None, :]
    first = tl.load(chains_ptr + 3 * chain).to(tl.int64)
    steps = tl.load(chains_ptr + 3 * chain + 1) - 1

    S = tl.zeros((KP, BV), tl.float32)
    if GIVEN:
        sequence = tl.load(chains_ptr + 3 * chain + 2).to(tl.int64)
        S += tl.load(given_ptr + (sequence * HV + head) * K * V + tile, mask=inside, other=0.0)
    tl.store(states_ptr + ((first + steps if BACKWARD else first) * HV + head) * K * V + tile, S, mask=inside)
    if not AHEAD:
        S = tl.zeros((KP, BV), tl.float32)
    for step in tl.range(0, steps):
        at = steps - 1 - step if BACKWARD else step
        target = first + at if BACKWARD else first + at + 1
        inner = (first - chain + at if AHEAD else first - 2 * chain + (at if BACKWARD else at - 1)) * HV + head
        there = step >= (0 if AHEAD else 1)
        if DECAY == 2:
            S *= tl.load(transitions_ptr + inner * K + rows, mask=(rows < K) & there, other=0.0)[:, None]
        if DECAY == 1:
            S *= tl.load(transitions_ptr + inner, mask=there, other=0.0)
        S += tl.load(summaries_ptr + ((first - chain + at) * HV + head) * K * V + tile, mask=inside, other=0.0)
        tl.store(states_ptr + (target * HV + head) * K * V + tile, S, mask=inside)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def decays_kernel(
    decay_ptr, sequences_ptr, out_ptr,
    HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One program multiplies the decays of one segment and head, [chunks, HV, KP] to [segments, HV, K]."""
    sequence = (tl.program_id(0) // HV).to(tl.int64)
    head = tl.program_id(0) % HV
    chunks = tl.cdiv(tl.load(sequences_ptr + 4 * sequence + 2), C)
    first_chunk = tl.load(sequences_ptr + 4 * sequence + 3).to(tl.int64)
    keys = tl.arange(0, KP)
    product = tl.zeros((BC, KP), tl.float32) + 1.0
    for start in tl.range(0, chunks, BC):
        c = start + tl.arange(0, BC)
        at = ((first_chunk + c) * HV + head)[:, None] * KP + keys[None, :]
        product *= tl.load(decay_ptr + at, mask=(c < chunks)[:, None], other=1.0)
    total = tl.reduce(product, 0, _times)
    tl.store(out_ptr + (sequence * HV + head) * K + keys, total, mask=keys < K)


def fold(
    kind: Kind,
    chains: Tensor,
    given: Tensor | None,
    summaries: Tensor,
    transitions: Tensor | None,
    states: Tensor,
    *,
    backward: bool,
    ahead: bool = False,
) -> None:
    """Fill `states` [segments, HV, K, V] fp32: what enters each segment, or backward the gradient of what leaves it.

    chains: int32 [n, 3], of each the first row, the number of segments, the number of the sequence. given: the state
    that enters each sequence (leaves it, backward), [N, HV, K, V], None for zero. summaries: S_ext of all segments but
    the last of each chain (the first, backward), [segments - n, HV, K, V]. transitions: M of segments that are neither
    first nor last, [segments - 2 n, HV, ...], or where both were made `ahead` of `given`, of all that have a summary;
    None for the identity.
    """
    HV, K, V = states.shape[1:]
    KP, BV = max(16, triton.next_power_of_2(K)), 16  # few columns a program: a chain is serial, its programs are few
    grid = (len(chains) * HV * triton.cdiv(V, BV),)
    tensors = (chains, given, summaries, transitions, states)
    sizes = {"HV": HV, "K": K, "V": V, "KP": KP, "BV": BV}
    sizes |= {"BACKWARD": backward, "GIVEN": given is not None, "AHEAD": ahead}
    if kind == "dense":
        fold_kernel[grid](*tensors, BK=min(KP, 32), num_warps=8 if KP > 128 else 4, **sizes)
    else:
        decay = {"diagonal": 2, "scalar": 1, "identity": 0}[kind]
        fold_decays_kernel[grid](*tensors, DECAY=decay, num_warps=4, **sizes)


def products_of_decays(decays: Tensor, sequences: Tensor, chunk: int, out: Tensor) -> None:
    """decays: of whole chunks, [chunks, HV, KP] or [chunks, HV]; out: [segments, HV, K] or [segments, HV]."""
    HV, K = out.shape[1], out.shape[2] if out.ndim == 3 else 1
    KP = decays.shape[2] if decays.ndim == 3 else 1
    decays_kernel[(len(sequences) * HV,)](decays, sequences, out, HV=HV, K=K, KP=KP, C=chunk, BC=16, num_warps=4)
