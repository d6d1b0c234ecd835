"""What nothing reads is dropped from kernels, branches on one condition are joined, and nothing else changes."""

from __future__ import annotations

from kcpgen.emit.tidy import drop_idle, live, merge_branches

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
    carried = 0.0
    for step in range(4):
        alone = rows
        total += carried
        carried = rows * 2.0
    if FLAG:
        total += 1.0
    else:
        unread = 1.0
    for step in range(4):
        unread_too = rows
        summed_for_nothing += unread_too
    if FLAG:
        sole = 4.0
    else:
        total += 5.0
    overwritten = 1.0
    overwritten = 2.0
    total += overwritten
    tl.store(x_ptr + rows, total)
    total = 3.0
"""
IDLE = ("only_for_idle", "tl.load", "alone", "unread", "summed_for_nothing", "overwritten = 1.0", "total = 3.0")
KEPT = (
    "    idle = x + 1",
    "kept = tl.atomic_add",
    "    total = 0.0",
    "carried = 0.0",
    "carried = rows * 2.0",
    "    if FLAG",
    "        total += 1.0",
    "        sole = 4.0",
    "overwritten = 2.0",
)


def test_what_no_store_can_come_to_read_goes() -> None:
    tidied = drop_idle(SOURCE)
    assert [text for text in IDLE if text in tidied] == []
    assert tidied.count("for step") == 1


def test_the_rest_stays() -> None:
    tidied = drop_idle(SOURCE)
    assert [text for text in KEPT if text not in tidied] == []
    assert drop_idle(tidied) == tidied


BRANCHES = """\
@triton.jit
def kernel(x_ptr, FLAG: tl.constexpr):
    if FLAG == 1:
        tl.store(x_ptr, 1)
    if FLAG == 1:
        tl.store(x_ptr, 2)
    if FLAG == 2:
        tl.store(x_ptr, 3)
    if x > 0:
        x = 0
    if x > 0:
        tl.store(x_ptr, 4)
    if FLAG == 3:
        tl.store(x_ptr, 5)
    else:
        tl.store(x_ptr, 6)
    if FLAG == 3:
        tl.store(x_ptr, 7)
    tl.store(x_ptr, 8)
    if FLAG == 3:
        tl.store(x_ptr, 9)
"""


def test_neighbouring_branches_on_one_condition_become_one() -> None:
    first, rest = "    if FLAG == 1:\n", BRANCHES.partition("tl.store(x_ptr, 1)\n")
    assert merge_branches(BRANCHES) == rest[0] + rest[1] + rest[2].replace(first, "", 1)


def test_lines_that_live_are_those_of_a_body() -> None:
    lines = ["a = tl.load(a_ptr)", "b = tl.load(b_ptr)", "if MODE:", "    b = c", "tl.store(out_ptr, a)"]
    assert live(lines) == ["a = tl.load(a_ptr)", "tl.store(out_ptr, a)"]
    assert live([]) == []


IN_ROLES = """\
@gluon.jit
def multiply(ring, leaving, full, empty, out, FLAG: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    idle_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    nothing = gl.zeros([64, 64], gl.float32, layout)
    only_for_idle = ring.index(1)
    idle = product(only_for_idle, only_for_idle, nothing)
    for c in range(4):
        mbarrier.wait(full.index(0), c & 1)
        mbarrier.expect(full.index(0), 16)
        tma.async_copy_global_to_shared(out, [c, 0], full.index(0), ring.index(0))
        fetch_vectors(out, c, full.index(0), ring.index(0))
        total = product(ring.index(0), ring.index(0), nothing)
        total = warpgroup_mma_wait(0, deps=(total,))
        unread = total + 1.0
        if FLAG:
            tma.store_wait(1)
            leaving.store(total)
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [c, 0], leaving)
        mbarrier.arrive(empty.index(0), count=1)
    awaited = warpgroup_mma_wait(0, deps=(ring,))
    gl.warp_specialize([(copy, (ring, full))], [1], [24])
"""


def test_functions_in_gluon_keep_what_acts() -> None:
    kept = [line for line in IN_ROLES.splitlines() if "idle" not in line and "unread" not in line]
    assert drop_idle(IN_ROLES).splitlines() == kept
