"""Kernels by chunks for Hopper give what the portable ones do, emulated: nothing but a GPU runs Gluon.

Both take what one backward hands them; where scans solve, those in roles. Operands are rounded to 16 bits at the same
places, so that results agree to fp32, but for what an exponential that is one unit off moves over such a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from kcpgen.runtime import hopper
from kcpgen.runtime.launch import StatesAround, Tiles
from kcpgen.runtime.layout import ChunkLayout
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import make_inputs
from kcpgen.verify.op import load_op
from tests.conftest import ROOT
from tests.kernels.forms import built
from tests.kernels.gluon_by_chunks import launcher
from tests.kernels.serial_in_roles import in_roles, left_to_scans

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN, in the interpreter
FILES = {path.parent.name: path for path in sorted((ROOT / "generated").glob("*/*gradients_hopper.py"))}
FOLDER = TemporaryDirectory()
FORMS_HERE = (  # that no op has: kernels of the key axis alone, sums and parameters that values read
    "values_of_a_group_and_of_a_head",
    "values_made_with_a_sum_over_keys",
    "values_made_with_a_sum_over_values",
    "sums_in_sums",
)
ENDS = ((0, 70, 82), (0, 38, 50))  # where chunks have 64 tokens and 32: behind a short one there is a sequence of NaN
FAST = 3  # a key whose decays fp32 cannot hold for half a chunk: programs that have it go level by level
RESET = 5  # a token that forgets all, where a decay is one number: its own gradient is none
BOUNDS = {"dG_border": (0.1, 2e-2)}  # what rounding lost, which a rounding that falls otherwise changes by itself
BOUND = (1e-3, 5e-5)  # of the greatest error by the greatest element, and of the norm of all by that of the elements


@dataclass(frozen=True)
class Sizes:
    """hard: with decays that meet what kernels do about them."""

    op: str
    keys: int
    values: int
    heads: int = 2
    hard: bool = False
    options: tuple[str, ...] = ()


ALL = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
CASES = {
    "kda in groups": Sizes("kda", 64, 64, heads=1, options=(*ALL, "lower_bound", "allow_neg_eigval")),
    "kda odd": Sizes("kda", 72, 72, options=ALL),
    "kda wide": Sizes("kda", 128, 128, hard=True),
    "dplr odd": Sizes("dplr", 72, 128, hard=True),
    "gdn2 wide": Sizes("gdn2", 128, 72, hard=True, options=ALL[:1]),
    "gla narrow": Sizes("gla", 64, 64, heads=1),
    "gla wide": Sizes("gla", 128, 128, hard=True),
    "gdn in groups": Sizes("gdn", 128, 128, heads=1, hard=True),
    "gdn odd": Sizes("gdn", 72, 128, options=ALL),
    "delta_rule": Sizes("delta_rule", 128, 128, options=ALL[:1]),
    "simple_gla narrow": Sizes("simple_gla", 64, 64, heads=1),
    "simple_gla odd": Sizes("simple_gla", 72, 72, hard=True),
    "two kernels": Sizes("values_of_a_group_and_of_a_head", 128, 128, heads=1),
    "sums over keys in values": Sizes("values_made_with_a_sum_over_keys", 128, 128, options=("scaled",)),
    "sums over values": Sizes("values_made_with_a_sum_over_values", 64, 120, heads=1, options=("scaled",)),
    "sums in sums": Sizes("sums_in_sums", 128, 72),
}


@dataclass(frozen=True)
class Call:
    """Of a kernel's launcher. expected: the results, as the portable kernel filled them afterwards."""

    module: Any
    operands: tuple[Any, ...]
    keywords: Mapping[str, Any]
    expected: Mapping[str, Tensor]

    @property
    def function(self) -> str:
        return str(self.module.__name__.rpartition(".")[2].removesuffix("_hopper"))

    @property
    def layout(self) -> ChunkLayout:
        return next(x for x in self.operands if isinstance(x, ChunkLayout))


