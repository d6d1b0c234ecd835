"""Costs against what the generated packages really allocate and pass on, and against counts made by hand."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kcpgen.cli import main
from kcpgen.cost.device import DEVICES, Kind
from kcpgen.cost.estimate import Estimate, estimate
from kcpgen.cost.products import flops
from kcpgen.cost.sizes import Sizes, parse_sizes
from kcpgen.cost.work import KernelWork
from kcpgen.derivation.chunk_form import derive_chunk_form
from kcpgen.derivation.normal_form import derive_normal_form
from kcpgen.emit import scores_in_scan, solve_in_scan
from kcpgen.emit.triton_scratch import let_go
from kcpgen.language import load
from kcpgen.plan import KernelPlan, make_plan
from kcpgen.runtime.hopper_roles import WIDER

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = parse_sizes("1x8192x32x128x128")
H200 = DEVICES["h200"]
NARROW = replace(H200, multiprocessors=16)


def plan_of(spec: Path) -> KernelPlan:
    return make_plan(derive_chunk_form(derive_normal_form(load(spec))))


def estimated(name: str, sizes: Sizes = SIZES, by_levels: bool = False) -> Estimate:
    return estimate(plan_of(ROOT / "specs" / f"{name}.kcp"), DEVICES["h200"], sizes, by_levels=by_levels)


def kernels(found: Estimate) -> dict[str, KernelWork]:
    return {kernel.work.name: kernel.work for kernel in (*found.forward, *found.backward)}


def allocated(package: Path, chunk: int) -> Iterator[tuple[str, float]]:
    """Name and bytes per token of every scratch tensor in the generated `Prepared(...)`, with a backward to follow and
    vectors read in place."""
    letters = {"C": chunk, "KP": 128, "VP": 128}
    tree = ast.parse((package / "prepare.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(a.targets[0]): a.value for a in ast.walk(tree) if isinstance(a, ast.Assign)}
    no = {name for name, value in assigned.items() if "not differentiable" in ast.unparse(value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Prepared":
            for keyword in node.keywords:
                value = keyword.value
                if isinstance(value, ast.IfExp):
                    value = value.orelse if ast.unparse(value.test) in no else value.body
                value = assigned.get("W_0", value) if ast.unparse(keyword) == "W_0=W_0" else value
                if isinstance(value, ast.Call):
                    size = 4 if value.keywords else 2
                    for argument in value.args:
                        text = ast.unparse(argument)
                        size *= letters.get(text) or int(text)
                    yield str(keyword.arg), size / chunk


def passed_on(package: Path, file: str) -> set[str]:
    """Scratch tensors that a generated launcher hands to its kernel."""
    text = (package / f"{file}.py").read_text(encoding="utf-8")
    launch = text[re.search(r"_kernel\[\(|_kernel\[programs\(", text).start() :]
    return set(re.findall(r"prepared\.(\w+)", launch)) - {
        "heads", "input_heads", "keys", "values", "key_width", "value_width", "precision", "in_place",
        "values_in_place", "dtype", "for_roles"
    }  # fmt: skip


def test_scratch_is_what_the_package_allocates(spec_path: Path) -> None:
    """For the backward: all but what the scan alone reads. Corrected values are the scan's to write; where scans solve,
    there is no B, nor T in fp32, and W only for others; where it makes scores itself, they are its to write too."""
    found, plan = estimated(spec_path.stem), plan_of(spec_path)
    room = dict(allocated(ROOT / "generated" / spec_path.stem, found.chunk))
    solved = ["B_0_0", "T_0_0", "W_0"] if solve_in_scan.fields(plan) else []
    room = {name: size for name, size in room.items() if name not in solved}
    saved = {name: size for name, size in found.saved.items() if name != "states"}
    assert saved == {name: size for name, size in room.items() if name not in let_go(plan)}
    corrected = [f"U_{e}" for e in plan.erasing]
    scores = ["A_0"] if scores_in_scan.scores_in_scan(plan) else []
    made = {name: size for name, size in room.items() if name not in [*corrected, *scores]}
    assert dict(kernels(found)["prepare"].writes) == made


@pytest.mark.parametrize(
    ("kernel", "file"),
    [("scan", "scan"), ("reverse", "reverse"), ("score_gradients", "score_gradients"), ("gradients", "gradients")],
)
def test_scratch_that_is_read_is_what_the_launcher_passes(spec_path: Path, kernel: str, file: str) -> None:
    found, plan = estimated(spec_path.stem), plan_of(spec_path)
    if "score_gradients" not in kernels(found):  # both axes are in one kernel
        kernel, file = kernel.replace("score_gradients", "gradients"), file.replace("score_gradients", "gradients")
        file = file.replace("gradients", "gradients_hopper")
    if (kernel == "scan" and scores_in_scan.scores_in_scan(plan)) or (
        kernel == "reverse" and solve_in_scan.fields(plan)
    ):
        file = f"{kernel}_hopper"
    read = set(kernels(found)[kernel].reads) & {*found.saved, *kernels(found)["prepare"].writes} - {"states"}
    passed = passed_on(ROOT / "generated" / spec_path.stem, file)
    scores = ["A_0"] if scores_in_scan.scores_in_scan(plan) else []
    in_place = {name for name in passed if name.startswith(("read", "write_", "value_"))} - read
    written = {*(f"U_{e}" for e in plan.erasing), *scores} if kernel == "scan" else set()
    assert read == passed - in_place - written
    inputs = {plan.read.base, *plan.write, *(i.name for i in plan.inputs_on("V"))}
    assert not in_place or inputs & set(kernels(found)[kernel].reads)


def test_every_input_is_read_and_gets_a_gradient(spec_path: Path) -> None:
    works = kernels(estimated(spec_path.stem))
    names = {i.name for i in plan_of(spec_path).spec.inputs}
    assert names <= {*works["prepare"].reads, *works["scan"].reads}
    written = {name for work in works.values() if work.name.endswith("gradients") for name in work.writes}
    assert {f"d{name}" for name in names} <= written


@pytest.mark.parametrize(
    ("name", "forward", "training", "products"),
    [
        ("gdn", 4 * 256 + 4 + 2, 11 * 256 + 3 * 6, 3),
        ("kda", 4 * 256 + 512 + 2, 11 * 256 + 3 * 514, 3),
        ("gla", 4 * 256 + 512, 11 * 256 + 3 * 512, 2),
        ("dplr", 6 * 256 + 512, 17 * 256 + 3 * 512, 4),
    ],
)
def test_the_floor_by_hand(name: str, forward: int, training: int, products: int) -> None:
    found = estimated(name)
    assert (found.forward_floor.bytes, found.training_floor.bytes) == (forward, training)
    assert found.forward_floor.flops == products * 2 * 128 * 128
    assert found.training_floor.flops == 3 * found.forward_floor.flops
    assert found.forward_floor.ms == pytest.approx(1e3 * forward * 8192 * 32 / 4.27e12)


def test_the_floor_is_what_benchmarks_measure_against(spec_path: Path) -> None:
    from benchmarks.harness.floor import work_of
    from benchmarks.harness.inputs import draw
    from benchmarks.harness.shapes import parse
    from kcpgen.verify.op import load_op

    op = load_op(ROOT / "generated" / spec_path.stem)
    arguments = draw(op, parse("1x64x2/4:16"), "open", "cpu")
    found = estimated(spec_path.stem, parse_sizes("1x64x2/4x16x16"))
    for direction, floor in (("forward", found.forward_floor), ("training", found.training_floor)):
        work = work_of(op, arguments, direction)
        assert (work.bytes, work.flops) == (floor.bytes * 256, floor.flops * 256)


def test_products_by_hand() -> None:
    form = plan_of(ROOT / "specs" / "kda.kcp").form
    C, K, V = 32, 128, 64
    scan = [e for e in form.solved if e.target.name in ("U", "O", "S_next")]
    assert flops(scan, {"C": C, "K": K, "V": V}) == 3 * 2 * C * K * V + 2 * C * C * V
    assert flops(form.reverse_scan, {"C": C, "K": K, "V": V}) == 3 * 2 * C * K * V + 2 * C * C * V


def test_a_product_of_three_is_taken_from_its_cheaper_end() -> None:
    form = plan_of(ROOT / "specs" / "dplr.kcp").form
    (solved,) = (e for e in form.solved if str(e.target) == "U0[1]")
    assert flops([solved], {"C": 32, "K": 128, "V": 8}) == 2 * (2 * 32 * 32 * 8)


def test_a_serial_kernel_takes_its_steps_however_little_it_moves() -> None:
    few = estimated("gdn", parse_sizes("1x8192x48x128x128")).forward[1]
    assert few.work.programs == 96
    assert few.work.steps == 8192 // 64
    flops = few.work.flops * 64 / 2  # of a step: a program has half the columns
    assert few.predicted_ms == pytest.approx(128 * (0.24 + 0.26e-6 * flops) / 1e3)
    many = estimated("gdn", parse_sizes("1x8192x144x128x128")).forward[1]
    assert many.work.programs == 288
    assert many.predicted_ms == pytest.approx(3 * few.predicted_ms)


def test_a_serial_kernel_takes_128_columns_where_that_saves_a_wave() -> None:
    many = estimated("gdn", parse_sizes("1x4096x96x128x128"))
    few = estimated("gdn", parse_sizes("1x4096x48x128x128"))
    reverse = [next(k for k in found.backward if k.work.name == "reverse") for found in (many, few)]
    for wide, narrow in ((many.forward[1], few.forward[1]), reverse):
        assert wide.work.programs == narrow.work.programs == 96
        assert wide.predicted_ms == pytest.approx(max(wide.bound_ms, WIDER * narrow.predicted_ms))
    assert kernels(estimated("gla", parse_sizes("1x4096x96x128x128")))["scan"].programs == 192  # two share one


@pytest.mark.parametrize(("name", "heads", "programs"), [("gdn", 32, 128), ("gdn", 34, 68), ("kda", 32, 64)])
def test_few_heads_take_32_columns_where_an_op_has_them(name: str, heads: int, programs: int) -> None:
    """Not where these were more than multiprocessors."""
    found = kernels(estimated(name, parse_sizes(f"1x8192x{heads}x128x128")))
    assert {found[kernel].programs for kernel in ("scan", "reverse")} == {programs}


def room_of(package: Path, file: str, sizes: dict[str, int]) -> tuple[int, int]:
    """Bytes that a generated launcher says that a chunk's tiles take, and those that leave."""
    text = (package / f"{file}.py").read_text(encoding="utf-8")
    (returned,) = re.findall(r"of those that leave\.\"\"\"\n(?:\s+(?:state|staged) = .*\n)*\s+return (.*)", text)
    return tuple(eval(returned, {}, sizes))  # of a file that this repository generates


