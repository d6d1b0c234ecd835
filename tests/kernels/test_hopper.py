"""Kernels for Hopper: what compiles for them, which calls take them, and that no wait lets a product be read before it
is done."""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import two_erases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcpgen.derivation.chunk_form import derive_chunk_form
from kcpgen.derivation.normal_form import derive_normal_form
from kcpgen.emit.gluon_serial import PARTS, Sum, _later
from kcpgen.emit.roles import in_roles
from kcpgen.emit.triton_kernels import emit_triton
from kcpgen.language import load
from kcpgen.plan import KernelPlan, make_plan
from kcpgen.runtime import hopper, hopper_roles
from kcpgen.runtime.launch import ScanTiles, Tiles, choose_tiles, padded
from kcpgen.runtime.layout import ChunkLayout, chunk_layout
from kcpgen.verify import resources
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import make_inputs
from kcpgen.verify.op import Op, load_op
from tests.kernels.forms import FORMS, built

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATED = ROOT / "generated"
SPECS = sorted((ROOT / "specs").glob("*.kcp"))
OPS = sorted(path.parent.name for path in GENERATED.glob("*/autograd.py"))
FILES = sorted(GENERATED.glob("*/*_hopper.py"))
SERIAL = [path for path in FILES if path.name in ("scan_hopper.py", "reverse_hopper.py", "summary_hopper.py")]
PREPARING = [path for path in FILES if path.name == "prepare_hopper.py"]
BY_CHUNKS = [path for path in FILES if path not in [*SERIAL, *PREPARING]]  # of the backward
ERASING = sorted(path.parent.name for path in GENERATED.glob("*/summary.py"))
KERNELS = ("scan_kernel", "reverse_kernel")
TRANSITION = "transition_kernel"  # of ops that erase
MOST_WAITS = 5  # of one kernel; where products cannot be in flight together, each of them is waited for
REGISTERS_OF_ALL = 64 * 1024  # a multiprocessor's
ADDRESSES = 64  # bytes of stack at most of a wide program: addresses for its last chunk and its final state

BF16, CPU = torch.bfloat16, torch.device("cpu")
TILES = ScanTiles(value_block=64, warps=4, stages=3)


# What compiles.


def in_segments(size: int) -> Case:
    """A call that takes every variant of the serial kernels: of whole sequences, and those that summarise segments."""
    return Case(
        label="segments",
        backend="triton",
        dtype="bfloat16",
        tokens=1024,
        key_width=size,
        value_width=size,
        segments=4,
    )


def compiled(op: Op, case: Case, kernels: Collection[str] = (*KERNELS, TRANSITION)) -> list[Any]:
    """Kernels of these names, of a forward and backward that is made to take those for Hopper."""
    import_module(f"{op.chunk.__module__.rpartition('.')[0]}.autograd")  # kernels are defined before anything is set
    found: list[Any] = []
    with hopper.forced(True), resources._compiling_only(found, kernels):
        evaluate(op.chunk, make_inputs(op, case, "cpu"), case, backend="triton")
    return list({id(kernel): kernel for kernel in found}.values())


