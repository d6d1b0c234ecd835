"""The kernel of M in roles is M to fp32, whatever the op, emulated: nothing but a GPU runs Gluon."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import two_erases
from gluon_emulated import Barrier
from gluon_in_roles import launcher
from torch import Tensor
from torch.nn.functional import normalize

from kcpgen.runtime.launch import ScanTiles
from kcpgen.runtime.layout import ChunkLayout, chunk_layout
from kcpgen.verify.op import load_op

GENERATED = Path(__file__).resolve().parent.parent.parent / "generated"
PACKAGES = sorted(path.parent for path in GENERATED.glob("*/summary.py"))
TILES = ScanTiles(value_block=64, warps=4, stages=3)
PACKED = (0, 0, 1, 64, 64, 129, 150, 330)
ON_BORDERS = (0, 96, 96, 256, 350)  # no sequence ends within a chunk of another
HEADS, GROUPS = 4, 2


def prepared(package: Path, layout: ChunkLayout, keys: int, tokens: int, in_place: bool) -> Any:
    """What the kernel reads, made up such that M is a contraction, and `write_vectors` as it should see them."""
    torch.manual_seed(0)
    text = (package / "summary_hopper.py").read_text(encoding="utf-8")
    fields = set(re.findall(r"prepared\.(\w+)", text))
    numbers = sorted(name.removeprefix("W_") for name in fields if re.fullmatch(r"W_\d+", name))
    width, C, count = max(64, 1 << (keys - 1).bit_length()), layout.chunk, layout.chunk_count
    live = (torch.arange(C) < layout.chunks[:, 2:])[:, None, :, None] * (torch.arange(width) < keys)
    found = SimpleNamespace(dtype=torch.bfloat16, key_width=width, keys=keys, values=64)
    found.heads, found.input_heads, found.in_place, found.write_vectors = HEADS, GROUPS, in_place, {}
    for n in numbers:
        given = normalize(torch.randn(1, tokens, GROUPS, width), dim=-1).to(torch.bfloat16)
        whole = torch.cat([given, torch.zeros(1, C, GROUPS, width)], 1)
        tiles = torch.stack([whole[row, first : first + C] for row, first, _ in layout.chunks.tolist()])
        w = (tiles.transpose(1, 2).repeat_interleave(HEADS // GROUPS, 1) * live).to(torch.bfloat16)
        found.write_vectors[n] = w
        setattr(found, f"write_{n}" if f"write_{n}" in fields else f"w_out_{n}", given if in_place else w)
        erased = -(0.3 / len(numbers)) * w + 0.02 * torch.randn(w.shape) * live
        setattr(found, f"W_{n}", erased.to(torch.bfloat16))
    if "decay_out" in fields:
        shape = (count, HEADS, width) if "row_descriptor(prepared.decay_out, KP)" in text else (count, HEADS)
        found.decay_out = 0.9 + 0.1 * torch.rand(shape)
    if "to_end" in fields:
        found.to_end = 0.9 + 0.1 * torch.rand(count, HEADS, C)
    return found


def exact(given: Any, layout: ChunkLayout) -> Tensor:
    """In float64, chunk by chunk."""
    K, found = given.keys, []
    for _, _, tokens, first in layout.sequences.tolist():
        M = torch.eye(K, dtype=torch.float64).expand(HEADS, K, K)
        for chunk in range(first, first - (-tokens // layout.chunk)):
            decay = given.decay_out[chunk].double() if hasattr(given, "decay_out") else torch.ones(HEADS).double()
            following = (decay[:, :K, None] if decay.ndim == 2 else decay[:, None, None]) * M
            for n, w in given.write_vectors.items():
                rows = given.to_end[chunk].double() if hasattr(given, "to_end") else torch.ones(()).double()
                erased = getattr(given, f"W_{n}")[chunk, :, :, :K].double() @ M
                following = following + w[chunk, :, :, :K].double().mT @ (rows[..., None] * erased)
            M = following
        found.append(M)
    return torch.stack(found)


def check(
    package: Path,
    keys: int,
    ends: tuple[int, ...],
    in_place: bool,
    monkeypatch: pytest.MonkeyPatch,
    source: Path | None = None,
) -> None:
    """source: of a kernel in place of its own."""
    layout = chunk_layout(1, ends[-1], ends, 32, torch.device("cpu"))
    given = prepared(package, layout, keys, ends[-1], in_place)
    module = import_module(f"{load_op(package).chunk.__module__.rpartition('.')[0]}.summary_hopper")
    monkeypatch.setattr(module, "transition_kernel", launcher(source or package / "summary_hopper.py"))
    found = torch.full((len(ends) - 1, HEADS, keys, keys), torch.nan)
    assert module.transitions_in_roles(given, layout, TILES, found)
    expected = exact(given, layout)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6, "another M"


@pytest.mark.parametrize("keys", [64, 72, 128])
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_m_is_that_of_float64(package: Path, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(package, keys, PACKED, False, monkeypatch)


def in_place(package: Path) -> bool:
    return "IN_PLACE" in (package / "summary_hopper.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", [*filter(in_place, PACKAGES)], ids=lambda package: package.name)
def test_write_vectors_are_read_where_they_lie(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(package, 128, PACKED, True, monkeypatch)


def before_nan(package: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """M of one sequence, by the kernel in that file, with others or with NaN around it."""
    *_, (begin, end), _ = pairwise(PACKED)
    layout = chunk_layout(1, PACKED[-1], PACKED, 32, torch.device("cpu"))
    given = prepared(package, layout, 64, PACKED[-1], True)
    module = import_module(f"{load_op(package).chunk.__module__.rpartition('.')[0]}.summary_hopper")
    monkeypatch.setattr(module, "transition_kernel", launcher(source))
    one = layout.over([row for row in layout.sequences.tolist() if row[1:3] == [begin, end - begin]])
    found = torch.full((2, 1, HEADS, 64, 64), torch.nan)
    assert module.transitions_in_roles(given, one, TILES, found[0])
    for name in [name for name in vars(given) if name.startswith("write_") and name != "write_vectors"]:
        x = getattr(given, name)
        x[:, :begin] = x[:, end:] = torch.nan
    assert module.transitions_in_roles(given, one, TILES, found[1])
    return found[0], found[1]


@pytest.mark.parametrize("package", [*filter(in_place, PACKAGES)], ids=lambda package: package.name)
def test_vectors_of_other_sequences_do_not_matter(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(*before_nan(package, package / "summary_hopper.py", monkeypatch))


def test_a_tile_that_is_not_cleared_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = GENERATED / "gdn"
    text = (package / "summary_hopper.py").read_text(encoding="utf-8")
    assert "clear_behind(write_0_tile, " in text
    source = tmp_path / "summary_hopper.py"
    source.write_text(re.sub(r"clear_behind\(write_0_tile, .*", "pass", text), encoding="utf-8")
    assert not torch.equal(*before_nan(package, source, monkeypatch))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_m_is_zero_where_some_chunks_are_enough(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the head and sequence that it is known of; all others are what they are."""
    layout = chunk_layout(1, ON_BORDERS[-1], ON_BORDERS, 32, torch.device("cpu"))
    given = prepared(package, layout, 64, ON_BORDERS[-1], False)
    module = import_module(f"{load_op(package).chunk.__module__.rpartition('.')[0]}.summary_hopper")
    monkeypatch.setattr(module, "transition_kernel", launcher(package / "summary_hopper.py"))
    found = torch.full((len(ON_BORDERS) - 1, HEADS, 64, 64), torch.nan)
    needed = torch.tensor(layout.lengths, dtype=torch.int32)[:, None].repeat(1, HEADS)
    needed[0, 1], needed[2, 3] = 1, 4
    assert module.transitions_in_roles(given, layout, TILES, found, needed)
    expected = exact(given, layout)
    expected[0, 1] = expected[2, 3] = 0.0
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6
    assert not found[0, 1].any()
    assert not found[2, 3].any()