@pytest.mark.parametrize("columns", [64, 128])
def test_columns_are_chosen_by_the_room_that_launchers_reckon_with(
    spec_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[tuple[int, int]] = []

    def seen(lengths: object, programs: int, processors: int, shared: Callable[[int], tuple[int, int]]) -> int:
        rooms.append(shared(columns))
        return 64

    monkeypatch.setattr("kcpgen.cost.work.fitting_columns", seen)
    monkeypatch.setattr("kcpgen.cost.work.fit_upright", lambda *sizes: False)
    sizes = {"C": estimated(spec_path.stem).chunk, "KP": 128, "block": columns}
    package = ROOT / "generated" / spec_path.stem
    files = [("scan_hopper", 0), ("scan_hopper", 1), ("reverse_hopper", 0)]  # without states and with them
    for (tiles, leaving), (file, state) in zip(rooms, files, strict=True):
        of_tiles, of_leaving = room_of(package, file, {**sizes, "state": state and 2 * columns * 128, "staged": 0})
        assert leaving == of_leaving
        assert tiles == pytest.approx(of_tiles, rel=0.005)  # beside one number a chunk


def copied(found: Estimate) -> set[str]:
    return {name for name, kernel in kernels(found).items() if kernel.kind is Kind.COPIED_AT_ONCE}


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("kda", "1x8192x32x128x128", {"prepare", "far_gradients"}),
        ("dplr", "1x8192x32x128x128", {"far_gradients"}),
        ("gdn", "1x8192x32x128x128", {"prepare", "gradients"}),
        ("simple_gla", "1x8192x32x64x64", {"prepare", "gradients"}),
        ("gdn", "1x8192x32x64x64", {"prepare"}),  # three operands of pairs do not fit where such states were
        ("comba", "1x8192x32x128x128", {"prepare"}),  # its erases read the state before their token's decay
        ("gdn", "1x8192x32x256x128", set()),
        ("kda", "1x8192x32x256x128", set()),
    ],
)
def test_kernels_that_copy_at_once_are_told_from_others(name: str, shape: str, expected: set[str]) -> None:
    assert copied(estimated(name, parse_sizes(shape))) == expected


