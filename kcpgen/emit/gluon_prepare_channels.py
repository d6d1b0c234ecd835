"""`prepare_hopper.py` of a decay per channel: what `triton_prepare` emits, in Gluon, with tiles held [keys, tokens].

Chunks have 32 tokens: what is read and what is erased, one above the other, are as many rows as the tensor cores take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from kcpgen.emit import triton_values
from kcpgen.emit.gluon_chunks import copy_input, in_64_bits
from kcpgen.emit.gluon_far_gradients import declared, free, kept, turned
from kcpgen.emit.gluon_prepare import by_blocks, from_tiles, given
from kcpgen.emit.gluon_token_numbers import by_columns, by_warp, handed_over, loaded_across
from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_prologue import (
    apply_rewrites,
    base_variable,
    form_bases,
    in_rows,
    load_params,
    local,
    log_decay,
    printer,
    used_arguments,
    where_summed,
)
from kcpgen.emit.triton_scratch import scratch, waiting_rests
from kcpgen.plan import KernelPlan, Row
from kcpgen.tokenwise import names

TILES = ("q", "w", "A", "B", "W")  # scratch that is filled by tiles


def in_flight(plan: KernelPlan) -> bool:
    """Whether there is such a kernel of an op: with one term, whose vectors are made of the key axis alone, and find
    places where inputs were."""
    if not plan.decay_axis or len(plan.terms) != 1 or len(plan.erasing) > 1 or (plan.erasing and plan.pure_writes):
        return False
    varying = {local(plan, i.name) for i in plan.inputs_on("")}
    made = {*free(_decay_lines(plan)), *free(_vector_lines(plan)), *map(str, plan.read.coefficient.free_symbols)}
    summed = {planned.name for planned in plan.sums}
    of_values = {name for value in plan.values for name in names(value)}
    placed = len(_leaving(plan)) <= len([*_places(plan)])
    return placed and not made & varying and not of_values & summed


def emit_prepare_channels_hopper(plan: KernelPlan, shared: Mapping[str, Value], body: Mapping[str, list[str]]) -> str:
    """body: lines of the portable kernel."""
    inputs = plan.inputs_on("K")
    (j,) = plan.terms
    erasing = next(iter(plan.erasing), None)
    erase = plan.erase[erasing] if erasing is not None else None
    made = [name for name in scratch(plan) if name not in [f"U_{e}" for e in plan.erasing]]
    tiles = [name for name in made if name.split("_")[0] in TILES]
    numbers = [name for name in made if name not in tiles]
    places = dict(zip(_leaving(plan), _places(plan), strict=False))
    decay_lines, vector_lines = _decay_lines(plan), _vector_lines(plan)
    bases = list(dict.fromkeys(base_variable(plan, b) for b in plan.bases))
    before_keys = [line.replace("by_rows(", "by_keys(") for line in by_warp(from_tiles(plan, body["before_keys"]))]
    lines = {
        "before_keys": [re.sub(r"(tl\.sum\(.*), axis=1\)", r"\1, axis=0)", line) for line in turned(before_keys)],
        "finished": by_columns(plan, body["finished"]),
        "strengths": by_warp(triton_values.store_strengths(plan)),
        "value_operands": body["value_operands"],
    }
    blocks = [[name, *by_columns(plan, [value])] for name, value in triton_values.block_values(plan).items()]
    scaled = by_columns(plan, body["scaled"])
    sign = "-" if erase and erase.coefficient.could_extract_minus_sign() else ""
    used = [*lines["finished"], *chain.from_iterable(blocks), *scaled]
    vector_given, decay_given = free(vector_lines), free(decay_lines)
    named = [*chain.from_iterable(lines.values()), *used, *decay_lines, *vector_lines, *decay_given, "scale"]
    pair_operands = list(_pair_operands(plan))
    template_calls = ["level_span_T(", "same_level(", "within_reach("]
    return render(
        "prepare_channels_hopper.py.jinja",
        title=shared["title"],
        arguments=shared["arguments"],
        keywords=shared["keywords"],
        sizes=shared["sizes"],
        equations=body["equations"],
        solve=int(bool(plan.erasing)),
        whole_value_axis=int(plan.whole_value_axis),
        exclusive=int(bool(erase and erase.exclusive)),
        device_functions=[
            f for f in device_functions([*named, *template_calls]) if f not in ("unit_lower_inverse", "up_to", "before")
        ],
        used=in_64_bits(used_arguments(plan, named)),
        sources=[f"{i.name}_source" for i in inputs],
        source_tiles=[[f"{i.name}_tile", f"{i.name}_source"] for i in inputs],
        block_bytes=" + ".join(f"{i.name}_source.block_type.nbytes" for i in inputs),
        block_copies=[by_blocks(copy_input(i, 0)) for i in inputs],
        helpers=[
            "barriers",
            "by_keys",
            "fresh_product",
            *(["handed_over"] if used else []),
            "product",
            *(["rounded"] if erase else []),
            "sum_of_parts",
        ],
        **handed_over(plan, used, "by_row"),
        across=loaded_across(lines["finished"], "by_column"),
        solved_across=loaded_across([*chain.from_iterable(blocks), *scaled], "by_column"),
        sums_by_tokens=list(_sums_by_tokens(plan)),
        decay_given=decay_given,
        decay_taken=declared(plan, decay_given),
        decay_lines=decay_lines,
        vector_given=vector_given,
        vector_taken=declared(plan, vector_given),
        vector_lines=vector_lines,
        bases=bases,
        read_base=base_variable(plan, plan.read.base),
        write_base=base_variable(plan, plan.write[j]),
        pair_operands=pair_operands,
        pair_given=[name for name in free([*pair_operands, "f(rows_tile, columns_tile, nothing)"]) if name != "LOW"],
        key_operands=list(_key_operands(plan, places)),
        copied_out=[
            f"tma.async_copy_shared_to_global({name}_out, [at * C, block * BK], {places[name]})"
            for name in ("q_in", f"w_out_{j}")
        ],
        score=f"A_{j}",
        inverse=f"T_{erasing}_{erasing}",
        erase_score=f"L_{erasing}_{j}",
        solved=f"W_{erasing}",
        erase_place=places.get(f"a_in_{erasing}", ""),
        erase_rest="".join(places[name] for name in waiting_rests(plan)),
        scaled_inverse=sign + "".join(scaled),
        blocks=blocks,
        places=[*(f"{i.name}_tile" for i in inputs), f"A_{j}_leaving", *(f"{name}_leaving" for name, _ in blocks)],
        leaving=tiles,
        pointers=in_rows(f"{name}_ptr" for name in numbers),
        descriptors=[f"tile_descriptor(prepared.{name}, C, {'C' if name[0] in 'AB' else 'BK'})" for name in tiles],
        tensors=in_rows(given(plan, name) for name in numbers),
        shared_bytes=_shared_bytes(plan),
        key_inputs_names=[i.name for i in inputs],
        low_inputs=[i.name for i in inputs if i.name not in _decays(plan)],
        decay_inputs=_decays(plan),
        **lines,
    )


def _decays(plan: KernelPlan) -> list[str]:
    """Inputs that are fp32: logarithms of a decay."""
    inside = {str(symbol) for symbol in plan.decay_log.free_symbols}
    return [i.name for i in plan.inputs_on("K") if i.name in inside]


def _leaving(plan: KernelPlan) -> list[str]:
    """Vectors that a block of keys leaves in shared memory."""
    erases = [*(f"a_in_{e}" for e in plan.erasing), *waiting_rests(plan)]
    return ["q_in", *(f"w_out_{j}" for j in plan.terms), *erases]


def _places(plan: KernelPlan) -> Iterator[str]:
    """Where vectors were: fp32 ones leave room for two tiles."""
    for i in plan.inputs_on("K"):
        if i.name in _decays(plan):
            halves = f"{i.name}_tile._reinterpret(LOW, [2 * (KP // BK), C, BK], of_operands)"
            yield from (
                f"{halves}.index(2 * block + {half})" if half else f"{halves}.index(2 * block)" for half in (0, 1)
            )
        else:
            yield f"{i.name}_tile.index(block).reshape([C, BK])"


def _vectors(plan: KernelPlan) -> Iterator[str]:
    """The key axis's inputs and parameters, with the options applied."""
    inputs = plan.inputs_on("K")
    yield from load_params(plan, plan.spec.params)
    yield from (f"{local(plan, i.name)} = by_keys({i.name}_tile.index(block), inside)" for i in inputs)
    yield from apply_rewrites(plan, [i.name for i in inputs], backward=False)


