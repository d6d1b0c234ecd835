"""What nothing reads is dropped from kernels, and nothing else."""

from __future__ import annotations

from kcpgen.emit.tidy import drop_idle

SOURCE = """\
import triton


def host(x):
    idle = x + 1
    return x


@triton.jit
def kernel(x_ptr, FLAG: tl.constexpr):
    rows = tl.arange(0, 16)
    only_for_idle = rows + 1
    idle = tl.load(
        x_ptr + only_for_idle,
    )
    kept = tl.atomic_add(x_ptr, 1)
    total = 0.0
    for _ in range(4):
        alone = rows
    if FLAG:
        total += 1.0
    tl.store(x_ptr + rows, total)
"""


def test_idle_assignments_go_with_what_only_they_needed() -> None:
    tidied = drop_idle(SOURCE)
    assert "only_for_idle" not in tidied
    assert "tl.load" not in tidied


def test_host_code_effects_updates_and_sole_statements_stay() -> None:
    tidied = drop_idle(SOURCE)
    for line in ("    idle = x + 1", "kept = tl.atomic_add", "total = 0.0", "alone = rows", "total += 1.0"):
        assert line in tidied
    compile(tidied, "tidied", "exec")
