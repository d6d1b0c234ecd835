"""`prepare` for Hopper leaves behind what the portable kernel does, emulated: nothing but a GPU runs Gluon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kcpgen.runtime import hopper, hopper_ops
from kcpgen.runtime.launch import Tiles
from kcpgen.runtime.layout import ChunkLayout
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import make_inputs
from kcpgen.verify.op import load_op
from tests.conftest import ROOT
from tests.kernels.forms import built
from tests.kernels.gluon_by_chunks import launcher
from tests.kernels.gluon_emulated import rounded_in_columns

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN, in the interpreter
FILES = {path.parent.name: path for path in sorted((ROOT / "generated").glob("*/prepare_hopper.py"))}
ENDS = (0, 70, 150)  # behind a chunk of 6 tokens there is a sequence of NaN
RESET = 5  # a token that forgets all
BOUND = (
    4e-3,
    6e-4,
)  # of the greatest error by the greatest element, 16 bits; of the norms: few roundings fall otherwise
SOLVED = (1e-4, 1e-4)  # of (I - L)^-1 in fp32, from products of 16 bits in three parts
ALL = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")


@dataclass(frozen=True)
class Sizes:
    op: str
    keys: int
    values: int
    heads: int = 2
    apart: bool = False  # every sequence begins with a batch row, so that vectors may be read in place
    training: bool = True
    options: tuple[str, ...] = ()


CASES = {
    "gdn in groups": Sizes("gdn", 128, 128, heads=1),
    "gdn in place": Sizes("gdn", 128, 64, apart=True),
    "gdn in inference": Sizes("gdn", 64, 64, apart=True, training=False),
    "gdn odd": Sizes("gdn", 72, 72, options=ALL),
    "comba": Sizes("comba", 128, 128, options=ALL[:1]),
    "comba in place": Sizes("comba", 64, 64, apart=True),
    "delta_rule": Sizes("delta_rule", 128, 64),
    "delta_rule narrow": Sizes("delta_rule", 64, 64, options=ALL[:1]),
    "simple_gla": Sizes("simple_gla", 128, 72, heads=1),
    "simple_gla in inference": Sizes("simple_gla", 64, 64, apart=True, training=False),
    "kda in groups": Sizes("kda", 128, 128, heads=1),
    "kda in inference": Sizes("kda", 64, 64, apart=True, training=False),
    "kda odd": Sizes("kda", 72, 72, options=ALL),
    "gdn2": Sizes("gdn2", 128, 64, options=ALL[:1]),
    "gdn2 narrow": Sizes("gdn2", 64, 72),
    "gla": Sizes("gla", 128, 128, heads=1),
}
FORMS = (
    "an_erase_before_a_scalar_decay",
    "a_gate_that_is_a_sum_over_keys",
    "sums_in_sums",
    "values_of_a_group_and_of_a_head",
    "values_made_with_a_sum_over_keys",
    "reads_of_the_key_that_is_erased",
    "a_strength_made_with_a_parameter",
    "two_options_on_one_axis",
    "parameters_of_a_gate_and_of_reads",
)


@dataclass(frozen=True)
class Call:
    """Of the kernel's launcher, and what the portable kernel left behind."""

    module: Any
    operands: tuple[Any, ...]
    keywords: Mapping[str, Any]
    expected: Any

    @property
    def layout(self) -> ChunkLayout:
        return next(x for x in self.operands if isinstance(x, ChunkLayout))


@cache
def call(sizes: Sizes) -> Call:
    return recorded(ROOT / "generated" / sizes.op, sizes)