def test_two_erases_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(two_erases.built(tmp_path), 128, PACKED, False, monkeypatch)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("        X_0_T = warpgroup_mma_wait(0, deps=(X_0_T,))\n", "", "product is read before"),
        ("X_0_T = warpgroup_mma_wait(0", "X_0_T = warpgroup_mma_wait(1", "product is read before"),
        ("added_T = warpgroup_mma_wait(0", "added_T = warpgroup_mma_wait(1", "product is read before"),
        (
            "        added_T = warpgroup_mma_wait(",
            "        mbarrier.arrive(empty.index(stage), count=1)\n        added_T = warpgroup_mma_wait(",
            "written while a product reads it",
        ),
        ("mbarrier.arrive(empty.index(stage), count=1)", "pass", "nothing completes a barrier"),
        ("X_0_T = X_0_T * to_end", "pass", "another M"),
    ],
)
def test_a_planted_fault_is_found(
    right: str, wrong: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (GENERATED / "gdn" / "summary_hopper.py").read_text(encoding="utf-8")
    assert right in text, "what this fault changes is gone; choose something else"
    source = tmp_path / "summary_hopper.py"
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(AssertionError, match=said):
        check(GENERATED / "gdn", 64, PACKED, False, monkeypatch, source)


def test_an_emulated_barrier_completes_once_all_is_there() -> None:
    barrier = Barrier()
    barrier.expect(8)
    barrier.receive(4)
    assert barrier.phase == 0
    barrier.receive(4)
    assert barrier.phase == 1
    barrier.arrive()
    assert barrier.phase == 2