def test_nothing_passes_through_memory_between_both_axes_in_one_kernel() -> None:
    """208 KB a chunk and head, where two kernels that also solve move 336."""
    one, two = (kernels(estimated(name)) for name in ("gdn", "comba"))
    assert "score_gradients" not in one
    assert one["gradients"].bytes * 64 == pytest.approx(208 * 1024, rel=0.01)
    passed = {"dA_0", "dL_0_0"}
    assert {*passed, "dR_0"} <= {*two["score_gradients"].writes} & {*two["gradients"].reads}
    assert not passed & {*one["gradients"].writes, *one["gradients"].reads}
    assert "dR_0" in {*one["reverse"].writes} & {*one["gradients"].reads}


@pytest.mark.parametrize(
    ("name", "shape", "forward", "training"),
    [
        ("kda", "1x8192x32x128x128", 0.34, 1.6),  # training: 1.68, less what `prepare` has gained since
        ("gdn", "1x8192x32x128x128", 0.277, 0.848),
        ("dplr", "1x8192x32x128x128", 0.77, 2.75),
        ("gdn", "1x8192x96x128x128", 0.535, 2.018),
        ("dplr", "1x8192x96x128x128", 2.10, 7.66),
    ],
)
def test_predictions_are_near_what_an_h200_took(name: str, shape: str, forward: float, training: float) -> None:
    found = estimated(name, parse_sizes(shape))
    predicted = sum(k.predicted_ms for k in found.forward)
    assert predicted == pytest.approx(forward, rel=0.2)
    predicted = sum(k.predicted_ms for k in (*found.keeping, *found.backward))
    assert predicted == pytest.approx(training, rel=0.2)


