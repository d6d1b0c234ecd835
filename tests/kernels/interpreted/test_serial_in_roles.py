"""Scans and reverse scans in roles leave behind what the portable ones do, emulated: nothing but a GPU runs Gluon.

Both read the same scratch, made up, and round to 16 bits at the same places. Scans that solve for corrected values
round elsewhere: they are held against their own equations in float64, rounded where they round, and are near the rest.
Whole calls are in `test_in_roles.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from kcpgen.runtime import hopper_roles
from kcpgen.runtime.halves import Chosen
from kcpgen.runtime.launch import ScanTiles
from kcpgen.runtime.layout import ChunkLayout, chunk_layout
from kcpgen.verify.op import load_op
from tests.conftest import ROOT
from tests.kernels import two_erases
from tests.kernels.gluon_in_roles import launcher

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN, in the interpreter
OPS = sorted(path.parent.name for path in (ROOT / "generated").glob("*/scan_hopper.py"))
FOLDER = TemporaryDirectory()
NOBODYS = 2  # the sequence of NaN
EVERY = 2  # chunks between states that a forward keeps, here
# Of the greatest error by the greatest element, and of the norm of all by that of the elements. States are fp32, but
# what is added to them has been rounded to 16 bits, and one number that falls otherwise is 2**-8 of itself.
BOUNDS = {torch.float32: (4e-3, 2e-4), torch.bfloat16: (4e-3, 6e-4)}
IN_FULL = (1e-3, 5e-5)  # of what is left behind in two parts
SOLVED_ELSEWHERE = 5e-3  # of norms, where W and B are rounded or R is


@dataclass(frozen=True)
class Sizes:
    """Packed sequences, one of them of NaN that begins within the last chunk of another, one empty; or a batch.

    in_place: vectors and values are read where inputs lie, where an op's can be. wide: a program has 128 columns of a
    state; upright: 32. stages: chunks in the ring, at most.
    """

    op: str
    keys: int
    values: int
    heads: int = 1
    value_heads: int = 1
    chunks: int = 3  # of the longest sequence
    batch: bool = False
    in_place: bool = False
    wide: bool = False
    upright: bool = False
    stages: int = 2


TILES = ScanTiles(value_block=64, warps=4, stages=1)
CASES = {
    "gdn": Sizes("gdn", 128, 64, chunks=5),
    "gdn in place": Sizes("gdn", 128, 128, value_heads=2, in_place=True, wide=True),
    "gdn odd": Sizes("gdn", 72, 72),
    "delta_rule": Sizes("delta_rule", 72, 64, stages=3),
    "delta_rule in place": Sizes("delta_rule", 64, 128, value_heads=2, batch=True, in_place=True),
    "simple_gla": Sizes("simple_gla", 64, 72, wide=True),
    "simple_gla in place": Sizes("simple_gla", 128, 64, value_heads=2, in_place=True),
    "gdn upright": Sizes("gdn", 128, 64, chunks=5, upright=True),
    "gdn upright in place": Sizes("gdn", 64, 128, value_heads=2, in_place=True, upright=True, stages=3),
    "delta_rule upright": Sizes("delta_rule", 72, 72, upright=True, stages=3),
    "delta_rule upright in place": Sizes("delta_rule", 128, 64, batch=True, in_place=True, upright=True),
    "simple_gla upright": Sizes("simple_gla", 64, 72, upright=True),
    "simple_gla upright in place": Sizes("simple_gla", 128, 64, value_heads=2, in_place=True, upright=True),
    "comba": Sizes("comba", 128, 64),
    "comba in place": Sizes("comba", 64, 128, value_heads=2, batch=True, in_place=True, wide=True),
    "kda": Sizes("kda", 72, 128, value_heads=2, wide=True),
    "kda in place": Sizes("kda", 64, 64, chunks=9, batch=True, in_place=True, stages=4),
    "gla": Sizes("gla", 128, 64, value_heads=2),
    "gla in place": Sizes("gla", 64, 128, in_place=True, wide=True),
    "dplr": Sizes("dplr", 72, 64, chunks=5, value_heads=2),
    "dplr in place": Sizes("dplr", 128, 128, in_place=True, wide=True),
    "gdn2": Sizes("gdn2", 64, 72, value_heads=2, wide=True),
    "gdn2 in place": Sizes("gdn2", 128, 64, in_place=True),
    "two erases": Sizes("two_erases", 64, 64),
}


@dataclass(frozen=True)
class Given:
    """What serial kernels read. in_roles: what scans in roles do, which may solve for corrected values."""

    sizes: Sizes
    package: str
    prepared: Any
    in_roles: Any
    layout: ChunkLayout
    batch: int
    tokens: int

    @property
    def solves(self) -> bool:
        return getattr(self.in_roles, "inverse_0", None) is not None

    @property
    def scores_in_scan(self) -> bool:
        """Whether a scan in roles makes scores of reads itself, and leaves them for a backward."""
        return self.in_roles.A_0 is None

    def module(self, stem: str) -> Any:
        return import_module(f"{self.package}.{stem}")


@cache
def package_of(op: str) -> Path:
    return two_erases.built(Path(FOLDER.name)) if op == "two_erases" else ROOT / "generated" / op


@cache
def given(sizes: Sizes) -> Given:
    """Made up as `prepare` would make it, of states that stay small."""
    torch.manual_seed(0)
    package = package_name(sizes.op)
    kind = import_module(f"{package}.prepare").Prepared
    names = {field.name for field in fields(kind)}
    by_channel = "row_descriptor(prepared.decay_out, KP)" in text_of(f"{package}.scan_hopper")
    C = 32 if by_channel else 64
    ends = (0, sizes.chunks * C - C + 6, sizes.chunks * C - C + 6, sizes.chunks * C - C + 18, sizes.chunks * C + 30)
    batch, tokens = (2, (sizes.chunks - 1) * C + 10) if sizes.batch else (1, ends[-1])
    layout = chunk_layout(batch, tokens, None if sizes.batch else ends, C, torch.device("cpu"))
    K, V, H, HV = sizes.keys, sizes.values, sizes.heads, sizes.value_heads
    KP, VP = (max(64, 1 << (n - 1).bit_length()) for n in (K, V))
    text = text_of(f"{package}.prepare")
    in_place, values_in_place = (
        sizes.in_place and n == width and re.search(rf"        {flag} = .*readable_in_place", text) is not None
        for flag, n, width in (("in_place", K, KP), ("values_in_place", V, VP))
    )
    live = (torch.arange(C) < layout.chunks[:, 2:])[:, None]  # [NT, 1, C]
    shape = layout.chunk_count, HV, C

    def tiles(x: Tensor, width: int) -> Tensor:
        """[B, T, heads, columns] by chunks, as scratch has them."""
        whole = pad(x, (0, width - x.shape[3], 0, 0, 0, C))
        found = torch.stack([whole[row, first : first + C] for row, first, _ in layout.chunks.tolist()])
        return found.transpose(1, 2).repeat_interleave(HV // x.shape[2], 1) * live[..., None]

    def vectors() -> Tensor:
        return normalize(torch.randn(batch, tokens, H, K), dim=-1).bfloat16()

    G = torch.cumsum(-0.1 * torch.rand(shape) * live, -1) if "to_end" in names else torch.zeros(shape)
    strength = torch.rand(shape) * live
    made: dict[str, Any] = {}
    for name in sorted(names):
        kind_of, _, number = name.partition("_")
        if name in ("read", "q_in") or re.fullmatch(r"(write|w_out)_\d", name):
            x = vectors()
            made[name] = x if in_place else tiles(x, KP).bfloat16()
            made[f"tiles of {name}"] = tiles(x, KP)
        elif kind_of == "value" or (kind_of == "U" and f"W_{number}" not in names):
            x = torch.randn(batch, tokens, HV, V).bfloat16() * (2**-9 if name.endswith("rest") else 1)
            made[name] = x if values_in_place else tiles(x, VP).bfloat16()
        elif kind_of == "U":
            made[name] = torch.empty(*shape, VP, dtype=torch.bfloat16)
        elif kind_of == "A":
            made[name] = (torch.randn(*shape, C).tril() * live[..., None] / C).bfloat16()
        elif kind_of == "B":
            made[name] = (torch.randn(*shape, C).tril(-1) * live[..., None] / C).bfloat16()
        elif kind_of == "strength":
            made[name] = strength
    for name in sorted(name for name in names if name.startswith("W_")):
        number = name.removeprefix("W_")
        write = made[f"tiles of {f'write_{number}' if f'write_{number}' in names else f'w_out_{number}'}"]
        made[name] = (-0.3 * write + 0.02 * torch.randn(write.shape) * live[..., None]).bfloat16()
        made[name][..., K:] = 0
    made |= {
        "decay_out": 0.9 + 0.1 * torch.rand(layout.chunk_count, HV, KP) if by_channel else torch.exp2(G[..., -1]),
        "from_start": K**-0.5 * torch.exp2(G),
        "to_end": torch.exp2(G[..., -1:] - G),
    }
    solved: dict[str, Any] = {}
    if "for_roles" in names:
        read, write = (made[f"tiles of {name}"].float() for name in ("read", "write_0"))
        scores = read @ write.mT * torch.exp2(G[..., None] - G[..., None, :])
        made["A_0"] = (K**-0.5 * scores).tril().bfloat16()
        solved = {"for_roles": True, "A_0": None}
        solved |= {"G": G, "score_scale": torch.full(shape, K**-0.5)} if "G" in names else {}
    if "inverse_0" in names:
        write = made["tiles of write_0"].double()
        erase = -strength * torch.exp2(G)  # of the state at the chunk's start
        L = (write @ write.mT * (erase[..., None] * torch.exp2(-G)[..., None, :])).tril(-1)
        T = torch.linalg.inv(torch.eye(C) - L)
        made["B_0_0"] = (T * strength[..., None, :]).tril(-1).bfloat16()
        made["W_0"] = (T @ (erase[..., None] * write)).bfloat16()
        made["T_0_0"] = T.float()
        inverse = T.tril(-1).bfloat16()
        solved |= {"inverse_0": inverse, "inverse_0_rest": (T.tril(-1) - inverse.double()).bfloat16()}
        solved |= {"erase_from_start": erase, "B_0_0": None, "W_0": None, "T_0_0": None}
    if not sizes.batch:
        _, first, count, chunk = layout.sequences[NOBODYS].tolist()
        for x in (x for x in [*made.values(), *solved.values()] if isinstance(x, Tensor)):
            if x.shape[:2] == (batch, tokens):  # where it lies
                x[:, first : first + count] = torch.nan
            else:
                x[chunk] = torch.nan
    sizes_known = {"input_heads": H, "heads": HV, "keys": K, "values": V, "key_width": KP, "value_width": VP}
    made |= {**sizes_known, "in_place": in_place, "values_in_place": values_in_place, "precision": "tf32"}
    made |= {"for_roles": False, "dtype": torch.bfloat16}
    prepared = kind(**{name: made.get(name) for name in names})
    in_roles = replace(prepared, **solved) if solved else prepared
    return Given(sizes, package, prepared, in_roles, layout, batch, tokens)


def package_name(op: str) -> str:
    return str(load_op(package_of(op)).chunk.__module__.rpartition(".")[0])


def text_of(module: str) -> str:
    return Path(str(import_module(module).__file__)).read_text(encoding="utf-8")


@contextmanager
def in_roles(of: Given, stem: str, source: Path | None) -> Iterator[Any]:
    """The module of a kernel, which is that in `source` emulated, or its own."""
    module = of.module(f"{stem}_hopper")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_roles, "fitting_columns", lambda *sizes: 128 if of.sizes.wide else 64)
        patch.setattr(hopper_roles, "fit_upright", lambda *sizes: of.sizes.upright)
        patch.setattr(hopper_roles, "MOST_STAGES", of.sizes.stages)
        patch.setattr(module, f"{stem}_kernel", launcher(source or Path(module.__file__)))
        patch.setattr(module, "CHECKPOINT", EVERY, raising=False)
        yield module


def corrected(of: Given) -> list[str]:
    """Names of values that a scan leaves behind."""
    text = text_of(f"{of.package}.scan_hopper")
    return re.findall(r"tile_descriptor\(prepared\.(U_\w+), C, block\) if kept else None", text)


def scanned(
    of: Given,
    asked: frozenset[str],
    source: Path | None = None,
    *,
    portable: bool = False,
    chosen: Chosen | None = None,
) -> dict[str, Tensor]:
    """What a scan leaves behind. asked: of "initial", "o", "final" and "kept", with "replayed" for a few states.
    chosen: the heads that it is for, of an op that can be told."""
    prepared, layout = of.prepared if portable else of.in_roles, of.layout
    states = layout.sequence_count, prepared.heads, prepared.keys, prepared.values
    U = {name: torch.full_like(getattr(prepared, name), torch.nan) for name in corrected(of)}
    found = {
        "o": torch.full((of.batch, of.tokens, *states[1::2]), torch.nan, dtype=torch.bfloat16),
        "final": torch.full(states, torch.nan),
        "kept": torch.full(_of_states(of, "replayed" in asked), torch.nan),
    }
    found = {name: x for name, x in found.items() if name in asked}
    if "kept" in asked and "replayed" not in asked:
        found["kept"] = found["kept"].bfloat16()
    operands = {
        "o": found.get("o"),
        "initial_state": initial(states) if "initial" in asked else None,
        "final_state": found.get("final"),
        "states": None if "replayed" in asked else found.get("kept"),
        "checkpoints": found.get("kept") if "replayed" in asked else None,
        **({} if chosen is None else {"chosen": chosen}),
    }
    scores = {"A_0": torch.full_like(of.prepared.A_0, torch.nan)} if of.scores_in_scan and "kept" in asked else {}
    prepared = replace(prepared, **U, **({} if portable else scores))
    if portable:
        scores = {name: getattr(prepared, name).clone() for name in scores}
        module = of.module("scan")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CHECKPOINT", EVERY)
            module.scan(prepared, layout, replace(TILES, roles=False), **operands)
    else:
        with in_roles(of, "scan", source) as module:
            assert module.scan_in_roles(prepared, layout, TILES, **operands)
        for x in scores.values() if not of.sizes.batch else ():
            x[layout.sequences[NOBODYS, 3]] = torch.nan  # zeros above the diagonal mean nothing there
    return found | (U if "kept" in asked else {}) | scores


def _of_states(of: Given, replayed: bool) -> tuple[int, ...]:
    """Of those that a scan leaves for a backward."""
    made, chunks = of.prepared, of.layout.chunk_count
    if replayed:
        return (-(-chunks // EVERY), made.heads, made.keys, made.values)
    return (chunks, made.heads, made.value_width, made.key_width)


def initial(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def reversed_(
    of: Given,
    asked: frozenset[str],
    source: Path | None = None,
    *,
    portable: bool = False,
    chosen: Chosen | None = None,
) -> dict[str, Tensor]:
    """What a reverse scan leaves behind. asked: of "final", "gradients" and "initial". chosen: as above."""
    made, layout = of.prepared if portable else replace(of.in_roles, A_0=of.prepared.A_0), of.layout
    states = layout.sequence_count, made.heads, made.keys, made.values
    text = text_of(f"{of.package}.reverse")
    names = re.search(r"state_gradients, ((?:dU_\w+, )*dU_\w+),", text)[1].split(", ")
    names = ["dR_0"] if of.solves and not portable else names
    of_states = made.A_0.new_empty(layout.chunk_count, made.heads, made.value_width, made.key_width)
    of_values = made.A_0.new_empty(layout.chunk_count, made.heads, layout.chunk, made.value_width)
    found = {
        "dS": torch.full_like(of_states, torch.nan),
        **{name: torch.full_like(of_values, torch.nan) for name in names},
    }
    initial_gradient = torch.full(states, torch.nan) if "initial" in asked else None
    kept = "gradients" in asked
    operands = {
        "do": output_gradient(of),
        "state_gradients": found["dS"] if kept else None,
        "gradients": tuple(found[name] if kept else None for name in names),
        "final_state_gradient": initial(states) if "final" in asked else None,
        "initial_state_gradient": initial_gradient,
        **({} if chosen is None else {"chosen": chosen}),
    }
    if portable:
        of.module("reverse")._launch(made, layout, replace(TILES, roles=False), **operands)
    else:
        with in_roles(of, "reverse", source) as module:
            assert module.reverse_in_roles(made, layout, TILES, **operands)
    for name in [*found]:
        if name.endswith("_rest"):  # what rounding lost, which one that falls otherwise changes by itself
            part = name.removesuffix("_rest")
            found[f"{part} and its rest"] = found[part].float() + found.pop(name).float()
    return (found if kept else {}) | ({} if initial_gradient is None else {"initial": initial_gradient})


def output_gradient(of: Given) -> Tensor:
    sizes = of.batch, of.tokens, of.prepared.heads, of.prepared.values
    do = torch.randn(sizes, generator=torch.Generator().manual_seed(2))
    if not of.sizes.batch:
        _, first, tokens, _ = of.layout.sequences[NOBODYS].tolist()
        do[:, first : first + tokens] = torch.nan
    return do.bfloat16()


def compare(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Nothing is left out, nothing else is written, and NaN stays where it belongs."""
    assert [*found] == [*right]
    for name, whole in right.items():
        there = whole.isfinite()
        assert there.any()
        assert (found[name].isfinite() == there).all(), f"{name}: NaN"
        exact = whole[there].double()
        off = found[name][there].double() - exact
        errors = float(off.abs().max() / exact.abs().max()), float(off.norm() / exact.norm())
        bounds = IN_FULL if name.endswith("its rest") else BOUNDS[whole.dtype]
        assert all(error < bound for error, bound in zip(errors, bounds, strict=True)), (name, errors)


