"""`prepare_hopper.py`: what `triton_prepare` emits, in Gluon, for chunks of 64 tokens.

Tokens are as many as the rows that the tensor cores multiply, so that scores and vectors are laid out alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kcpgen.emit import scores_in_scan, solve_in_scan, triton_values
from kcpgen.emit.gluon_chunks import awaited, copy_input, in_64_bits, laid_out
from kcpgen.emit.gluon_token_numbers import by_columns, by_warp, handed_over, loaded_across, loaded_once
from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_prologue import (
    apply_rewrites,
    base_variable,
    form_bases,
    in_rows,
    load_params,
    local,
    used_arguments,
    where_summed,
)
from kcpgen.emit.triton_scratch import in_place, optional, passed, scratch
from kcpgen.plan import KernelPlan, Row

TILES = ("read", "write", "A", "B", "inverse", "W")  # scratch that is filled by tiles


def in_flight(plan: KernelPlan) -> bool:
    """Whether there is such a kernel of an op: of one term, at most one erase, and no decays of channels."""
    alone = len(plan.terms) == 1 and len(plan.erasing) <= 1 and not (plan.erasing and plan.pure_writes)
    return alone and plan.decays_rows


def emit_prepare_hopper(
    plan: KernelPlan, shared: Mapping[str, Value], body: Mapping[str, list[str]], rows: Iterable[tuple[str, Row, int]]
) -> str:
    """body: lines of the portable kernel. rows: of its scores, (score, row operand, writing term)."""
    inputs = plan.inputs_on("K")
    (j,) = plan.terms
    erasing = next(iter(plan.erasing), None)
    made = [name for name in scratch(plan) if name not in [f"U_{e}" for e in plan.erasing]]
    tiles = [name for name in made if name.split("_")[0] in TILES]
    numbers = [name for name in made if name not in tiles]
    vectors = {"read": plan.read.base, f"write_{j}": plan.write[j]}
    lines = {
        "before_keys": loaded_once(by_warp(from_tiles(plan, body["before_keys"]))),
        "formed": laid_out(_formed(plan)),
        "finished": by_columns(plan, body["finished"]),
        "strengths": by_warp(
            [
                *triton_values.store_strengths(plan),
                *solve_in_scan.store_rows(plan),
                *scores_in_scan.store_rows(plan),
            ]
        ),
        "value_operands": laid_out(body["value_operands"]),
    }
    blocks = [[name, *by_columns(plan, [value])] for name, value in triton_values.block_values(plan).items()]
    scaled = by_columns(plan, [body["scaled"][0]]) if plan.erasing else []
    rows, scan_scores, unread = [*rows], scores_in_scan.scores_in_scan(plan), passed_by(plan)
    used = [*lines["formed"], *lines["finished"], *lines["value_operands"], *chain.from_iterable(blocks), *scaled]
    named = [*chain.from_iterable(lines.values()), *chain.from_iterable(blocks), *scaled]
    erase = plan.erase[erasing] if erasing is not None else None
    taken = erase is not None and erase.base == plan.read.base  # W still needs what A would lie over
    own = "gl.allocate_shared_memory(LOW, [C, C], of_operands)"
    sources = [f"{i.name}_source" for i in inputs]
    return render(
        "prepare_hopper.py.jinja",
        title=shared["title"],
        arguments=shared["arguments"],
        keywords=shared["keywords"],
        sizes=shared["sizes"],
        equations=body["equations"],
        solve=int(bool(plan.erasing)),
        whole_value_axis=int(plan.whole_value_axis),
        device_functions=[f for f in device_functions(named) if f != "unit_lower_inverse"],
        used=in_64_bits(used_arguments(plan, named)),
        sources=sources,
        source_tiles=[[f"{i.name}_tile", f"{i.name}_source", int(i.name in unread)] for i in inputs],
        scan_scores=int(scan_scores),
        passed_by=unread,
        formed_tiles=[_tile(b) for b in plan.bases if not plan.loaded(b)],
        block_bytes=_block_bytes(plan),
        block_copies=[line for i in inputs for line in _where_wanted(i.name in unread, [by_blocks(copy_input(i, 0))])],
        helpers=[
            "barriers",
            "by_rows",
            "fresh_product",
            "handed_over",
            "product",
            *(["rounded"] if plan.erasing else []),
            *(["rounded_in_columns"] if solve_in_scan.solves_in_scan(plan) else []),
        ],
        cleared=list(_cleared(plan)),
        kept=list(_kept(plan, vectors)) if any(name in tiles for name in vectors) else [],
        **handed_over(plan, used),
        score_lines=list(_scores(plan, rows, lines["finished"])),
        solved_across=loaded_across([*chain.from_iterable(blocks), *scaled]),
        sums_by_rows=list(_sums_by_rows(plan)),
        score=f"A_{j}",
        leaving_lines=[
            "gl.thread_barrier()",
            f"A_{j}_leaving = {own if taken else f'{_tile(plan.read.base)}.index(0).reshape([C, BK])'}",
            f"A_{j}_leaving.store(A_{j}.to(LOW))",
            "fence_async_shared()",
            f"tma.async_copy_shared_to_global(A_{j}_out, [at * C, 0], A_{j}_leaving)",
        ],
        inverse=f"T_{erasing}_{erasing}",
        solves_in_scan=int(solve_in_scan.solves_in_scan(plan)),
        inverse_low=f"inverse_{erasing}",
        erase_score=f"L_{erasing}_{j}",
        solved=f"W_{erasing}",
        erase_tile=_tile(erase.base) if erase else "",
        scaled_inverse=("-" if erase and erase.coefficient.could_extract_minus_sign() else "") + "".join(scaled),
        blocks=blocks,
        places=[
            *([_tile(b), "ALL" if b in unread else ""] for b in plan.bases),
            *([[f"A_{j}_leaving", f"A_{j}_out is not None" if scan_scores else ""]] if taken else []),
            *([f"{name}_leaving", ""] for name, _ in blocks),
        ],
        leaving=tiles,
        pointers=in_rows(f"{name}_ptr" for name in numbers),
        descriptors=[_descriptor(plan, name) for name in tiles],
        tensors=in_rows(given(plan, name) for name in numbers),
        formed_when=_formed_when(plan),
        shared_bytes=_shared_bytes(plan),
        key_inputs_names=[i.name for i in inputs],
        **{name: found for name, found in lines.items() if name != "finished"},
    )


def _tile(base: str) -> str:
    return f"{base}_tile"


def by_blocks(copy: str) -> str:
    return copy.replace("key_start", "block * BK").replace("_tile)", "_tile.index(block))")


def from_tiles(plan: KernelPlan, lines: Iterable[str]) -> Iterator[str]:
    """Inputs on the key axis come by tiles, which a walk over it has to wait for."""
    names = "|".join(i.name for i in plan.inputs_on("K"))
    load = re.compile(rf"load_tile\(({names})_start, .*\)$")
    for line in lines:
        if (text := line.lstrip()).startswith("for key_start in"):
            yield line.replace(text, "mbarrier.wait(arrived.index(0), 0)")
        yield load.sub(r"by_rows(\1_tile.index(key_start // BK), inside)", line)


def _formed(plan: KernelPlan) -> Iterator[str]:
    inputs = plan.inputs_on("K")
    yield from (f"{local(plan, i.name)} = by_rows({i.name}_tile.index(block), inside)" for i in inputs)
    yield from load_params(plan, [p for p in plan.spec.params if p.axis == "K"])
    yield from apply_rewrites(plan, [i.name for i in inputs], backward=False)
    yield from form_bases(plan)
    yield "gl.thread_barrier()"
    for base in plan.bases:
        yield f"{_tile(base)}.index(block).reshape([C, BK]).store({base_variable(plan, base)}.to(LOW))"


def passed_by(plan: KernelPlan) -> list[str]:
    """Inputs that only scores of reads, and vectors that are not read in place, are made of."""
    if not scores_in_scan.scores_in_scan(plan) or in_place(plan) == "False":
        return []
    wanted = {*plan.write, *(row.base for row in plan.erase.values())} if plan.erasing else set()
    return [i.name for i in plan.inputs_on("K") if i.name in plan.bases and i.name not in wanted]


def _where_wanted(unread: bool, lines: Iterable[str]) -> list[str]:
    return ["if ALL:", *(f"    {line}" for line in lines)] if unread else [*lines]


def _block_bytes(plan: KernelPlan) -> str:
    unread = passed_by(plan)

    def sizes(names: Iterable[str]) -> str:
        return " + ".join(f"{name}_source.block_type.nbytes" for name in names) or "0"

    more, always = sizes(unread), sizes(i.name for i in plan.inputs_on("K") if i.name not in unread)
    return f"{always} + ({more} if ALL else 0)" if unread else always


def _cleared(plan: KernelPlan) -> Iterator[str]:
    unread = passed_by(plan)
    for b in plan.bases:
        found = f"{base_variable(plan, b)} = by_rows({_tile(b)}.index(block), inside).to(LOW)"
        yield from _where_wanted(b in unread, [found])
    yield "gl.thread_barrier()"
    for b in plan.bases:
        stored = f"{_tile(b)}.index(block).reshape([C, BK]).store({base_variable(plan, b)})"
        yield from _where_wanted(b in unread, [stored])


def _kept(plan: KernelPlan, vectors: Mapping[str, str]) -> Iterator[str]:
    for name, base in vectors.items():
        tile = f"{_tile(base)}.index(block).reshape([C, BK])"
        yield f"tma.async_copy_shared_to_global({name}_out, [at * C, block * BK], {tile})"


def _scores(plan: KernelPlan, rows: Sequence[tuple[str, Row, int]], finished: Sequence[str]) -> Iterator[str]:
    """Products of scores, and what is left to do with them; of reads only where the scan does not make them itself."""
    (j,) = plan.terms
    reads, names = f"A_{j}", [score for score, _, _ in rows]
    products, across = list(_products(plan, rows)), loaded_across(finished)
    if not scores_in_scan.scores_in_scan(plan):
        yield from (f"{name} = gl.zeros([C, C], gl.float32, of_keys)" for name in names)
        yield "for block in gl.static_range(KP // BK):"
        yield from (f"    {line}" for line in products)
        yield from [*across, awaited(names), *finished]
        return
    others = [name for name in names if name != reads]
    made = f"if {reads}_out is not None:  # else the scan makes it"
    margin = "" if others else "    "  # all of it is about reads

    def guarded(lines: Iterable[str]) -> Iterator[str]:
        """Those of reads under the condition."""
        for line in lines:
            if line.startswith(f"{reads} ") and others:
                yield from (made, f"    {line}")
            else:
                yield margin + line

    if not others:
        yield made
    yield from guarded(f"{name} = gl.zeros([C, C], gl.float32, of_keys)" for name in names)
    yield f"{margin}for block in gl.static_range(KP // BK):"
    yield from (f"    {line}" for line in guarded(products))
    yield from (f"{margin}{line}" for line in across)
    if others:
        yield from (made, f"    {awaited(names)}", "else:", f"    {awaited(others)}")
    else:
        yield f"{margin}{awaited(names)}"
    yield from guarded(finished)


def _products(plan: KernelPlan, rows: Iterable[tuple[str, Row, int]]) -> Iterator[str]:
    def block(base: str) -> str:
        return f"{_tile(base)}.index(block).reshape([C, BK])"

    for score, row, j in rows:
        yield f"{score} = product({block(row.base)}, {block(plan.write[j])}.permute([1, 0]), {score})"


def _sums_by_rows(plan: KernelPlan) -> Iterator[str]:
    for planned in plan.sums:
        yield from where_summed(plan, planned, f"{planned.name} = gl.convert_layout({planned.name}, by_token)")


def _formed_when(plan: KernelPlan) -> str:
    """Host code: whether operands of products are not what is copied."""
    names = [i.name for i in plan.inputs_on("K")]
    if not all(plan.loaded(b) for b in plan.bases) or any(planned.rewrite is None for planned in plan.sums):
        return "True"
    options = dict.fromkeys(r.option for r in plan.rewrites if r.target in names)
    return " or ".join(f"{option}_mode > 0" for option in options) or "False"


def _shared_bytes(plan: KernelPlan) -> str:
    """Host code: of vectors, the solve, B, and A where it has a place of its own."""
    scores = 8 if any(row.base == plan.read.base for row in plan.erase.values()) else 6
    vectors = len(plan.inputs_on("K")) + sum(not plan.loaded(b) for b in plan.bases)
    fewer = vectors - len(passed_by(plan))
    tiles = f"({vectors} if reads_all else {fewer})" if fewer < vectors else str(vectors)
    return f"2 * {tiles} * C * KP" + (f" + {scores} * C * C" if plan.erasing else "")


def given(plan: KernelPlan, name: str) -> str:
    """Host code: the field, or None where an input lies in its place."""
    return passed(plan, name).replace("None if ", "None if prepared.")


def _descriptor(plan: KernelPlan, name: str) -> str:
    made = f"tile_descriptor(prepared.{name}, C, {'C' if scratch(plan)[name][0] == 'C, C' else 'BK'})"
    if optional(plan, name) == "keeps_A":
        return f"None if prepared.for_roles else {made}"
    if solve_in_scan.condition(plan, name) or optional(plan, name) == "for_roles":
        return f"None if prepared.{name} is None else {made}"
    return given(plan, name).replace(f"prepared.{name}", made)
