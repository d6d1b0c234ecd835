"""Context parallelism of the Triton kernels: in the interpreter against one device, and compiled for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cp_rows import OPS, ROOT

INTERPRETED = Path(__file__).resolve().with_name("cp_interpreted.py")
SMALL = ("--dtype", "fp32", "--key-width", "16", "--value-width", "16", "--reference", "eager")


def interpreted(*command: str) -> str:
    """Standard output of a process in which Triton interprets: it decides that when kernels are defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert not ran.stderr, ran.stderr
    return ran.stdout


def simulated(name: str, ranks: int, lengths: str, *more: str) -> str:
    arguments = ("--generated", f"generated/{name}", "--ranks", str(ranks), "--lengths", lengths)
    return interpreted("-m", "kcpgen.simulate", *arguments, *SMALL, *more)


def test_two_ranks_cut_on_a_chunk_border_are_bit_identical_in_bf16() -> None:
    different = json.loads(interpreted(str(INTERPRETED), "two_ranks"))
    assert different == {name: [] for name in OPS}


def test_merged_states_are_those_of_one_device_as_far_as_rounding_says() -> None:
    """To fp32 rounding where nothing is erased, or where no operand is bf16. What a bf16 op erases, the scan rounds
    with the state already in it, and the chain of M without: there only the merging itself is exact."""
    found = json.loads(interpreted(str(INTERPRETED), "entering_states"))
    assert len(found) == 3
    assert all(from_fold < 1e-6 for from_fold, *_ in found.values()), found
    assert max(found["simple_gla bfloat16"]) < 1e-6
    assert max(found["kda float32"]) < 2e-6
    assert 1e-4 < max(found["kda bfloat16"]) < 5e-3


def test_ranks_may_cut_their_parts_into_segments() -> None:
    found = json.loads(interpreted(str(INTERPRETED), "ranks_in_segments"))
    assert len(found) == 4
    assert max(found.values()) < 2e-6, found


def test_ranks_may_run_kernels_beside_each_other() -> None:
    found = json.loads(interpreted(str(INTERPRETED), "ranks_in_stretches"))
    assert found == {"kda": [], "delta_rule": [], "gla": [], "simple_gla": []}


def test_of_what_was_gathered_a_rank_keeps_one_state() -> None:
    found = json.loads(interpreted(str(INTERPRETED), "kept"))
    assert found == [[4 * 16 * 16] * 2] * 2


def test_a_sequence_that_begins_on_a_rank_is_gone_through_once() -> None:
    """As it is, on rank 0 and 2; in two segments the first of them is summarised for the second, as on one device.
    Only rank 1, inside a sequence, goes through it for a summary; looking ahead, it takes that of its segments."""
    found = json.loads(interpreted(str(INTERPRETED), "scanned"))
    assert found == {"1 segments": [64, 128, 64, 64], "2 segments": [64 + 32, 32 + 32 + 64, 64 + 32, 64 + 32]}


def test_summaries_are_what_a_run_arrives_at() -> None:
    """To the last bit, in every op: on two ranks nothing but runs is passed on, and would not show it."""
    found = json.loads(interpreted(str(INTERPRETED), "summaries"))
    assert found == {name: [True, True] for name in OPS}


def test_a_summary_that_drifts_from_the_main_pass_is_the_kernels_fault() -> None:
    assert "verdict: kernel" in simulated("delta_rule", 2, "128", "--heads", "1", "--inject", "summary-drift")


@pytest.mark.parametrize(
    ("name", "more"), [("kda", ()), ("dplr", ("--merge", "scan")), ("gla", ()), ("simple_gla", ("--merge", "scan"))]
)
def test_interior_ranks_and_two_sequences_on_one_rank(name: str, more: tuple[str, ...]) -> None:
    assert "verdict: agrees" in simulated(name, 4, "70,34", *more)


MERGE = """
import torch
from kcpgen.runtime.context_parallel.merge import compose, merge_in_torch
from kcpgen.runtime.context_parallel.merge_kernels import merge_in_triton, product
torch.manual_seed(0)
for K, V in ((16, 16), (20, 12), (40, 70)):
    for n in (2, 3, 6):
        whole = torch.randn(n, 100 + 2 * K * V)
        states = whole[:, 32 : 32 + 2 * K * V].view(n, 2, K, V)
        transitions = torch.randn(n - 1, 2, K, K) / K**0.5
        exact = transitions.double()
        chain = exact[0]
        for M in exact[1:]:
            chain = M @ chain
        assert torch.allclose(compose(transitions, product), chain.float(), rtol=1e-4, atol=1e-5)
        for backward in (False, True):
            expected = merge_in_torch(states.double(), exact, kind="dense", backward=backward)
            for method in ("fold", "scan"):
                found = merge_in_triton(states, transitions, kind="dense", backward=backward, method=method)
                assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5), (K, V, n, backward, method)
print("equal")
"""


def test_merge_kernels() -> None:
    assert interpreted("-c", MERGE).strip() == "equal"


CHAIN = """
import sys
from importlib import import_module
from types import SimpleNamespace
import torch
from kcpgen.runtime.launch import ScanTiles
from kcpgen.runtime.layout import chunk_layout
transitions = import_module("generated.delta_rule.summary").transitions
torch.manual_seed(0)
C, K, heads, count = 16, 16, 2, 200
layout = chunk_layout(1, count * C, None, C, torch.device("cpu"))
w = torch.nn.functional.normalize(torch.randn(count, heads, C, K), dim=-1)
for low in (torch.bfloat16, torch.float32):
    prepared = SimpleNamespace(
        dtype=low, write_0=w.to(low), W_0=(-0.01 * w).to(low), in_place=False,
        input_heads=heads, heads=heads, keys=K, key_width=K
    )
    found = torch.empty(1, heads, K, K)
    transitions(prepared, layout, ScanTiles(value_block=64, warps=4, stages=2, roles=False), found)
    exact = torch.eye(K, dtype=torch.float64).expand(heads, K, K)
    for left, right in zip(prepared.write_0.double(), prepared.W_0.double()):
        exact = exact + left.mT @ (right @ exact)
    print(float((found[0] - exact).norm() / exact.norm()))
"""


def test_the_chain_of_transitions_keeps_float32_over_many_chunks() -> None:
    """Rounding M to bfloat16 or tf32 would show: 200 chunks make 1e-2 or 1e-3 of that."""
    errors = [float(line) for line in interpreted("-c", CHAIN).split()]
    assert len(errors) == 2
    assert max(errors) < 1e-5, errors


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from importlib import import_module
from cp_rows import Spread, long_memory, on_ranks, op, row
from kcpgen.verify.resources import _compiling_only, _read
kda = op("kda")
import_module(kda.chunk.__module__.rpartition(".")[0] + ".autograd")
from kcpgen.runtime.context_parallel import merge_kernels
merge_kernels.fold_kernel.configs = merge_kernels.fold_kernel.configs[:1]
case = row((1024,), backend="triton", dtype="bfloat16", key_width=128, value_width=128)
compiled = []
with _compiling_only(compiled):
    on_ranks(kda, case, long_memory(kda, case, "cpu"), Spread(ranks=4))
found = {_read(kernel).kernel: _read(kernel) for kernel in compiled}
for name in ("transition_kernel", "fold_kernel"):
    print(name, found[name].fits, found[name].stack)
"""


def test_kernels_compile_for_sm_90_without_spills() -> None:
    here = str(Path(__file__).resolve().parent)
    ran = subprocess.run([sys.executable, "-c", COMPILE, here], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["transition_kernel True 0", "fold_kernel True 0"], ran.stdout + ran.stderr