def operand(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def tile(of: Given, x: Tensor, in_place: bool, chunk: int, head: int, heads_of_one: int = 1) -> Tensor:
    """In float64, zero behind a sequence's end."""
    if not in_place:
        return x[chunk, head].double()
    row, first, count = of.layout.chunks[chunk].tolist()
    return pad(x[row, first : first + count, head // heads_of_one].double(), (0, 0, 0, of.layout.chunk - count))


def by_token(of: Given, names: Iterable[str], chunk: int, head: int) -> Iterator[Tensor]:
    """Numbers that scale rows; one where an op has none."""
    ones = torch.ones(of.layout.chunk_count, of.in_roles.heads, of.layout.chunk)
    for name in names:
        yield getattr(of.in_roles, name, ones)[chunk, head].double()[:, None]


def solved(of: Given, asked: frozenset[str]) -> dict[str, Tensor]:
    """What a scan that solves for corrected values leaves behind, in float64 but for operands of products."""
    p, layout = of.in_roles, of.layout
    C, group = layout.chunk, p.heads // p.input_heads
    found = scanned(of, asked, portable=True)
    found = {name: x if name == "A_0" else x.fill_(torch.nan) for name, x in found.items()}
    states = layout.sequence_count, p.heads, p.keys, p.values
    entering = initial(states).double() if "initial" in asked else torch.zeros(states, dtype=torch.float64)
    for n, (row, start, tokens, first) in enumerate(layout.sequences.tolist()):
        for head in range(p.heads):
            S = pad(entering[n, head], (0, p.value_width - p.values, 0, p.key_width - p.keys))
            for chunk in range(first, first - (-tokens // C)):
                if "kept" in asked and "replayed" not in asked:
                    found["kept"][chunk, head] = S.mT.bfloat16()
                elif "kept" in asked and chunk % EVERY == 0:
                    found["kept"][chunk // EVERY, head] = S[: p.keys, : p.values]
                read, write = (tile(of, x, p.in_place, chunk, head, group) for x in (p.read, p.write_0))
                value = tile(of, p.value_0, p.values_in_place, chunk, head)
                value = pad(value, (0, p.value_width - value.shape[1]))
                numbers = ("erase_from_start", "strength_0", "from_start", "to_end")
                erase, strength, from_start, to_end = by_token(of, numbers, chunk, head)
                decay = p.decay_out[chunk, head].double() if hasattr(p, "decay_out") else 1.0
                R = strength * value + erase * (write @ operand(S))
                U = operand(R + p.inverse_0[chunk, head].double() @ operand(R))
                read_out = from_start * (read @ operand(S)) + of.prepared.A_0[chunk, head].double() @ U
                S = decay * S + write.mT @ operand(to_end * U)
                at = (chunk - first) * C
                count = min(C, tokens - at)
                if "o" in asked:
                    found["o"][row, start + at : start + at + count, head] = read_out[:count, : p.values].bfloat16()
                if "kept" in asked:
                    found["U_0"][chunk, head] = U.bfloat16()
            if "final" in asked:
                found["final"][n, head] = S[: p.keys, : p.values]
    return found


def solved_backwards(of: Given, asked: frozenset[str]) -> dict[str, Tensor]:
    """What a reverse scan that solves leaves behind, likewise; the solve's operands have two parts each."""
    p, layout = of.in_roles, of.layout
    C, group = layout.chunk, p.heads // p.input_heads
    found = {name: x.fill_(torch.nan) for name, x in reversed_(of, asked, portable=True).items()}
    kept = {"dS": found["dS"], "dR_0": found["dS"].new_full(p.U_0.shape, torch.nan)} if "gradients" in asked else {}
    found = kept | ({"initial": found["initial"]} if "initial" in asked else {})
    do = output_gradient(of)
    states = layout.sequence_count, p.heads, p.keys, p.values
    leaving = initial(states).double() if "final" in asked else torch.zeros(states, dtype=torch.float64)
    for n, (_, _, tokens, first) in enumerate(layout.sequences.tolist()):
        for head in range(p.heads):
            dS = pad(leaving[n, head], (0, p.value_width - p.values, 0, p.key_width - p.keys))
            for chunk in reversed(range(first, first - (-tokens // C))):
                read, write = (tile(of, x, p.in_place, chunk, head, group) for x in (p.read, p.write_0))
                dO = pad(tile(of, do, True, chunk, head), (0, p.value_width - p.values))
                erase, from_start, to_end = by_token(of, ("erase_from_start", "from_start", "to_end"), chunk, head)
                decay = p.decay_out[chunk, head].double() if hasattr(p, "decay_out") else 1.0
                inverse, rest = (x[chunk, head].double() for x in (p.inverse_0, p.inverse_0_rest))
                scores = of.prepared.A_0[chunk, head].double()
                dU = to_end * (write @ (operand(dS) + operand(dS - operand(dS)))) + scores.mT @ dO
                dR = dU + (inverse + rest).mT @ operand(dU) + inverse.mT @ operand(dU - operand(dU))
                if kept:
                    found["dS"][chunk, head] = dS.mT.bfloat16()
                    found["dR_0"][chunk, head] = dR.bfloat16()
                dS = decay * dS + read.mT @ operand(from_start * dO) + write.mT @ operand(erase * dR)
            if "initial" in asked:
                found["initial"][n, head] = dS[: p.keys, : p.values]
    return found


FORWARDS = {  # what is asked for beside an output and nothing else
    "training": frozenset(("initial", "o", "final", "kept")),
    "training, replayed": frozenset(("initial", "o", "final", "kept", "replayed")),
    "inference": frozenset(("o", "final")),
    "output": frozenset(("initial", "o")),
    "summary": frozenset(("initial", "final")),
    "first summary": frozenset(("final",)),
}
BACKWARDS = {
    "training": frozenset(("final", "gradients", "initial")),
    "no states": frozenset(("gradients",)),
    "summary": frozenset(("final", "initial")),
    "last summary": frozenset(("initial",)),
}
SOLVING = [name for name, sizes in CASES.items() if sizes.op in ("gdn", "delta_rule")]


def asked_of(calls: Mapping[str, frozenset[str]]) -> list[tuple[str, str]]:
    """All of them for one case of each op, and the one that asks for everything for others."""
    first = {(sizes.op, sizes.upright): case for case, sizes in reversed(CASES.items())}
    return [(case, asked) for case in CASES for asked in calls if asked == "training" or case in first.values()]


KERNELS = {"scan": scanned, "reverse": reversed_}


@cache
def expected(case: str, stem: str, asked: frozenset[str]) -> Mapping[str, Tensor]:
    of = given(CASES[case])
    if of.solves:
        return {"scan": solved, "reverse": solved_backwards}[stem](of, asked)
    return KERNELS[stem](of, asked, portable=True)


def check(case: str, stem: str, asked: frozenset[str], source: Path | None = None) -> None:
    """source: of a kernel in place of its own."""
    compare(KERNELS[stem](given(CASES[case]), asked, source), expected(case, stem, asked))


@pytest.mark.parametrize(("case", "asked"), asked_of(FORWARDS))
def test_a_scan_leaves_what_its_equations_say(case: str, asked: str) -> None:
    check(case, "scan", FORWARDS[asked])


@pytest.mark.parametrize("case", SOLVING)
def test_a_scan_that_solves_is_near_one_that_does_not(case: str) -> None:
    found, others = (scanned(given(CASES[case]), FORWARDS["training"], portable=portable) for portable in (False, True))
    for name, other in others.items():
        there = other.isfinite()
        off = found[name][there].double() - other[there].double()
        assert float(off.norm() / other[there].double().norm()) < SOLVED_ELSEWHERE, name


@pytest.mark.parametrize("case", SOLVING)
def test_so_is_a_reverse_scan_that_solves(case: str) -> None:
    of = given(CASES[case])
    found, other = (reversed_(of, BACKWARDS["training"], portable=portable) for portable in (False, True))
    whole = other["dU_0 and its rest"].double()
    assert [*found] == ["dS", "dR_0", "initial"]
    for name, right in {"dS": other["dS"], "dR_0": of.prepared.T_0_0.double().mT @ whole}.items():
        there = right.isfinite()
        off = found[name][there].double() - right[there].double()
        assert float(off.norm() / right[there].double().norm()) < SOLVED_ELSEWHERE, name


@pytest.mark.parametrize(("case", "asked"), asked_of(BACKWARDS))
def test_a_reverse_scan_leaves_what_its_equations_say(case: str, asked: str) -> None:
    check(case, "reverse", BACKWARDS[asked])


HALVED = [f"{op} {kind}" for op in ("gdn", "simple_gla") for kind in ("in place", "upright in place")]


def check_chosen(case: str, stem: str, forgetting: bool, portable: bool = False, source: Path | None = None) -> None:
    """A launch for some heads leaves for these what one for all does, and nothing for others."""
    of, asked = given(CASES[case]), {"scan": FORWARDS, "reverse": BACKWARDS}[stem]["training"]
    sequences = torch.arange(of.layout.sequence_count)[:, None]
    forgotten = 3 * ((sequences + torch.arange(of.sizes.value_heads)) % 2).int()
    chosen = Chosen(forgotten=forgotten, forgetting=forgetting)
    whole = KERNELS[stem](of, asked, portable=portable)
    found = KERNELS[stem](of, asked, source, portable=portable, chosen=chosen)
    here = ((forgotten > 0) == forgetting).tolist()
    for name, x in whole.items():
        if portable and name == "A_0":  # `prepare` has made it
            continue
        for n, head in ((n, head) for n, row in enumerate(here) for head in range(len(row))):
            right, left = (of_one(of, name, tensor, n, head) for tensor in (x, found[name]))
            if here[n][head]:
                assert torch.equal(left.nan_to_num(1e9), right.nan_to_num(1e9)), f"{name} of a head that is chosen"
            else:
                assert left.isnan().all(), f"{name} of another head"


def of_one(of: Given, name: str, x: Tensor, sequence: int, head: int) -> Tensor:
    """What a result has of one sequence and head."""
    row, first, tokens, chunk = of.layout.sequences[sequence].tolist()
    if name == "o":
        return x[row, first : first + tokens, head]
    if name in ("final", "initial"):
        return x[sequence, head]
    return x[chunk : chunk + of.layout.lengths[sequence], head]


@pytest.mark.parametrize("forgetting", [True, False])
@pytest.mark.parametrize("stem", KERNELS)
@pytest.mark.parametrize("case", HALVED)
def test_a_launch_for_some_heads_leaves_others_alone(case: str, stem: str, forgetting: bool) -> None:
    check_chosen(case, stem, forgetting)


@pytest.mark.parametrize("forgetting", [True, False])
@pytest.mark.parametrize("stem", KERNELS)
@pytest.mark.parametrize("case", [case for case in HALVED if "upright" not in case])
def test_so_does_a_portable_one(case: str, stem: str, forgetting: bool) -> None:
    check_chosen(case, stem, forgetting, portable=True)


OF_OTHERS = [
    ("tokens = gl.where(chosen, tokens, 0)", "pass", "of another head"),
    ("skipped = gl.where(chosen, skipped, -1)", "pass", "(final|initial) of another head"),
    ("sequence * HV + head, FORGETTING", "sequence * HV, FORGETTING", "of a head that is chosen|of another head"),
    ("head, FORGETTING", "head, 1 - FORGETTING", "of a head that is chosen|of another head"),
    ("mask=state_inside & (skipped >= 0)", "mask=state_inside", "(final|initial) of another head"),
]


@pytest.mark.parametrize(("right", "wrong", "said"), OF_OTHERS)
@pytest.mark.parametrize("stem", KERNELS)
@pytest.mark.parametrize("case", HALVED)
def test_a_launch_for_the_wrong_heads_is_found(
    case: str, stem: str, right: str, wrong: str, said: str, tmp_path: Path
) -> None:
    text = text_of(f"{given(CASES[case]).package}.{stem}_hopper")
    assert right in text, "what this fault changes is gone; choose something else"
    source = tmp_path / f"{stem}_hopper.py"
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(AssertionError, match=said):
        check_chosen(case, stem, True, source=source)


def test_every_serial_kernel_is_here() -> None:
    assert {*OPS} < {sizes.op for sizes in CASES.values()}
    solving = {name for name in OPS if "inverse_0" in text_of(f"{package_name(name)}.scan_hopper")}
    assert {CASES[case].op for case in SOLVING} == solving


STATE_OF_UNSCALED = "S = product(write_0_tile.permute([1, 0]), U_0_leaving"

# What such a test is worth: faults planted in a copy of a kernel, and the first thing that is wrong then.
FAULTS = [
    ("gdn", "scan", "gl.fma(R_0_T, erase", "gl.fma(-R_0_T, erase", "'o'"),
    ("gdn", "scan", "R_0_T = warpgroup_mma_wait(1", "R_0_T = warpgroup_mma_wait(2", "product is read before"),
    (
        "gdn",
        "scan",
        "        R_0_T = warpgroup_mma_wait(1 if STORE_OUTPUT else 0, deps=(R_0_T,))\n",
        "",
        "product is read before",
    ),
    ("gdn", "scan", "inverse_0_tile.permute([1, 0])", "inverse_0_tile", "'o'"),
    ("gdn", "scan", "permute([1, 0]), R_0_T)", "permute([1, 0]), R_0_T.to(low).to(gl.float32))", "'o'"),
    ("gdn", "scan", "U_0_T_low.to(gl.float32) * to_end_tile.load(of_tokens)", "U_0_T_low.to(gl.float32)", "'o'"),
    ("gdn", "scan", "U_0_T = warpgroup_mma_wait(0", "U_0_T = warpgroup_mma_wait(1", "product is read before"),
    (
        "gdn",
        "scan",
        "        S_T = warpgroup_mma_wait(",
        "        mbarrier.arrive(empty.index(stage), count=1)\n        S_T = warpgroup_mma_wait(",
        "written while a product reads it",
    ),
    (
        "gdn",
        "scan",
        "        S_T = S_T * decay_out\n",
        "        mbarrier.arrive(empty.index(stage), count=1)\n        S_T = S_T * decay_out\n",
        "read before it is there|nothing completes a barrier",
    ),
    (
        "gdn",
        "scan",
        "        S_T = warpgroup_mma_wait(1 if STORE_OUTPUT else 0, deps=(S_T,))\n",
        "        S_T = warpgroup_mma_wait(0, deps=(S_T,))\n        mbarrier.arrive(empty.index(stage), count=1)\n"
        "        value_0_T = value_0_tile.load(of_tokens)\n",
        "read before it is there|nothing completes a barrier",
    ),
    ("gdn", "scan", "mbarrier.arrive(empty.index(stage), count=1)", "pass", "nothing completes a barrier"),
    (
        "gdn",
        "scan",
        "mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)",
        "pass",
        "before its phase is over",
    ),
    (
        "gdn",
        "scan",
        "mbarrier.wait(full.index(stage), (c // STAGES) & 1)",
        "mbarrier.wait(full.index(stage), 0)",
        "read before it is there|nothing completes a barrier",
    ),
    (
        "gdn",
        "scan",
        "mbarrier.wait(full.index(stage), (c // STAGES) & 1)\n        write_0_tile",
        "write_0_tile",
        "read before it is there|that nobody has given back",
    ),
    ("gdn", "scan", "+ 4 * 3 * C +", "+ 4 * 2 * C +", "more bytes than a barrier expects"),
    ("gdn", "scan", "+ 4 * 3 * C +", "+ 4 * 4 * C +", "nothing completes a barrier"),
    ("gdn", "scan", "A_0 = warpgroup_mma_wait(0", "A_0 = warpgroup_mma_wait(1", "product is read before"),
    ("gdn", "scan", "gl.exp2(G_reading - G_written)", "gl.exp2(G_reading + G_written)", "'o'"),
    ("gdn", "scan", "A_0 *= score_scale_reading", "pass", "'o'"),
    ("delta_rule", "scan", "A_0 *= from_start_reading", "pass", "'o'"),
    ("gdn", "scan", "written[None, :] <= reading", "written[None, :] < reading", "'o'"),
    ("gdn in place", "scan", "(reading < tokens - c * C)", "(reading < C)", "A_0: NaN"),
    ("gdn in place", "scan", "gl.where(block == 0, 0, NOWHERE)", "gl.where(block < 0, 0, NOWHERE)", "A_0: NaN"),
    ("gdn", "scan", "            tma.store_wait(STAGES - 1)\n", "            pass\n", "while it is copied out"),
    ("gdn", "scan", "tma.store_wait(STAGES - 1)", "tma.store_wait(STAGES)", "while it is copied out"),
    ("gdn", "scan", "    if KEEP:\n        tma.store_wait(0)\n", "", "a role ends while"),
    (
        "gdn",
        "scan",
        "mbarrier.wait(full.index(stage), (c // STAGES) & 1)\n        A_0",
        "A_0",
        "read before it is there",
    ),
    (
        "gdn",
        "scan",
        "            mbarrier.wait(scored.index(stage), (c // STAGES) & 1)\n",
        "",
        "o: NaN",
    ),
    (
        "gdn",
        "scan",
        "mbarrier.wait(scored.index(stage), (c",
        "mbarrier.wait(scored.index(stage), 1 ^ (c",
        "'o'|nothing completes",
    ),
    ("gdn", "scan", "        mbarrier.arrive(scored.index(stage), count=1)\n", "", "nothing completes a barrier"),
    (
        "gdn",
        "scan",
        "stage)\n        if KEEP:\n            tma",
        "stage)\n        mbarrier.arrive(scored.index(stage), count=1)\n        if KEEP:\n            tma",
        "read before it is there|nothing completes a barrier",
    ),
    (
        "gdn",
        "scan",
        "            O_T = warpgroup_mma_wait(0, deps=(O_T,))\n            O_T_low = O_T.to(low)\n"
        "        mbarrier.arrive(empty.index(stage), count=1)\n",
        "            mbarrier.arrive(empty.index(stage), count=1)\n"
        "            O_T = warpgroup_mma_wait(0, deps=(O_T,))\n            O_T_low = O_T.to(low)\n",
        "written while a product reads it",
    ),
    (
        "gdn",
        "scan",
        "A_0_tile.store(A_0_low)\n        fence_async_shared()\n",
        "A_0_tile.store(A_0_low)\n",
        "not fenced",
    ),
    (
        "simple_gla",
        "scan",
        "A_0_tile.store(A_0_low)\n        fence_async_shared()\n",
        "A_0_tile.store(A_0_low)\n",
        "not fenced",
    ),
    ("gdn", "scan", "gl.maximum(c - 1, 0) * C", "c * C", "o: NaN"),
    ("gdn", "scan", "gl.where(c > 0, batch, NOWHERE)", "batch", "o: NaN"),
    ("gdn", "scan", "(token < tokens)[None, :]", "(token < tokens + 1)[None, :]", "outside the tensor"),
    ("gdn", "scan", "            fence_async_shared()\n            place", "            place", "not fenced"),
    ("gdn", "scan", "store_wait(1 + STATES if KEEP else 0)", "store_wait(3)", "written while it is copied out"),
    ("gdn", "scan", "tma.store_wait(1 + STATES)\n", "tma.store_wait(3)\n", "written while it is copied out"),
    ("gdn", "scan", "tma.store_wait(2)\n", "tma.store_wait(3)\n", "written while it is copied out"),
    ("gla", "scan", "tma.store_wait(1)\n", "tma.store_wait(2)\n", "written while it is copied out"),
    ("gla", "scan", "tma.store_wait(STATES)\n", "tma.store_wait(2)\n", "written while it is copied out"),
    ("delta_rule in place", "scan", "[at * VP + block, 0], state", "[at * VP, 0], state", "kept"),
    ("dplr", "scan", "convert_layout(S_T_low, of_keys)", "convert_layout(S_T_rest, of_keys)", "kept"),
    ("gdn", "scan", "        tma.store_wait(0)\n    if", "    if", "ends while tiles are copied out"),
    ("gdn", "scan", "% CHECKPOINT == 0", "% CHECKPOINT == 1", "kept"),
    ("gdn", "scan", "decay_out_ptr + at + HV", "decay_out_ptr + at", "'o'"),
    ("gdn in place", "scan", "group = head // (HV // H)", "group = head", "'o'"),
    ("delta_rule in place", "scan", "[at * C, block], U_0_leaving", "[at * C, 0], U_0_leaving", "U_0"),
    ("simple_gla in place", "scan", "U_0_tile.permute([1, 0]).load(of_tokens)", "U_0_tile.load(of_tokens)", "'o'"),
    ("kda", "scan", "S_T * decay_out_tile.load(of_keys)", "S_T", "'o'"),
    ("gdn2", "scan", "value_0_rest_tile = value_0_rest_ring", "value_0_rest_tile = value_0_ring", "'o'"),
    ("dplr", "scan", "S_T_low, S_T_rest = rounded(S_T)", "S_T_low, S_T_rest = S_T.to(low), S_T - S_T", "'o'"),
    ("dplr", "scan", "S_T = warpgroup_mma_wait(2", "S_T = warpgroup_mma_wait(3", "product is read before"),
    ("gdn", "reverse", "if tokens - c * C < C:", "if tokens - c * C < 0:", "NaN"),
    ("gdn", "reverse", "fence_async_shared()\n            gl.thread_barrier()", "gl.thread_barrier()", "not fenced"),
    ("gdn", "reverse", "            gl.thread_barrier()\n", "", "other threads may still write"),
    ("gdn in place", "reverse", "clear_behind(write_0_tile", "clear_behind(dO_tile", "NaN"),
    ("gdn in place", "scan", "clear_behind(value_0_tile, tokens - c * C,", "clear_behind(value_0_tile, C,", "NaN"),
    (
        "gdn",
        "reverse",
        "        dU_0_T = product(dS_next_T_rest, write_0_tile.permute([1, 0]), dU_0_T)\n",
        "",
        "dR_0|dS",
    ),
    ("gdn", "reverse", " * to_end_tile.load(of_tokens)", "", "dS"),
    ("gdn", "reverse", "dU_0_T = warpgroup_mma_wait(1", "dU_0_T = warpgroup_mma_wait(2", "product is read before"),
    ("comba", "reverse", "tma.store_wait(2)", "tma.store_wait(3)", "written while it is copied out"),
    ("comba", "reverse", "tma.store_wait(1)", "tma.store_wait(2)", "written while it is copied out"),
    ("gdn", "reverse", "tma.store_wait(1)", "tma.store_wait(2)", "written while it is copied out"),
    ("gdn", "reverse", "dU_0_T_low, inverse_0_tile, dR", "dU_0_T_low, inverse_0_tile.permute([1, 0]), dR", "dS|dR_0"),
    ("gdn", "reverse", "dU_0_T_low, inverse_0_tile, dR", "dU_0_T_low, inverse_0_rest_tile, dR", "dS|dR_0"),
    ("gdn", "reverse", "inverse_0_rest_tile, dU_0_T)", "inverse_0_tile, dU_0_T)", "dS|dR_0"),
    ("gdn", "reverse", "inverse_0_rest_tile, dU_0_T)", "inverse_0_rest_tile, nothing)", "dS|dR_0"),
    ("gdn", "reverse", "gl.convert_layout(dU_0_T_rest.to(low), left)", "dU_0_T_low", "dS|dR_0"),
    ("gdn", "reverse", "dR_0_T * erase_from_start_tile", "dR_0_T * -erase_from_start_tile", "dS|dR_0"),
    ("gdn", "reverse", "dR_0_T = warpgroup_mma_wait(0", "dR_0_T = warpgroup_mma_wait(1", "product is read before"),
    ("gdn", "reverse", "        dR_0_T = warpgroup_mma_wait(0, deps=(dR_0_T,))\n", "", "product is read before"),
    ("gdn", "reverse", "inverse_0_rest, [at * C, 0]", "inverse_0, [at * C, 0]", "dS|dR_0"),
    ("gdn", "reverse", "+ 4 * 3 * C", "+ 4 * 2 * C", "more bytes than a barrier expects"),
    (
        "gdn",
        "reverse",
        "        dR_0_T_low = in_bf16(dR_0_T)\n",
        "        mbarrier.arrive(empty.index(stage), count=1)\n        dR_0_T_low = in_bf16(dR_0_T)\n",
        "before it is there|while a product reads it",
    ),
    (
        "gdn",
        "reverse",
        "        dS_next_T = warpgroup_mma_wait(0",
        "        mbarrier.arrive(empty.index(stage), count=1)\n        dS_next_T = warpgroup_mma_wait(0",
        "written while a product reads it",
    ),
    ("comba", "reverse", "dU_0_T_rest.to(low)", "dU_0_T_low", "dU_0 and its rest"),
    ("gdn", "reverse", "decay_out_ptr + at - HV", "decay_out_ptr + at", "dS"),
    ("gdn", "reverse", "c = chunks - 1 - step\n        stage = step", "c = step\n        stage = step", "dS"),
    ("delta_rule in place", "reverse", "[at * VP + block, 0]", "[at * VP, 0]", "dS"),
    (
        "dplr",
        "reverse",
        "warpgroup_mma_wait(4, deps=(dU_0_T,))",
        "warpgroup_mma_wait(5, deps=(dU_0_T,))",
        "read before",
    ),
    ("dplr", "reverse", "tma.store_wait(3)", "tma.store_wait(4)", "written while it is copied out"),
    ("gdn upright", "scan", "gl.fma(R_0, erase_from_start", "gl.fma(-R_0, erase_from_start", "'o'"),
    (
        "gdn upright",
        "scan",
        "product(inverse_0_tile, R_0_staged",
        "product(inverse_0_tile.permute([1, 0]), R_0_staged",
        "'o'",
    ),
    ("gdn upright", "scan", "S = product(write_0_tile.permute([1, 0]), U_0_staged", STATE_OF_UNSCALED, "'o'"),
    ("gdn upright", "scan", "R_0 = warpgroup_mma_wait(1", "R_0 = warpgroup_mma_wait(2", "product is read before"),
    (
        "gdn upright",
        "scan",
        "            S, O = warpgroup_mma_wait(0, deps=(S, O))\n",
        "            pass\n",
        "product is read before",
    ),
    ("gdn upright", "scan", "tma.store_wait(1 if KEEP else 0)", "tma.store_wait(3)", "written while it is copied out"),
    (
        "gdn upright",
        "scan",
        "            tma.store_wait(1 + STATES)\n        U",
        "            pass\n        U",
        "while it is copied out",
    ),
    ("gdn upright", "scan", "c + 1 < chunks, batch", "c < chunks, batch", "NaN|'o'"),
    (
        "gdn upright",
        "scan",
        "        fence_async_shared()\n        gl.thread_barrier()\n        U",
        "        gl.thread_barrier()\n        U",
        "not fenced",
    ),
    (
        "gdn upright",
        "scan",
        "        gl.thread_barrier()\n        U_0 = product",
        "        U_0 = product",
        "other threads may still write",
    ),
    (
        "gdn upright",
        "scan",
        "        gl.thread_barrier()\n        S = S",
        "        S = S",
        "other threads may still write",
    ),
    (
        "simple_gla upright",
        "scan",
        "(U_0_tile.load(of_tokens).to(gl.float32) * to_end",
        "(U_0_tile.load(of_tokens) * -to_end",
        "'o'",
    ),
    ("gdn upright", "reverse", "write_0_tile, dS_next_rest_tile", "write_0_tile, dS_next_tile", "dS|dR_0"),
    (
        "gdn upright",
        "reverse",
        "        gl.thread_barrier()\n        dU_0 =",
        "        dU_0 =",
        "other threads may still write",
    ),
    ("gdn upright", "reverse", "(dR_0 * erase_from_start)", "(dR_0 * -erase_from_start)", "dS|dR_0"),
    (
        "gdn upright",
        "reverse",
        "permute([1, 0]), dU_0_rest_staged, dR_0)",
        "permute([1, 0]), dU_0_staged, dR_0)",
        "dS|dR_0",
    ),
    ("gdn upright", "reverse", "permute([1, 0]), dO_staged, dS_next)", "permute([1, 0]), dO_tile, dS_next)", "dS"),
    (
        "gdn upright",
        "reverse",
        "            tma.store_wait(1)  # the copy of",
        "            tma.store_wait(2)  # the copy of",
        "while it is copied out",
    ),
]


@pytest.mark.parametrize(
    ("case", "stem", "right", "wrong", "said"),
    FAULTS,
    ids=[f"{case} {stem}: {right.strip()}, {wrong.strip()}" for case, stem, right, wrong, _ in FAULTS],
)
def test_a_planted_fault_is_found(case: str, stem: str, right: str, wrong: str, said: str, tmp_path: Path) -> None:
    text = text_of(f"{given(CASES[case]).package}.{stem}_hopper")
    assert right in text, "what this fault changes is gone; choose something else"
    source = tmp_path / f"{stem}_hopper.py"
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    everything = FORWARDS if stem == "scan" else BACKWARDS
    asked = "training, replayed" if "CHECKPOINT" in right else "training"
    with pytest.raises(AssertionError, match=said):
        check(case, stem, everything[asked], source)