@cache
def source_of(op: str) -> Path:
    """The file of the kernel of an op, or of a form, which is generated for this."""
    return FILES[op] if op in FILES else built(op, Path(FOLDER.name)) / "gradients_hopper.py"


class Idle:
    """In place of a kernel whose results nobody looks at."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *operands, **sizes: None


@cache
def call(sizes: Sizes) -> Call:
    (only,) = calls(sizes)
    return only


def calls(sizes: Sizes, *, taken: bool = False) -> list[Call]:
    """Of the kernel's launcher in a backward. taken: it says that it has done all of its work, values' too."""
    op = load_op(source_of(sizes.op).parent)
    far = op.form.decay == "vector"
    ends = ENDS[far]
    case = Case(
        label="by chunks",
        backend="triton",
        tokens=ends[-1],
        heads=sizes.heads,
        value_heads=2,
        key_width=sizes.keys,
        value_width=sizes.values,
        offsets=ends,
        keywords={option: -4.0 if option == "lower_bound" else True for option in sizes.options},
        segments=1,
    )
    inputs = make_inputs(op, case, "cpu")
    with torch.no_grad():
        for x in (*inputs.tokens.values(), inputs.d_output):
            x[:, ends[1] :] = torch.nan
        if sizes.hard:
            (decay,) = op.description.log_decays
            if far:
                inputs.tokens[decay][..., FAST] = -8.0
            else:
                inputs.tokens[decay][:, RESET] = -torch.inf
    path, package = source_of(sizes.op), op.chunk.__module__.rpartition(".")[0]
    module, gradients = (import_module(f"{package}.{stem}") for stem in (path.stem, "gradients"))
    found: list[Call] = []

    def recorded(*operands: Any, states: StatesAround, **keywords: Any) -> bool:
        expected = {n: x for n, x in keywords.items() if is_result(n) and x is not None}
        given = {n: x.clone() if n in expected else x for n, x in keywords.items()}
        given["corrected_gradients"] = tuple(x.clone() for x in keywords["corrected_gradients"])  # dR takes their place
        found.append(Call(module, operands, {**given, "states": replace(states)}, expected))
        return taken

    in_these = in_roles(path.parent) if left_to_scans(path.parent) else nullcontext()
    with in_these, pytest.MonkeyPatch.context() as patch:
        settled = hopper.settled

        def asked(tiles: Tiles, device: torch.device) -> Tiles:
            others = settled(tiles, device)
            return replace(others, gradients=replace(others.gradients, in_flight=True))

        patch.setattr(hopper, "settled", asked)
        patch.setattr(module, f"{path.stem.removesuffix('_hopper')}_on_hopper", recorded)
        for later in ("near_gradients_kernel", "finish_kernel"):
            patch.setattr(gradients, later, Idle(), raising=False)
        if taken:
            patch.setattr(gradients, "score_gradients", None)
        evaluate(op.chunk, inputs, case, backend="triton")
    return found


def is_result(name: str) -> bool:
    return name.startswith(("d_", "dG"))


def by_chunk(name: str, far: bool) -> bool:
    """Whether an operand or result begins with the first chunk of a launch."""
    return name.startswith(("dA_", "dL_")) or (far and is_result(name))


def emulated(given: Call, source: Path) -> dict[str, Tensor]:
    """What the kernel in that file makes of it, in two launches, the later one first."""
    far = given.function == "far_gradients"
    apart = any(n.startswith("dA_") for n in given.keywords)  # the value axis has a kernel of its own
    results = {n: given.keywords[n].clone() for n in given.expected}
    for n, x in results.items():
        if far or not apart or x.dim() > 3:  # one number a token may hold what the value axis has added
            results[n] = torch.full_like(x, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given.module, f"{given.function}_kernel", launcher(source))
        for chunks in (range(1, given.layout.chunk_count), range(1)):
            keywords = {**given.keywords, **results, "chunks": chunks}
            some = {n: x[chunks.start : chunks.stop] for n, x in keywords.items() if by_chunk(n, far)}
            assert getattr(given.module, f"{given.function}_on_hopper")(*given.operands, **(keywords | some))
    return results


def somebodys(x: Tensor, layout: ChunkLayout) -> Tensor:
    """What is not of the sequence of NaN, of a result by tokens or by chunks."""
    _, first, tokens, chunk = layout.sequences[-1].tolist()
    return x[:, :first] if x.shape[:2] == (1, first + tokens) else x[:chunk]


def check(given: Call, source: Path) -> None:
    found = emulated(given, source)
    for name, whole in given.expected.items():
        expected = somebodys(whole, given.layout).double()
        assert expected.isfinite().all()
        off = somebodys(found[name], given.layout).double() - expected
        assert not off[expected == 0].any(), name
        errors = float(off.abs().max() / expected.abs().max()), float(off.norm() / expected.norm())
        assert all(error < bound for error, bound in zip(errors, BOUNDS.get(name, BOUND), strict=True)), (name, errors)


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_portable_kernel(case: str) -> None:
    check(call(CASES[case]), source_of(CASES[case].op))


BOTH_AXES = [name for name, path in FILES.items() if "score_tiles" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("of", ["dtype", "strides"])
def test_values_that_tiles_cannot_be_copied_from_are_left_to_the_portable_kernels(of: str) -> None:
    given = call(CASES["gdn in groups"])
    function = getattr(given.module, f"{given.function}_on_hopper")
    at = [*signature(function).parameters].index("v")
    v = given.operands[at]
    other = v.float() if of == "dtype" else torch.zeros(*v.shape[:3], v.shape[3] + 1, dtype=v.dtype)[..., :-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given.module, f"{given.function}_kernel", Idle())
        assert function(*given.operands, **given.keywords)
        patch.setattr(given.module, f"{given.function}_kernel", None)
        assert not function(*given.operands[:at], other, *given.operands[at + 1 :], **given.keywords)


@pytest.mark.parametrize("name", BOTH_AXES)
def test_nothing_is_reserved_for_the_portable_kernels_where_one_has_both_axes(name: str) -> None:
    (sizes, *_) = (sizes for sizes in CASES.values() if sizes.op == name)
    assert len(calls(sizes, taken=True)) == 1


def test_every_kernel_by_chunks_is_here() -> None:
    assert {sizes.op for sizes in CASES.values()} == {*FILES, *FORMS_HERE}
    assert [name for name, path in FILES.items() if path.name == "gradients_hopper.py"] == BOTH_AXES


# What such a test is worth: faults planted in a copy of a kernel, and the first thing that is wrong then.
FAULTS = [
    ("kda wide", "mismatch -= (write_0 ", "mismatch += (write_0 ", "dG_border"),
    (
        "kda wide",
        "mismatch += (erase_0 * from_border - erase_0_low.to(gl.float32)) * erase_0_share",
        "pass",
        "dG_border",
    ),
    ("kda odd", "gl.where(live[None, :], dq_in, 0.0)", "dq_in", "d_read"),
    ("kda in groups", "-beta[None, :] * k", "beta[None, :] * k", "d_write_0"),
    ("kda in groups", "g_source, [batch.to(gl.int32), head,", "g_source, [batch.to(gl.int32), group,", "d_read"),
    (
        "kda wide",
        "product(gl.convert_layout(erase_0_low, LEFT), dL_0_0",
        "product(gl.convert_layout(erase_0_low, LEFT), dA_0",
        "d_write_0",
    ),
    ("kda wide", "write_0_left, dL_0_0_tile.permute([1, 0])", "write_0_left, dL_0_0_tile", "d_erase_0"),
    ("kda wide", "from_border = gl.exp2(G - G_middle[:, None])", "from_border = gl.exp2(G)", "d_read"),
    (
        "kda wide",
        "same_level(pair_row, pair_column, level), dA_0_given",
        "later_block(pair_row, pair_column, level), dA_0_given",
        "d_read",
    ),
    (
        "kda wide",
        "            gl.thread_barrier()  # all have multiplied what is there\n",
        "",
        "written that some thread may still read",
    ),
    ("kda wide", "    fence_async_shared()\n    lost", "    lost", "what was not fenced"),
    ("kda wide", "mbarrier.wait(arrived.index(1), 0)", "mbarrier.wait(arrived.index(1), 1)", "read before it is there"),
    ("kda wide", "    mbarrier.wait(arrived.index(3), 0)\n", "", "read before it is there"),
    ("kda wide", "(level - FIRST_LEVEL + 1) & 1", "(level - FIRST_LEVEL) & 1", "read before it is there"),
    ("kda wide", "dA_0, [here * C, 0]", "dA_0, [at * C, 0]", "d_read"),
    (
        "gla wide",
        "    gl.thread_barrier()  # all have read what is given\n",
        "",
        "written that some thread may still read",
    ),
    (
        "dplr odd",
        "dL_1_0_rest_tile = dL_1_0_given._reinterpret(LOW, [2, C, C], of_scores).index(1)",
        "dL_1_0_rest_tile = dL_1_0_given._reinterpret(LOW, [2, C, C], of_scores).index(0)",
        "d_erase_1",
    ),
    ("kda wide", "    mbarrier.wait(arrived.index(2), 0)\n", "", "read before it is there"),
    ("kda wide", " + gl.sum(write_0 * dw_out_0, axis=1)", "", "dG_end"),
    (
        "dplr odd",
        "da_in_1 = product(S_tile.permute([1, 0]), dU_1_rest_tile.permute([1, 0]), da_in_1)",
        "pass",
        "d_erase_1",
    ),
    ("dplr odd", "gl.exp2(gl.minimum(log_from_border - log_decay, 0.0))", "gl.exp2(log_from_border)", "d_erase_1"),
    ("dplr odd", "shared(U_1, [at * C, 0]", "shared(U_1, [here * C, 0]", "d_write_1"),
    ("gdn2 wide", "mismatch += erase_0 * from_border * erase_0_unseen", "pass", "dG_border"),
    ("gla wide", "q_source.block_type.nbytes + k_source", "k_source", "more bytes than a barrier expects"),
    (
        "gdn in groups",
        "mbarrier.wait(arrived.index(1), block & 1)",
        "mbarrier.wait(arrived.index(1), 0)",
        "read before it is there",
    ),
    (
        "gdn in groups",
        "write_0_tile = S_tile._reinterpret(LOW, [VP // C, C, BK], of_operands).index(1)",
        "write_0_tile = S_tile._reinterpret(LOW, [VP // C, C, BK], of_operands).index(0)",
        "d_g",
    ),
    (
        "gdn in groups",
        "        gl.thread_barrier()  # all have read operands and vectors, where the next states and gradients go\n",
        "",
        "written that some thread may still read",
    ),
    ("gdn in groups", "S, [at * VP, key_start + BK]", "S, [at * VP, key_start]", "d_g"),
    ("gdn in groups", "live & decays(log_decay)", "live", "d_g"),
    ("gdn in groups", "leaving_so_far += tl.sum(write_0_low", "leaving_so_far -= tl.sum(write_0_low", "d_g"),
    ("gdn in groups", "of_decays -= write_0", "of_decays += write_0", "d_g"),
    ("gdn in groups", "of_decays += erase_0", "of_decays -= erase_0", "d_g"),
    ("gdn in groups", "        dq_in = gl.where(live[:, None], dq_in, 0.0)", "        pass", "d_g"),
    (
        "gdn in groups",
        "da_in_0, dq_in, dw_out_0 = warpgroup_mma_wait(0",
        "da_in_0, dq_in, dw_out_0 = warpgroup_mma_wait(1",
        "product is read before it is there",
    ),
    ("gdn odd", "HV * K, count, K - key_start)", "HV * K, C, K - key_start)", "outside the tensor"),
    ("simple_gla odd", "count, K - key_start)", "count, K)", "outside the tensor"),
    (
        "simple_gla odd",
        "            gl.thread_barrier()  # all have stored gradients, where the next vectors go\n",
        "",
        "written that some thread may still read",
    ),
    (
        "simple_gla narrow",
        "    gl.thread_barrier()  # all have stored what lay in the place of states\n",
        "",
        "written that some thread may still read",
    ),
    ("delta_rule", "        mbarrier.wait(arrived.index(2), block & 1)\n", "", "read before it is there"),
    ("simple_gla odd", "laid_by_rows(d_k, k_tile", "laid_by_rows(d_k, q_tile", "d_q"),
    ("gdn odd", "d_k += (2.0 * d_sum_1)", "d_k -= (2.0 * d_sum_1)", "d_k"),
    ("gdn odd", "d_A_log -= ", "d_A_log += ", "d_A_log"),
    ("delta_rule", "d_beta -= ", "d_beta += ", "d_beta"),
    ("simple_gla odd", "running_sum(dG, reverse=True)", "running_sum(dG)", "d_g"),
    ("simple_gla narrow", "product(dA_0_tile.permute([1, 0]), read", "product(dA_0_tile, read", "d_g"),
    ("gdn in groups", "dR_0, [at * C, 0]", "dR_0, [here * C, 0]", "d_v"),
    ("gdn in groups", "v_source, [batch.to(gl.int32), head,", "v_source, [batch.to(gl.int32), group,", "d_beta"),
    ("gdn in groups", "v_tile = S_tile._re", "v_tile = dS_next_tile._re", "written while it is copied"),
    ("gdn in groups", "fresh_product(dR_0_tile, U_0", "fresh_product(U_0_tile, U_0", "d_g"),
    (
        "gdn in groups",
        "since * tl.where(rows[:, None] > earlier",
        "since * tl.where(rows[:, None] >= earlier",
        "d_beta",
    ),
    ("gdn in groups", "dL_0_0 = since * tl", "dL_0_0 = tl", "d_g"),
    ("gdn in groups", "    dA_0 = gl.where(live[:, None], dA_0, 0.0)\n", "", "d_g"),
    ("gdn in groups", "    dA_0_tile.store(dA_0.to(LOW))\n", "", "d_g"),
    (
        "gdn in groups",
        "warpgroup_mma_wait(0, deps=(dA_0, dL_0_0))",
        "warpgroup_mma_wait(1, deps=(dA_0, dL_0_0))",
        "before it is there",
    ),
    (
        "gdn in groups",
        "    gl.thread_barrier()  # all have stored what lay in the place of states\n",
        "",
        "written that some thread may still read",
    ),
    (
        "gdn in groups",
        "    gl.thread_barrier()  # all have read what lies in the place of states\n",
        "",
        "written that some thread may still read",
    ),
    ("gdn odd", "HV * V, count, V)", "HV * V, C, V)", "outside the tensor"),
    ("gdn odd", "    mbarrier.wait(arrived.index(0), 0)\n", "", "read before it is there"),
    ("gdn odd", "dR_0.block_type.nbytes", "v_source.block_type.nbytes * 2", "nothing completes a barrier"),
    ("delta_rule", "d_beta += tl.sum(dV_0 * v, axis=1)", "d_beta += tl.sum(dV_0, axis=1)", "d_beta"),
    ("simple_gla odd", "dA_0 = since * tl", "dA_0 = tl", "d_g"),
    ("simple_gla narrow", "dU_0, [at * C, 0]", "dU_0, [here * C, 0]", "d_v"),
    ("simple_gla narrow", "dU_0_tile = S_tile._re", "dU_0_tile = dS_next_tile._re", "written while it is copied"),
]


@pytest.mark.parametrize(
    ("case", "right", "wrong", "said"), FAULTS, ids=[f"{case}: {right.strip()}" for case, right, *_ in FAULTS]
)
def test_a_planted_fault_is_found(case: str, right: str, wrong: str, said: str, tmp_path: Path) -> None:
    sizes = CASES[case]
    text = source_of(sizes.op).read_text(encoding="utf-8")
    assert right in text, "what this fault changes is gone; choose something else"
    source = tmp_path / source_of(sizes.op).name
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(AssertionError, match=said):
        check(call(sizes), source)