def recorded(package: Path, sizes: Sizes) -> Call:
    op = load_op(package)
    case = Case(
        label="prepare",
        backend="triton",
        tokens=128 if sizes.apart else ENDS[-1],
        heads=sizes.heads,
        value_heads=2,
        key_width=sizes.keys,
        value_width=sizes.values,
        offsets=None if sizes.apart else ENDS,
        dtype="bfloat16",
        keywords=dict.fromkeys(sizes.options, True),
        segments=1,
    )
    inputs = make_inputs(op, case, "cpu")
    with torch.no_grad():
        for x in inputs.tokens.values():
            if not sizes.apart:
                x[:, ENDS[1] :] = torch.nan
        for decay in op.description.log_decays:
            inputs.tokens[decay][:, RESET] = -torch.inf
    name = op.chunk.__module__.rpartition(".")[0]
    module, portable = (import_module(f"{name}.{stem}") for stem in ("prepare_hopper", "prepare"))
    found: list[Call] = []

    def launched(*operands: Any, **keywords: Any) -> bool:
        found.append(Call(module, operands, keywords, next(x for x in operands if isinstance(x, portable.Prepared))))
        return False

    settled = hopper.settled

    def asked(tiles: Tiles, device: torch.device) -> Tiles:
        tiles = settled(tiles, device)
        return replace(tiles, prepare=replace(tiles.prepare, in_flight=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "settled", asked)
        patch.setattr(module, "prepare_on_hopper", launched)
        if sizes.training:
            evaluate(op.chunk, inputs, case, backend="triton")
        else:
            with torch.no_grad():
                op.chunk(**inputs.tokens, **inputs.params, **inputs.keywords, backend="triton")
    return found[0]


def scratch(given: Call) -> dict[str, Tensor]:
    """Tensors that the kernel fills: the scan has those of corrected values, and inputs stay as they are."""
    inputs = [x.data_ptr() for x in given.operands if isinstance(x, Tensor)]
    named = {field.name: getattr(given.expected, field.name) for field in fields(given.expected)}
    tensors = {n: x for n, x in named.items() if isinstance(x, Tensor) and x.data_ptr() not in inputs}
    erasing = any(name.startswith(("W_", "inverse_")) for name in tensors)
    modes = [value for name, value in given.keywords.items() if name.endswith("_mode")]
    unfilled = [
        *(["U_0"] if erasing else []),
        *(["sums"] if modes and not any(modes) else []),
    ]  # of options that are off
    return {n: x for n, x in tensors.items() if n not in unfilled}


def emulated(given: Call, source: Path) -> dict[str, Tensor]:
    """What the kernel in that file makes of it, in two launches, the later one first."""
    empty = {n: torch.full_like(x, torch.nan) for n, x in scratch(given).items()}
    operands = [replace(given.expected, **empty) if x is given.expected else x for x in given.operands]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given.module, "prepare_kernel", launcher(source))
        for chunks in (range(1, given.layout.chunk_count), range(1)):
            assert given.module.prepare_on_hopper(*operands, **{**given.keywords, "chunks": chunks})
    return empty


def for_roles(given: Call, *, keeps_W: bool = True) -> Call:
    """The same call as scans in roles ask for it: numbers of tokens in the place of A, (I - L)^-1 in two parts in that
    of B where they solve, and W for others alone. Of G, what decays by it: tokens that forget all leave no more of it.
    """
    made = given.expected
    names = {field.name for field in fields(made)}
    decayed = getattr(made, "decay_out", None) is not None
    from_start = made.from_start / given.keywords["scale"] if decayed else 1.0
    asked: dict[str, Any] = {"for_roles": True, "A_0": None}
    if decayed:
        asked |= {"G": from_start, "score_scale": torch.full_like(made.from_start, given.keywords["scale"])}
    if "inverse_0" in names:
        strengths = getattr(made, "strength_0", torch.ones(()))
        parts = [rounded_in_columns(T, T.shape[-1]) for T in made.T_0_0.flatten(0, 1)]
        low, rest = (torch.stack(x).view_as(made.T_0_0) for x in zip(*parts, strict=True))
        asked |= {
            "inverse_0": low,
            "inverse_0_rest": rest.bfloat16(),
            "T_0_0": None,
            "erase_from_start": -strengths * from_start,  # of ops that erase by what they write by
            "B_0_0": None,
            **({} if keeps_W else {"W_0": None}),
        }
    expected = replace(made, **asked)
    return replace(given, operands=tuple(expected if x is made else x for x in given.operands), expected=expected)