def _decay_lines(plan: KernelPlan) -> list[str]:
    return turned(kept([*_vectors(plan), log_decay(plan)], ["log_decay"]))


def _vector_lines(plan: KernelPlan) -> list[str]:
    bases = list(dict.fromkeys(base_variable(plan, b) for b in plan.bases))
    return turned(kept([*_vectors(plan), *form_bases(plan)], bases))


def _sums_by_tokens(plan: KernelPlan) -> Iterator[str]:
    """As tiles have them; zeros, which nothing reads, where an option is off."""
    for planned in plan.sums:
        found = where_summed(plan, planned, f"{planned.name} = gl.convert_layout({planned.name}, by_token)")
        yield from found
        if len(found) > 1:
            yield from ("else:", f"    {planned.name} = gl.zeros([C], gl.float32, by_token)")


def _pair_operands(plan: KernelPlan) -> Iterator[str]:
    (j,) = plan.terms
    rows: list[Row] = [plan.read, *plan.erase.values()]
    for n, row in enumerate(rows):
        border = "from_border_before" if row.exclusive else "from_border"
        yield f"rows_tile.index({n}).permute([1, 0]).store(({base_variable(plan, row.base)} * {border}).to(LOW))"
    yield f"columns_tile.permute([1, 0]).store(({base_variable(plan, plan.write[j])} * to_border).to(LOW))"


def _key_operands(plan: KernelPlan, places: Mapping[str, str]) -> Iterator[str]:
    (j,) = plan.terms
    read, coefficient = base_variable(plan, plan.read.base), plan.read.coefficient
    size = "" if coefficient == 1 else f"{printer(plan).atom(coefficient, '')} * "
    yield f"{places['q_in']}.permute([1, 0]).store(({size}{read} * from_start).to(LOW))"
    yield f"{places[f'w_out_{j}']}.permute([1, 0]).store(({base_variable(plan, plan.write[j])} * to_end).to(LOW))"
    for i, row in plan.erase.items():
        start = "from_start_before" if row.exclusive else "from_start"
        erase, rest = f"{base_variable(plan, row.base)} * {start}", f"a_in_{i}_rest"
        if rest in places:
            yield f"a_in_{i}, {rest} = rounded({erase})"
            yield f"{places[f'a_in_{i}']}.permute([1, 0]).store(a_in_{i})"
            yield f"{places[rest]}.permute([1, 0]).store({rest}.to(LOW))"
        else:
            yield f"{places[f'a_in_{i}']}.permute([1, 0]).store(({erase}).to(LOW))"


def _shared_bytes(plan: KernelPlan) -> str:
    """Host code: of vectors, of what is multiplied, of zeros and ones; scores and the solve come where these were."""
    low = len(plan.inputs_on("K")) - len(_decays(plan))
    return f"C * KP * {2 * low + 4 * len(_decays(plan))} + 6 * C * BK + 2 * C * C"