def instructions(kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        ran = subprocess.run([resources.CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True)
    return ran.stdout


def check_kernels(op: Op, case: Case) -> list[Any]:
    """They are those in roles, fit, and keep products in flight."""
    found = compiled(op, case)
    assert [kernel.src.fn.__name__ for kernel in found if not kernel.src.fn.is_gluon()] == []
    for name, count in [*((name, 2) for name in KERNELS), *([(TRANSITION, 1)] if op.form.erases else [])]:
        variants = [kernel for kernel in found if kernel.src.fn.__name__ == name]
        assert len(variants) == count, name
        assert [read for read in map(resources._read, variants) if not read.fits] == []
        texts = [instructions(kernel) for kernel in variants]
        waits = [text.count("WARPGROUP.DEPBAR") for text in texts]
        products = [text.count("HGMMA") for text in texts]
        source = variants[0].src.fn.src if name == "scan_kernel" else ""
        more = ("inverse_0" in source) + ("scored" in source)  # R is waited for, then U; and A
        assert max(waits) <= MOST_WAITS + more, (name, waits, products)
        assert 0 < 2 * sum(waits) <= sum(products), (name, waits, products)
        if name == TRANSITION:
            check_transitions(texts[0], op.form.erases)
    return found


def check_transitions(text: str, erases: int) -> None:
    """A wait for what each erase reads of M and one for what is added to it. fp32 numbers are rounded two at a time."""
    assert text.count("WARPGROUP.DEPBAR") == erases + 1
    assert text.count("F2FP.BF16") > 0 == text.count("F2F.")


@pytest.mark.parametrize("name", OPS)
def test_kernels_in_roles_compile_and_keep_products_in_flight(name: str) -> None:
    check_kernels(load_op(GENERATED / name), in_segments(128))


def test_what_two_erases_read_is_in_flight_together(tmp_path: Path) -> None:
    package = two_erases.built(tmp_path)
    source = (package / "summary_hopper.py").read_text(encoding="utf-8")
    assert list(waiting_faults(loop(source), {})) == []
    assert "X_0_T = warpgroup_mma_wait(3, deps=(X_0_T,))" in source
    op = load_op(package)
    (kernel,) = [kernel for kernel in compiled(op, in_segments(128)) if kernel.src.fn.__name__ == TRANSITION]
    assert resources._read(kernel).fits
    assert resources._read(kernel).stack == 0
    check_transitions(instructions(kernel), 2)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_so_they_do_where_keys_are_narrow(decay: str) -> None:
    ops = (load_op(GENERATED / name) for name in OPS)
    check_kernels(next(op for op in ops if op.form.decay == decay and op.form.erases), in_segments(64))


def forms_of_ops() -> list[str]:
    """An op for each form."""
    return sorted({load_op(GENERATED / name).form: name for name in reversed(OPS)}.values())


def columns_of(kernel: Any) -> int:
    (place,) = (n for n, name in enumerate(kernel.src.fn.arg_names) if name == "BV")
    return int(kernel.src.constants[(place,)])


@pytest.mark.parametrize(("name", "size"), [*((name, 128) for name in forms_of_ops()), (ERASING[0], 64)])
def test_so_do_those_of_128_columns(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans and reverse scans; where two narrow programs fit a multiprocessor nobody asks. What little stack there is
    holds addresses that wait for the last chunk, and multiplying warps have all that those which load, or make scores,
    can spare."""
    op = load_op(GENERATED / name)
    monkeypatch.setattr(hopper_roles, "columns", lambda *sizes: hopper_roles.WIDE)
    found = check_kernels(op, replace(in_segments(size), value_width=128))
    serial = [kernel for kernel in found if kernel.src.fn.__name__ in KERNELS]
    wide = [kernel for kernel in serial if columns_of(kernel) == hopper_roles.WIDE]
    assert wide or op.form.erases == 0
    for kernel in wide:
        read, text = resources._read(kernel), instructions(kernel)
        scoring = read.warps > 8 + 4  # loading counts as four
        assert read.warps == 8 + 4 + 4 * scoring
        assert read.registers == (hopper_roles.SCORING if scoring else hopper_roles.REGISTERS)[hopper_roles.WIDE]
        assert 32 * read.warps * read.registers <= REGISTERS_OF_ALL
        taken = hopper_roles.LOADER_REGISTERS + scoring * hopper_roles.SCORE_REGISTERS[hopper_roles.WIDE]
        assert f"0x{(read.warps * read.registers - 4 * taken) // 8:x} ;" in text
        assert read.stack <= ADDRESSES
        for part in (part for part in text.split("USETMAXREG") if "HGMMA" in part):  # of each role
            assert re.findall(r"\b(?:STL|LDL)\b", part[part.index("HGMMA") : part.rindex("HGMMA")]) == []


UPRIGHT = [p.parent.name for p in SERIAL if p.name == "scan_hopper.py" and "multiply_upright" in p.read_text("utf-8")]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", UPRIGHT)
def test_so_do_those_of_32_columns(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_roles, "fit_upright", lambda *sizes: True)
    serial = [k for k in check_kernels(load_op(GENERATED / name), in_segments(size)) if k.src.fn.__name__ in KERNELS]
    assert {columns_of(kernel) for kernel in serial} == {hopper_roles.UPRIGHT}
    for kernel in serial:
        assert resources._read(kernel).stack <= 8  # an address for the last chunk


FAR, PAIRS, PREPARE = "far_gradients_kernel", "gradients_kernel", "prepare_kernel"


@pytest.mark.parametrize(
    ("name", "size"),
    [(path.parent.name, size) for path in BY_CHUNKS for size in (64, 128)],
)
def test_kernels_that_copy_by_chunks_compile_and_multiply_in_groups(name: str, size: int) -> None:
    op = load_op(GENERATED / name)
    (kernel,) = compiled(op, in_segments(size), [FAR if op.form.decay == "vector" else PAIRS])
    if not kernel.src.fn.is_gluon():  # operands of three vectors do not fit where narrow states were
        assert (op.form.decay != "vector", op.form.erases > 0, size) == (True, True, 64)
        return
    read = resources._read(kernel)
    assert read.fits
    assert 2 * (read.shared + hopper.RESERVED) <= hopper.SHARED_OF_TWO
    text = instructions(kernel)
    assert 3 * text.count("WARPGROUP.DEPBAR") <= text.count("HGMMA")


@pytest.mark.parametrize(("name", "kernel"), [("gdn", PREPARE), ("kda", PREPARE), ("gdn", PAIRS), ("kda", FAR)])
def test_heads_that_lie_one_behind_the_other_are_found_by_64_bits(name: str, kernel: str) -> None:
    """A head of 2**20 tokens and 128 channels takes 2**27 elements, and 32 bits count sixteen of them."""
    op = load_op(GENERATED / name)
    case = replace(in_segments(128), tokens=1000, keywords={"use_qk_l2norm_in_kernel": True})
    inputs = make_inputs(op, case, "cpu")
    for token, x in inputs.tokens.items():
        inputs.tokens[token] = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    found: list[Any] = []
    import_module(f"{op.chunk.__module__.rpartition('.')[0]}.autograd")
    with hopper.forced(True), resources._compiling_only(found, [kernel]):
        evaluate(op.chunk, inputs, case, backend="triton")
    text = found[0].asm["ttgir"]
    assert "_head : i32 to i64" in text
    assert re.findall(r"arith\.muli .*%\w+_head\b.* : i32", text) == []


SPILLED = 64  # bytes of stack that a thread may have where three or four programs share the registers


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", [path.parent.name for path in PREPARING])
def test_so_do_those_that_prepare_chunks(name: str, size: int) -> None:
    """At least three programs fit a multiprocessor, by shared memory as by registers."""
    (kernel,) = compiled(load_op(GENERATED / name), replace(in_segments(size), segments=1), [PREPARE])
    assert kernel.src.fn.is_gluon()
    read = resources._read(kernel)
    assert read.stack <= SPILLED
    assert 3 * (read.shared + hopper.RESERVED) <= hopper.SHARED_OF_TWO
    assert 3 * 32 * read.warps * read.registers <= 65536


@pytest.mark.parametrize("name", FORMS)
def test_so_do_those_of_forms_that_no_op_here_has(name: str, tmp_path: Path) -> None:
    """Whether a form has such a kernel or not, its backward is launched; a portable one is not compiled again here."""
    package = built(name, tmp_path)
    op = load_op(package)
    found: list[Any] = []
    preparing = [PREPARE] if (package / "prepare_hopper.py").exists() else []
    import_module(f"{op.chunk.__module__.rpartition('.')[0]}.autograd")
    case = replace(in_segments(128), heads=1, value_heads=2)
    with hopper.forced(True), resources._compiling_only(found, [FAR, PAIRS, *preparing]):
        evaluate(op.chunk, make_inputs(op, case, "cpu"), case, backend="triton")
    kernels = {id(kernel): kernel for kernel in found}.values()
    assert len(kernels) == 1 + len(preparing)
    assert [read for read in map(resources._read, kernels) if not read.fits] == []


# Which calls take them.


def prepared(dtype: torch.dtype = BF16, key_width: int = 128, values: int = 128) -> Any:
    sizes = {"key_width": key_width, "values": values, "value_width": max(64, padded(values)), "heads": 4}
    return SimpleNamespace(dtype=dtype, values_in_place=True, **sizes)


LAYOUT = chunk_layout(1, 100, None, 32, CPU)


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine, not of what is tested
@given(
    key_width=st.sampled_from([64, 128]),
    values=st.integers(1, 64).map(lambda n: 8 * n),
    tile_bytes=st.integers(1_000, 150_000),
    leaving_bytes=st.integers(0, 60_000),
)
def test_chunks_in_flight_fit_or_the_portable_kernel_is_taken(
    key_width: int, values: int, tile_bytes: int, leaving_bytes: int
) -> None:
    found = hopper_roles.stages(prepared(key_width=key_width, values=values), LAYOUT, TILES, tile_bytes, leaving_bytes)
    if 2 * tile_bytes + leaving_bytes > hopper.LIMIT:
        assert found == 0
    else:
        assert 2 <= found <= hopper_roles.MOST_STAGES
        assert found * tile_bytes + leaving_bytes <= hopper.LIMIT < resources.SHARED_LIMIT


@pytest.mark.parametrize(
    ("call", "layout", "tiles"),
    [
        (prepared(dtype=torch.float32), LAYOUT, TILES),
        (prepared(key_width=256), LAYOUT, TILES),
        (prepared(key_width=32), LAYOUT, TILES),
        (prepared(values=100), LAYOUT, TILES),
        (prepared(), chunk_layout(1, 0, None, 32, CPU), TILES),
        (prepared(), chunk_layout(1, 100, None, 16, CPU), TILES),
        (prepared(), LAYOUT, replace(TILES, value_block=32)),
        (prepared(), LAYOUT, replace(TILES, value_block=128)),
    ],
    ids=["fp32", "wide keys", "narrow keys", "odd values", "no tokens", "short chunks", "narrow block", "wide block"],
)
def test_other_calls_are_left_to_the_portable_kernels(call: Any, layout: ChunkLayout, tiles: ScanTiles) -> None:
    assert hopper_roles.stages(prepared(), LAYOUT, TILES, 40_000, 16_000) == 3
    assert hopper_roles.stages(call, layout, tiles, 40_000, 16_000) == 0
    op = next(name for name in OPS if "for_roles" not in (GENERATED / name / "scan_hopper.py").read_text("utf-8"))
    scan, reverse = (import_module(f"{package(op)}.{name}_hopper") for name in ("scan", "reverse"))
    nothing = {"initial_state": None, "final_state": None, "states": None, "checkpoints": None}
    assert not scan.scan_in_roles(call, layout, tiles, o=None, **nothing)
    summary = import_module(f"{package(ERASING[0])}.summary_hopper")
    assert not summary.transitions_in_roles(call, layout, tiles, torch.empty(0))
    nothing = {"state_gradients": None, "final_state_gradient": None, "initial_state_gradient": None}
    assert not reverse.reverse_in_roles(call, layout, tiles, do=torch.empty(0), gradients=(), **nothing)


def bytes_of(tile: int, leaving: int) -> Callable[[int], tuple[int, int]]:
    """Of tiles that are all as wide as the state's block is; by its columns."""
    return lambda block: (tile * block // 64, leaving * block // 64)


@pytest.mark.parametrize(
    ("values", "tile_bytes", "leaving_bytes", "expected"),
    [
        (128, 40_000, 16_000, (128, 2)),
        (120, 40_000, 16_000, (128, 2)),
        (64, 40_000, 16_000, (64, 3)),  # there are no 128 columns
        (128, 25_000, 5_000, (64, 4)),  # two such programs fit a multiprocessor
        (128, 60_000, 16_000, (64, 2)),  # twice the tiles fit none
        (128, 120_000, 16_000, (64, 0)),  # nor do these
    ],
)
def test_wide_programs_are_asked_for_where_they_fit_and_two_narrow_ones_do_not(
    values: int, tile_bytes: int, leaving_bytes: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = prepared(values=values)
    shared = bytes_of(tile_bytes, leaving_bytes)
    assert hopper_roles.columns_and_stages(call, LAYOUT, TILES, shared)[0] == 64  # no multiprocessors
    monkeypatch.setattr(hopper_roles, "multiprocessors", lambda device: call.heads * 3 // 2)  # 4 heads of 128 columns
    assert hopper_roles.columns_and_stages(call, LAYOUT, TILES, shared) == expected
    for lengths in ((), (4, 4, 4)):
        assert hopper_roles.columns_and_stages(call, replace(LAYOUT, lengths=lengths), TILES, shared)[0] == 64
    assert hopper_roles.programs(call, LAYOUT, expected[0]) == (call.heads * call.value_width // expected[0],)


@pytest.mark.parametrize(
    ("lengths", "programs", "expected"),
    [
        ((128,), 192, 128),  # 96 heads of 128 columns: two waves of narrow programs, one of wide ones
        ((128,), 132, 64),
        ((128,), 132 + 2, 128),
        ((128,), 264, 128),
        ((128,), 264 + 2, 64),  # three waves are bound by memory, with either width
        ((128,) * 2, 132, 128),
        ((128,) * 2, 264, 64),
        ((0, 0), 96, 64),
        ((), 192, 64),
        ((100, 101, 102), 64, 128),
        ((1000, 10, 10), 64, 64),  # the long one's programs begin at once, and are done last
        ((10, 10, 1000), 64, 64),
        ((100, 60), 132, 64),  # a wave is saved, but of 60 chunks after 100
        ((100, 90), 132, 128),
    ],
)
def test_columns_are_those_that_take_less_time(lengths: tuple[int, ...], programs: int, expected: int) -> None:
    assert hopper_roles.columns(lengths, programs, 132) == expected
    assert hopper_roles.columns(lengths, programs, 0) == 64  # programs do not run side by side


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine, not of what is tested
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=8).map(tuple),
    programs=st.integers(1, 20),
    processors=st.integers(1, 40),
)
def test_programs_take_as_long_as_their_schedule(lengths: tuple[int, ...], programs: int, processors: int) -> None:
    """Step by step: whoever is free takes the next program."""
    found = hopper_roles.steps(lengths, programs, processors)
    waiting = [length for length in lengths for _ in range(programs)]
    running: list[int] = []
    passed = 0
    while waiting or running:
        free = processors - len(running)
        running, waiting = running + waiting[:free], waiting[free:]
        running = [left - 1 for left in running if left > 1]
        passed += 1
    assert found == passed


@cache
def package(name: str) -> str:
    return load_op(GENERATED / name).chunk.__module__.rpartition(".")[0]


def chosen() -> Tiles:
    return choose_tiles(keys=128, values=128, decay="scalar", terms=1, dtype=BF16)


def roles(tiles: Tiles) -> tuple[bool, bool, bool, bool]:
    return tiles.prepare.in_flight, tiles.scan.roles, tiles.reverse.roles, tiles.gradients.in_flight


def by_chunks(tiles: Tiles) -> dict[str, Any]:
    return {"prepare": tiles.prepare, "gradients": tiles.gradients}


ALL, NONE = (True,) * 4, (False,) * 4


def test_other_devices_take_the_portable_kernels() -> None:
    tiles = chosen()
    found = hopper.settled(tiles, CPU)
    assert (roles(tiles), roles(found)) == (ALL, NONE)
    assert replace(found, scan=tiles.scan, reverse=tiles.reverse, **by_chunks(tiles)) == tiles
    assert {name: replace(part, in_flight=True) for name, part in by_chunks(found).items()} == by_chunks(tiles)
    assert replace(found.scan, roles=True) == tiles.scan
    assert replace(found.reverse, roles=True) == tiles.reverse


def test_a_choice_is_forced_whatever_the_device_and_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = chosen()
    with hopper.forced(True):
        assert hopper.settled(tiles, CPU) == tiles
        with hopper.forced(None):
            assert roles(hopper.settled(tiles, CPU)) == NONE
        assert hopper.settled(tiles, CPU) == tiles
    monkeypatch.setattr(hopper, "_on_hopper", lambda device: True)
    assert hopper.settled(tiles, CPU) == tiles
    with hopper.forced(False):
        assert roles(hopper.settled(tiles, CPU)) == NONE
    assert hopper.settled(tiles, CPU) == tiles


def test_the_interpreter_runs_the_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_on_hopper", lambda device: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert roles(hopper.settled(chosen(), CPU)) == NONE


@pytest.mark.parametrize(("values", "copied"), [(64, True), (60, False)])
def test_a_gradient_that_tiles_cannot_copy_is_laid_out_once(values: int, copied: bool) -> None:
    shifted = torch.zeros(2, 5, 3, values + 1, dtype=BF16)[..., 1:]
    plain = hopper.settled(chosen(), CPU)
    assert hopper.copyable(shifted, plain) is shifted
    found = hopper.copyable(shifted, chosen())
    assert (found is not shifted and found.is_contiguous()) == copied
    assert hopper.copyable(shifted.contiguous(), chosen()).stride() == shifted.contiguous().stride()


def forced_and_failed() -> None:
    with hopper.forced(True):
        raise KeyError("inside")


def test_nothing_stays_forced_after_an_exception() -> None:
    with pytest.raises(KeyError):
        forced_and_failed()
    assert roles(hopper.settled(chosen(), CPU)) == NONE


@pytest.mark.parametrize(
    ("device", "capability", "version", "expected"),
    [
        ("cuda", (9, 0), "3.6.0", True),
        ("cuda", (9, 0), "3.60.0", False),
        ("cuda", (9, 0), "3.5.1", False),
        ("cuda", (8, 9), "3.6.0", False),
        ("cuda", (10, 0), "3.6.0", False),
        ("cpu", (9, 0), "3.6.0", False),
    ],
)
def test_they_are_for_hopper_and_releases_of_triton_that_they_ran_with(
    device: str, capability: tuple[int, int], version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(hopper, "triton", SimpleNamespace(__version__=version))
    assert hopper._on_hopper.__wrapped__(torch.device(device)) is expected


# What is generated.


def plan_of(spec: Path) -> KernelPlan:
    return make_plan(derive_chunk_form(derive_normal_form(load(spec))))


def test_every_op_of_the_repository_has_them() -> None:
    assert [path.parent.name for path in FILES if path.name.startswith("scan")] == OPS
    assert [path.parent.name for path in FILES if path.name.startswith("reverse")] == OPS
    assert [path.parent.name for path in FILES if path.name.startswith("summary")] == ERASING
    forms = {name: load_op(GENERATED / name).form for name in OPS}
    far = [path.parent.name for path in BY_CHUNKS if path.name.startswith("far")]
    assert far == [name for name, form in forms.items() if form.decay == "vector"]
    assert [path.parent.name for path in PREPARING] == [name for name, form in forms.items() if form.terms == 1]
    assert {path.parent.name for path in BY_CHUNKS} > set(far)


@pytest.mark.parametrize(
    ("part", "target"),
    [("solved", "O"), ("solved", "S_next"), ("reverse_scan", "dU"), ("reverse_scan", "dS"), ("summary", "M")],
)
def test_an_op_that_subtracts_a_product_has_no_such_kernels(part: str, target: str) -> None:
    plan = plan_of(SPECS[0])
    assert in_roles(plan)
    equations = tuple(
        replace(e, terms=(*e.terms[:-1], replace(e.terms[-1], sign=-1))) if e.target.name == target else e
        for e in getattr(plan.form, part)
    )
    changed = replace(plan, form=replace(plan.form, **{part: equations}))
    assert not in_roles(changed)
    sources = emit_triton(changed)
    assert [name for name in sources if "hopper" in name] == ["prepare_hopper.py"]  # which knows nothing of the scan
    assert [name for name, text in sources.items() if "in_roles" in text] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_only_title_and_stamp_name_the_op(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    stamped, _, rest = text.partition('"""')
    assert all(line.startswith("#") for line in stamped.split("\n") if line)
    _, _, body = rest.partition("\n")
    for name in OPS:
        assert not re.search(rf"(?<![a-z]){name.replace('_', '[ _-]?')}(?![a-z])", body, re.IGNORECASE)


CAPITALS = """\
op probe "Names in capitals"
token q, k : [H, K]
token v : [HV, V]
token g : [HV, K] log decay
token Y : [HV]
state S : [HV, K, V]
S[t] = (I - Y[t] k[t] k[t]^T) Diag(exp(g[t])) S[t-1] + Y[t] k[t] v[t]^T
o[t] = scale S[t]^T q[t]
"""


def test_an_input_in_capitals_is_no_constant_of_a_kernel(tmp_path: Path) -> None:
    path = tmp_path / "probe.kcp"
    path.write_text(CAPITALS, encoding="utf-8")
    text = emit_triton(plan_of(path))["far_gradients_hopper.py"]
    assert "Y, " in text
    assert "Y: gl.constexpr" not in text
    assert "C: gl.constexpr" in text


def pairs(count: int, letter: str = "") -> tuple[tuple[str, str], ...]:
    return tuple((f"l{letter}_{n}", f"r{letter}_{n}") for n in range(count))


def test_a_sum_begins_with_its_terms_or_in_place_of_what_was_there() -> None:
    first, second = "product(l_0, r_0, X)", "X = product(l_1, r_1, X)"
    assert list(Sum(name="X", start="x", products=pairs(2)).lines()) == ["X = x", f"X = {first}", second]
    assert list(Sum(name="X", start="X", products=pairs(2)).lines()) == [f"X = {first}", second]
    assert list(Sum(name="X", start="", products=pairs(2)).lines()) == ["X = fresh_product(l_0, r_0, nothing)", second]


def test_what_is_scaled_comes_first() -> None:
    found = Sum(name="X", start="", products=pairs(1), scaled=pairs(1, "s"), scale="d")
    assert list(found.lines()) == ["X = fresh_product(ls_0, rs_0, nothing)"]
    assert list(found.settled("2")) == ["X = warpgroup_mma_wait(2, deps=(X,))", "X = X * d"]
    assert list(found.closed()) == ["X = product(l_0, r_0, X)"]
    plain = Sum(name="X", start="", products=pairs(1))
    assert [*plain.settled("2"), *plain.closed()] == []


def test_a_sum_is_waited_for_while_later_products_are_under_way() -> None:
    assert _later([2, 3, 1]) == [4, 1, 0]
    assert Sum(name="X", start="", products=pairs(2)).awaited("4") == "X = warpgroup_mma_wait(4, deps=(X,))"


# What waits are for: the body of the loop over chunks is walked as it runs, with products that end when they must.


def loop(source: str) -> list[ast.stmt]:
    (function,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "multiply")
    (found,) = (n for n in function.body if isinstance(n, ast.For))
    return found.body


def steps(body: Iterable[ast.stmt], modes: Mapping[str, bool]) -> Iterator[ast.stmt]:
    """Statements in their order; branches on tensors are taken, loops that are unrolled go round twice."""
    for node in body:
        if isinstance(node, ast.If):
            asked = ast.unparse(node.test)
            yield from steps(node.body if modes.get(asked, True) else node.orelse, modes)
        elif isinstance(node, ast.For) and "static_range" in ast.unparse(node.iter):
            yield from steps([*node.body, *node.body], modes)
        else:
            yield node


def called(node: ast.stmt) -> tuple[str, list[ast.expr]]:
    value = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    return (ast.unparse(value.func), value.args) if isinstance(value, ast.Call) else ("", [])


def names(*nodes: ast.AST) -> set[str]:
    inside = (inner for node in nodes for inner in ast.walk(node))
    return {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


PRODUCTS = {"product": 1, "fresh_product": 1, "product_fp32": PARTS, "fresh_product_fp32": PARTS}  # how many are begun


def targets(node: ast.stmt) -> list[str]:
    assigned = node.targets[0] if isinstance(node, ast.Assign) else None
    return [ast.unparse(name) for name in (assigned.elts if isinstance(assigned, ast.Tuple) else [assigned]) if name]


def waiting_faults(body: Sequence[ast.stmt], modes: Mapping[str, bool]) -> Iterator[str]:
    """Sums that are read while a product of theirs may be under way, and waits that last too long."""
    begun: list[str] = []
    under_way: list[str] = []
    for node in steps(body, modes):
        line = ast.unparse(node)
        function, arguments = called(node)
        awaited = targets(node)
        target = awaited[0] if len(awaited) == 1 else ""
        if function == "warpgroup_mma_wait":
            allowed = eval(ast.unparse(arguments[0]), {}, dict(modes))
            last = max((at for at, name in enumerate(begun) if name in awaited), default=-1)
            if allowed != len(begun) - 1 - last:
                yield f"{line}: {len(begun) - 1 - last} are later"
            under_way = under_way[len(under_way) - allowed :]
        elif function in PRODUCTS:
            if names(*arguments[:2]) & set(under_way):
                yield line
            begun += [target] * PRODUCTS[function]
            under_way += [target] * PRODUCTS[function]
        elif names(node) & set(under_way):
            yield line
    yield from (f"{name} is never waited for" for name in sorted(set(under_way)))


MODES = (
    {"STORE_OUTPUT": True, "KEEP": True, "STORE_GRADIENTS": True},
    {"STORE_OUTPUT": True, "KEEP": False, "STORE_GRADIENTS": True},
    {"STORE_OUTPUT": False, "KEEP": False, "STORE_GRADIENTS": False},
)


@pytest.mark.parametrize("modes", MODES, ids=["all is kept", "outputs", "a summary"])
@pytest.mark.parametrize("path", SERIAL, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_wait_ends_what_is_read_and_nothing_later(path: Path, modes: Mapping[str, bool]) -> None:
    body = loop(path.read_text(encoding="utf-8"))
    assert any(called(node)[0] == "warpgroup_mma_wait" for node in steps(body, modes))
    assert list(waiting_faults(body, modes)) == []


@pytest.mark.parametrize("path", [*BY_CHUNKS, *PREPARING], ids=lambda path: "/".join(path.parts[-2:]))
def test_so_it_does_in_each_function_of_a_kernel_by_chunks(path: Path) -> None:
    module = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    unrolled = "static_range"
    loops = [n.body for n in ast.walk(module) if isinstance(n, ast.For) and unrolled not in ast.unparse(n.iter)]
    bodies = [*(node.body for node in functions), *loops]
    assert any("warpgroup_mma_wait(" in ast.unparse(node) for body in bodies for node in body)
    assert [fault for body in bodies for fault in waiting_faults(body, {})] == []


WALKED = """\
def multiply():
    for c in range(4):
        X = fresh_product(a, b, nothing)
        Y = product(a, b, Y)
        X = warpgroup_mma_wait(1, deps=(X,))
        Y = product(X, b, Y)
        Y = warpgroup_mma_wait(0, deps=(Y,))
"""


def test_a_product_of_fp32_numbers_counts_as_many_as_it_begins() -> None:
    walked = WALKED.replace("fresh_product(", "fresh_product_fp32(").replace("Y = product(a", "Y = product_fp32(a")
    assert list(waiting_faults(loop(walked), {})) == ["X = warpgroup_mma_wait(1, deps=(X,)): 3 are later"]
    assert list(waiting_faults(loop(walked.replace("wait(1", "wait(3")), {})) == []


@pytest.mark.parametrize(
    ("line", "other", "faults"),
    [
        ("", "", 0),
        ("wait(1", "wait(0", 1),  # waits for Y too
        ("wait(1", "wait(2", 2),  # and X enters a product
        ("        Y = warpgroup_mma_wait(0, deps=(Y,))\n", "        y = Y + 1\n", 2),
    ],
)
def test_a_wrong_wait_is_found(line: str, other: str, faults: int) -> None:
    assert len(list(waiting_faults(loop(WALKED.replace(line, other) if line else WALKED), {}))) == faults