def in_full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With both parts of (I - L)^-1 in one, and the greater one summed down its columns, in the runs in which numbers
    take what those above them lost: where one of them falls is another matter each time."""
    rests = {n.removesuffix("_rest"): x for n, x in tensors.items() if n.startswith("inverse_") and n.endswith("_rest")}
    made = {n: x for n, x in tensors.items() if n.removesuffix("_rest") not in rests}
    for n, x in rests.items():
        made[f"{n} and its rest"] = tensors[n].float() + x
        runs = tensors[n].float().unflatten(2, (-1, hopper_ops.CARRIED.value))
        made[f"{n}, summed"] = runs.cumsum(3).flatten(2, 3)
    return made


def check(given: Call, source: Path) -> None:
    found, right = (in_full(x) for x in (emulated(given, source), scratch(given)))
    last = given.layout.sequences[-1].tolist()[3] if given.layout.sequence_count > 1 else given.layout.chunk_count
    for name, whole in right.items():
        expected = whole[:last].double()
        if name == "G":
            found[name].exp2_()
        assert expected.isfinite().all(), name
        off = found[name][:last].double() - expected
        assert not off[expected == 0].any(), name
        errors = float(off.abs().max() / expected.abs().max()), float(off.norm() / expected.norm())
        bounds = SOLVED if name.startswith("T_") or name.endswith("its rest") else BOUND
        assert all(error < bound for error, bound in zip(errors, bounds, strict=True)), (name, errors)


@pytest.mark.parametrize("case", CASES)
def test_it_leaves_what_the_portable_kernel_leaves(case: str) -> None:
    check(call(CASES[case]), FILES[CASES[case].op])


SOLVING, SCORING = (
    [name for name, sizes in CASES.items() if sizes.training and word in FILES[sizes.op].read_text("utf-8")]
    for word in ("inverse_0", "for_roles")
)


@pytest.mark.parametrize("keeps_W", [True, False])
@pytest.mark.parametrize("case", SOLVING)
def test_it_leaves_what_a_scan_solves_with(case: str, keeps_W: bool) -> None:
    given = for_roles(call(CASES[case]), keeps_W=keeps_W)
    assert ("W_0" in scratch(given), "B_0_0" in scratch(given)) == (keeps_W, False)
    check(given, FILES[CASES[case].op])


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("rounded_in_columns(inverse_tile, C)", "rounded(T_0_0)", "inverse_0"),
        ("rounded_in_columns(inverse_tile, C)", "rounded(tl.where(before, T_0_0, 0.0))", "summed"),
        ("inverse_0_rest_leaving.store(inverse_0_rest.to(LOW))", "inverse_0_rest_leaving.store(inverse_0)", "its rest"),
        ("        inverse_0_rest_leaving._keep_alive()\n", "        pass\n", "may lose its place"),
    ],
)
def test_a_fault_in_what_scans_solve_with_is_found(right: str, wrong: str, said: str, tmp_path: Path) -> None:
    text = FILES["gdn"].read_text(encoding="utf-8")
    assert right in text
    source = tmp_path / "prepare_hopper.py"
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    given = for_roles(call(CASES["gdn in groups"]), keeps_W=True)
    with pytest.raises(AssertionError, match=said):
        check(given, source)


def test_W_is_left_out_of_segments_that_forget_what_enters_them() -> None:
    """Of one head the segment of the second chunk remembers, the other forgets within fewer chunks than it has."""
    given = for_roles(call(CASES["gdn in place"]), keeps_W=True)
    of_chunks = torch.tensor([(-1, -1), (0, 1)], dtype=torch.int32)
    assert given.layout.chunk_count == len(of_chunks)
    needed = torch.tensor([(1, 0)], dtype=torch.int32)
    keywords = {**given.keywords, "segments": of_chunks, "chunks_needed": needed}
    found = emulated(replace(given, keywords=keywords), FILES["gdn"])["W_0"]
    assert found[0].isnan().all()
    assert found[1, 1].isnan().all()
    off = found[1, 0].double() - given.expected.W_0[1, 0].double()
    assert float(off.norm() / given.expected.W_0[1, 0].double().norm()) < BOUND[1]


@pytest.mark.parametrize("case", [*(name for name in SCORING if name not in SOLVING), "simple_gla in inference"])
def test_it_leaves_what_a_scan_makes_scores_with(case: str) -> None:
    given = for_roles(call(CASES[case]))
    assert "A_0" not in scratch(given)
    check(given, FILES[CASES[case].op])


@pytest.mark.parametrize("case", ["gdn in place", "simple_gla in inference"])
def test_queries_stay_where_they_lie_then(case: str) -> None:
    """Nobody reads them: they may be anything. Nor keys, where nothing is erased."""
    given = for_roles(call(CASES[case]))
    assert given.expected.in_place
    unread = [given.expected.read, *([] if "W_0" in scratch(given) else [given.expected.write_0])]
    kept = [x.detach().clone() for x in unread]
    with torch.no_grad():
        for x in unread:
            x.fill_(torch.nan)
        try:
            check(given, FILES[CASES[case].op])
        finally:
            for x, was in zip(unread, kept, strict=True):
                x.copy_(was)


@pytest.mark.parametrize("form", FORMS)
def test_so_it_does_of_forms_that_no_op_here_has(form: str, tmp_path: Path) -> None:
    package = built(form, tmp_path)
    check(recorded(package, Sizes(form, 64, 72, heads=1)), package / "prepare_hopper.py")


def test_every_such_kernel_is_here() -> None:
    assert {sizes.op for sizes in CASES.values()} == set(FILES)


# What such a test is worth: faults planted in a copy of a kernel, and the first thing that is wrong then.
FAULTS = [
    ("gdn in groups", "L_0_0 *= (-beta)[:, None]", "L_0_0 *= beta[:, None]", "B_0_0"),
    ("gdn in groups", "tl.exp2(G_across)[None, :]", "tl.exp2(-G_across)[None, :]", "W_0"),
    ("gdn in groups", "rounded(-T_0_0", "rounded(T_0_0", "W_0"),
    ("gdn in groups", "up_to = rows[:, None] >= token_columns", "up_to = rows[:, None] > token_columns", "A_0"),
    ("gdn in groups", "if count < C:", "if count < 0:", "A_0"),
    ("gdn in groups", "[at * C, block * BK], erase_block)", "[at * C, 0], erase_block)", "W_0"),
    (
        "gdn in groups",
        "gl.thread_barrier()\n                erase_block.store",
        "erase_block.store",
        "may still read",
    ),
    (
        "gdn in groups",
        "    mbarrier.wait(arrived.index(0), 0)\n    if FORMED",
        "    if FORMED",
        "before it is there",
    ),
    ("gdn in groups", "KP // BK * (k_source", "(k_source", "more bytes than a barrier expects"),
    (
        "gdn odd",
        "    tma.store_wait(0)\n    if A_0_out",
        "    if A_0_out",
        "while it is copied out",
    ),
    ("gdn odd", "tl.rsqrt(sum_1 + 1e-06)[:, None] * k", "tl.rsqrt(sum_0 + 1e-06)[:, None] * k", "write_0|A_0"),
    ("gdn odd", "    fence_async_shared()\n    if read_out", "    if read_out", "not fenced"),
    ("comba", "tl.exp2(G_before_across)", "tl.exp2(G_across)", "W_0"),
    ("comba", "    tma.store_wait(0)  # till", "    pass  # till", "ends while tiles are copied out"),
    ("comba", "    q_tile._keep_alive()\n", "", "may lose its place"),
    ("delta_rule", "A_0 = tl.where(up_to, A_0, 0.0)", "pass", "A_0"),
    ("simple_gla", "tl.exp2(G_from), mask=rows > 0", "tl.exp2(G), mask=rows > 0", "to_end"),
    ("kda in groups", "gl.exp2(G_end - G_middle)", "gl.exp2(G_end)", "w_out_0"),
    ("kda in groups", "gl.exp2(gl.minimum(G_end[:, None] - G, 0.0))", "gl.exp2(G_end[:, None])", "w_out_0"),
    ("kda in groups", "same_level(later, earlier, level)", "later[:, None] > earlier[None, :]", "A_0"),
    ("kda in groups", "= from_border * gl.exp2(G_middle)", "= from_border * gl.exp2(G_end)", "q_in"),
    ("kda in groups", "rows[:, None] == token_columns", "rows[:, None] > token_columns", "A_0"),
    ("kda in groups", "later[:, None] > earlier", "later[:, None] >= earlier", "A_0"),
    ("kda in groups", "            span_tile.store(triangle)\n", "", "q_in|A_0|decay"),
    ("kda in groups", "live_rows[None, :] &", "(earlier < C)[None, :] &", "isfinite|w_out_0|q_in"),
    (
        "kda in groups",
        "        gl.thread_barrier()  # all have read",
        "        pass  # all have read",
        "may still read",
    ),
    (
        "kda in groups",
        "scaled_rest_tile.permute([1, 0]), solved_block)",
        "scaled_tile.permute([1, 0]), solved_block)",
        "W_0",
    ),
    ("kda odd", "tl.rsqrt(sum_1 + 1e-06)[None, :] * k", "tl.rsqrt(sum_0 + 1e-06)[None, :] * k", "A_0|w_out_0"),
    (
        "gdn2",
        "a_in_0, a_in_0_rest = rounded(erase_0_base * from_start)",
        "a_in_0, a_in_0_rest = rounded(k * from_start)",
        "W_0",
    ),
]


@pytest.mark.parametrize(
    ("case", "right", "wrong", "said"), FAULTS, ids=[f"{case}: {right.strip()}" for case, right, *_ in FAULTS]
)
def test_a_planted_fault_is_found(case: str, right: str, wrong: str, said: str, tmp_path: Path) -> None:
    sizes = CASES[case]
    text = FILES[sizes.op].read_text(encoding="utf-8")
    assert right in text, "what this fault changes is gone; choose something else"
    source = tmp_path / FILES[sizes.op].name
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(AssertionError, match=said):
        check(call(sizes), source)