def test_few_heads_are_cut_into_segments() -> None:
    sizes = parse_sizes("1x131072x8x128x128")
    found, whole = (estimate(plan_of(ROOT / "specs/kda.kcp"), d, sizes) for d in (H200, NARROW))
    assert (found.segments, whole.segments) == (8, 1)
    scan, reverse = (kernels(found)[name] for name in ("scan", "reverse"))
    assert {(work.programs, work.steps) for work in (scan, reverse)} == {(128, 512)}
    assert (found.replay.work.programs, found.replay.work.steps) == (512 * 16, 8)  # in runs, cut or not
    (forward,) = (k for k in found.forward if k.work.name == "segments")
    (backward,) = (k for k in found.backward if k.work.name == "segments")
    assert forward.work.programs == backward.work.programs == 7 * 16
    assert 512 < backward.work.steps < forward.work.steps < 3 * 512  # the forward works out M as well
    assert forward.work.reads["W_0"] == scan.reads["W_0"] * 7 / 8
    assert "segments" not in kernels(whole)
    serial = [sum(k.predicted_ms for k in some.forward[1:]) for some in (found, whole)]
    assert serial[0] < serial[1] / 2


def test_strong_decays_cost_products_only_where_channels_decay_alone() -> None:
    for kernel, gdn in (("prepare", "prepare"), ("far_gradients", "gradients")):
        weak, strong = (kernels(estimated("kda", SIZES, levels))[kernel].flops for levels in (False, True))
        assert weak < strong
        assert len({kernels(estimated("gdn", SIZES, levels))[gdn].flops for levels in (False, True)}) == 1


def test_heads_that_share_inputs_read_less_and_add_gradients_up() -> None:
    alone, shared = (kernels(estimated("gdn", parse_sizes(f"1x512x{h}x128x128"))) for h in ("32", "16/32"))
    assert alone["prepare"].reads["k"] == 2 * shared["prepare"].reads["k"] == 256
    assert shared["gradients"].writes["dq"] == 512
    assert "group sums" in shared
    assert "group sums" not in alone


def test_the_command_prints_a_table(spec_path: Path) -> None:
    found = CliRunner().invoke(main, ["plan", str(spec_path), "--shape", "1x8192x32x128x128"])
    assert found.exit_code == 0, found.output
    for word in ("prepare", "scan", "states", "reverse", "gradients", "floor", "saved", "recomputed", "MiB"):
        assert word in found.output
    assert max(map(len, found.output.splitlines())) <= 132


def test_the_command_writes_json() -> None:
    arguments = ["plan", str(ROOT / "specs/kda.kcp"), "--device", "h200", "--shape", "4x4096x16/32x128x64", "--json"]
    whole = json.loads(CliRunner().invoke(main, arguments).output)
    assert whole["sizes"] == {"B": 4, "T": 4096, "H": 16, "HV": 32, "K": 128, "V": 64}
    assert [kernel["name"] for kernel in whole["backward"]] == [
        "reverse",
        "score_gradients",
        "far_gradients",
        "gradients",
        "group sums",
    ]
    forward = sum(kernel["predicted_ms"] for kernel in whole["forward"])
    assert whole["predicted_ms"]["forward"] == pytest.approx(forward, rel=1e-3)
    assert whole["floor"]["forward"]["ms"] < forward < whole["predicted_ms"]["training"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "8192x32"], "is not BxTxHxKxV"),
        (["--shape", "1x0x32x128x128"], "at least 1"),
        (["--shape", "1x64x3/4x16x16"], "4 value heads cannot share 3 heads evenly"),
        (["--shape", "1x64x3x512x16"], "at most 256"),
        (["--shape", "1x64x3x16x16", "--device", "abacus"], "'abacus' is not"),
        ([], "Missing option '--shape'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str) -> None:
    found = CliRunner().invoke(main, ["plan", str(ROOT / "specs" / "kda.kcp"), *arguments])
    assert found.exit_code == 2
    assert said in found.output


def test_a_wrong_spec_is_a_diagnostic(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["plan", str(tmp_path / "none.kcp"), "--shape", "1x64x2x16x16"])
    assert found.exit_code == 1
    assert "KCP001" in found.output
