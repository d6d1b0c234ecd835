"""`far_gradients_hopper.py`: what `triton_far_gradients` emits, in Gluon, with tiles held [keys, tokens].

The lines that form a kernel's operands are the portable kernel's, turned. Products are begun in groups, and those of a
group do not wait for each other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kcpgen.emit.gluon_chunks import (
    STATES,
    adds_only,
    awaited,
    copy_input,
    in_64_bits,
    nbytes,
    output_gradient,
    products,
    products_with,
    score_tile,
    shared_bytes,
    state_tile,
    value_tile,
)
from kcpgen.emit.render import Value, render
from kcpgen.emit.tidy import live
from kcpgen.emit.triton_blocks import math
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_key_axis import EQUATIONS
from kcpgen.emit.triton_operands import (
    column_names,
    form_operands,
    is_exclusive,
    load_scalars,
    row_names,
    score_gradient,
    score_gradients,
    whole_scores,
)
from kcpgen.emit.triton_prologue import (
    apply_rewrites,
    in_rows,
    load_params,
    load_sums,
    local,
    log_decay,
    mode_name,
    used_arguments,
)
from kcpgen.plan import KernelPlan


def in_flight(plan: KernelPlan) -> bool:
    """Whether there is such a kernel of an op."""
    return bool(plan.decay_axis) and adds_only(plan)


def emit_far_gradients_hopper(plan: KernelPlan, shared: Mapping[str, Value]) -> str:
    vectors = [*row_names(plan), *column_names(plan)]
    results, scores = [f"d_{name}" for name in vectors], score_gradients(plan)
    inputs = plan.inputs_on("K")
    decay_lines = turned(kept([*_load_vectors(plan), log_decay(plan)], ["log_decay"]))
    operand_lines = turned(kept([*_load_vectors(plan), *form_operands(plan)], vectors))
    decay_names, operand_names = free(decay_lines), free(operand_lines)
    scalars = kept(load_scalars(plan), [*decay_names, *operand_names])
    score_tiles, score_lines, pair_lines = list(_score_tiles(plan)), list(_place_scores(plan)), list(_pairs(plan))
    gained = ["mismatch", *results]
    decays = ["from_border", *(["from_border_before"] if _exclusive(plan) else []), "to_border"]
    pair_names = list(dict.fromkeys([*gained, *decays, *operand_names, *score_tiles, "nothing"]))
    tiles, passed = list(_tiles(plan)), [*results, "dG_border", "dG_end"]
    body = [*scalars, *decay_lines, *operand_lines]
    tiles_of_scores = [score_tile(name, 3, "given") for name in scores]
    sums = ["sums"] if "sums_ptr" in free(body) else []
    template_calls = ["later_block(", "same_level(", "level_span_T(", "within_reach("]
    return render(
        "far_gradients_hopper.py.jinja",
        title=shared["title"],
        arguments=shared["arguments"],
        keywords=shared["backward_keywords"],
        sizes=shared["sizes"],
        equations=[math(e) for e in plan.form.gradients if e.target.name in EQUATIONS],
        device_functions=device_functions([*template_calls, *body]),
        used=in_64_bits(used_arguments(plan, body)),
        sources=[f"{i.name}_source" for i in inputs],
        source_tiles=[[f"{i.name}_tile", f"{i.name}_source"] for i in inputs],
        source_copies=[copy_input(i, 0) for i in inputs],
        source_bytes=nbytes((), [f"{i.name}_source" for i in inputs]),
        tiles_of_states=tiles,
        state_bytes=[nbytes([tile for tile in tiles if tile["side"] == side]) for side in (1, 2)],
        scalars=scalars,
        tiles_of_scores=tiles_of_scores,
        halves=list(_halves(plan)),
        score_bytes=nbytes(tiles_of_scores),
        scores_given=[f"{name}_given" for name in scores],
        pointers=[f"{name}_ptr" for name in sums],
        score_tiles=score_tiles,
        score_lines=score_lines,
        score_arguments=[f"{name}: torch.Tensor" for name in scores],
        decay_lines=decay_lines,
        decay_given=decay_names,
        decay_taken=declared(plan, decay_names),
        operand_lines=operand_lines,
        operand_given=operand_names,
        operand_taken=declared(plan, operand_names),
        pair_lines=pair_lines,
        pair_given=pair_names,
        pair_taken=declared(plan, pair_names),
        vectors=", ".join(vectors),
        gained=", ".join(gained),
        exclusive=int(_exclusive(plan)),
        entering=list(_entering(plan)),
        leaving=list(_leaving(plan)),
        ending=list(_ending(plan)),
        results=results,
        result_pointers=in_rows(f"{name}_ptr" for name in passed),
        result_arguments=[f"{name}: torch.Tensor" for name in passed],
        result_tensors=in_rows([*(f"prepared.{name}" for name in sums), *passed]),
        key_inputs=[i.name for i in inputs],
        host_bytes=f"{shared_bytes(plan, len(tiles) - len(STATES), len(score_tiles) + 1)} + 32 * C",  # span and border
    )


def _load_vectors(plan: KernelPlan) -> Iterator[str]:
    """The key axis's inputs, parameters and sums, with the options applied; whatever is not needed is dropped later."""
    yield from load_sums(plan)
    yield from load_params(plan, plan.spec.params)
    yield from (f"{local(plan, i.name)} = by_keys({i.name}_tile, inside)" for i in plan.inputs_on("K"))
    yield from apply_rewrites(plan, [i.name for i in plan.inputs_on("K")], backward=False)


def kept(lines: Iterable[str], results: Sequence[str]) -> list[str]:
    """The lines that these results need."""
    return live([*lines, f"tl.store({', '.join(results)})"])[:-1]


TURN = str.maketrans({"\x00": "[None, :]", "\x01": "[:, None]"})


def turned(lines: Iterable[str]) -> list[str]:
    """Lines over [tokens, keys] as lines over [keys, tokens]: elementwise, so that only broadcasts differ."""
    return [line.replace("[:, None]", "\x00").replace("[None, :]", "\x01").translate(TURN) for line in lines]


def free(lines: Sequence[str]) -> list[str]:
    """Names that the lines read and do not make, but for functions and modules."""
    names = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Name)]
    calls = [node.func for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Call)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    called = {node.id for node in calls if isinstance(node, ast.Name)} | {"tl", "gl"}
    return [name for name in dict.fromkeys(node.id for node in names) if name not in made | called]


def declared(plan: KernelPlan, names: Iterable[str]) -> list[str]:
    """Parameters of a function: sizes, and which variant of an option is on, are known when it is compiled."""
    known = {"C", "K", *(mode_name(option.name) for option in plan.spec.options)}
    return [f"{name}: gl.constexpr" if name in known else name for name in names]


def _exclusive(plan: KernelPlan) -> bool:
    return any(is_exclusive(plan, row) for row in row_names(plan))


def _before(plan: KernelPlan, row: str) -> str:
    return "_before" if is_exclusive(plan, row) else ""


def _tiles(plan: KernelPlan) -> Iterator[dict[str, Value]]:
    """The states around a chunk, and what they are multiplied with: first what the entering one needs."""
    solved = [f"dU_{e}{part}" for part in ("", "_rest") for e in plan.erasing if not part or plan.erases_apart]
    entering = [state_tile("S", "states.entering", 1), output_gradient(1), *(value_tile(plan, n, 1) for n in solved)]
    leaving = [state_tile("dS_next", "states.leaving", 2), *(value_tile(plan, f"U_{j}", 2) for j in plan.terms)]
    yield from ({**tile, "side": 1} for tile in entering)
    yield from ({**tile, "side": 2} for tile in leaving)


def _score_tiles(plan: KernelPlan) -> Iterator[str]:
    for name in score_gradients(plan):
        yield f"{name}_tile"
        if name in whole_scores(plan):
            yield f"{name}_rest_tile"


def _halves(plan: KernelPlan) -> Iterator[str]:
    """Where scores are placed: where they came, those in fp32 as two operands of 16 bits."""
    for name in score_gradients(plan):
        if name in whole_scores(plan):
            for part, half in enumerate((f"{name}_tile", f"{name}_rest_tile")):
                yield f"{half} = {name}_given._reinterpret(LOW, [2, C, C], of_scores).index({part})"
        else:
            yield f"{name}_tile = {name}_given"


def _place_scores(plan: KernelPlan) -> Iterator[str]:
    whole, scores = whole_scores(plan), score_gradients(plan)
    yield from (f"{name} = gl.where(owned, {name}_given.load(owned.type.layout), 0.0)" for name in scores)
    yield "gl.thread_barrier()  # all have read what is given"
    for name in scores:
        yield f"{name}_tile.store({name}.to(LOW))"
        if name in whole:
            yield f"{name}_rest_tile.store(({name} - {name}.to(LOW).to(gl.float32)).to(LOW))"


def _pairs(plan: KernelPlan) -> Iterator[str]:
    """Rows take from columns, then columns from rows; what rounding an operand lost is known by the difference."""
    rows, columns, whole = row_names(plan), column_names(plan), whole_scores(plan)
    of_row = {r: f"{r} * from_border{_before(plan, r)}" for r in rows}
    for c in columns:
        yield f"{c}_low = ({c} * to_border).to(LOW)"
        yield f"{c}_left = gl.convert_layout({c}_low, LEFT)"
    begun = []
    for r in rows:
        scores = [(f"{c}_left", score_gradient(r, j)) for j, c in enumerate(columns)]
        yield from products(f"{r}_share", [(c, f"{score}_tile.permute([1, 0])") for c, score in scores])
        begun.append(f"{r}_share")
        if rests := [(c, f"{score}_rest_tile.permute([1, 0])") for c, score in scores if score in whole]:
            yield from products(f"{r}_unseen", rests)
            begun.append(f"{r}_unseen")
    yield from (f"{r}_low = ({of_row[r]}).to(LOW)" for r in rows)
    yield awaited(begun)
    for j, c in enumerate(columns):
        scores = [(f"gl.convert_layout({r}_low, LEFT)", f"{score_gradient(r, j)}_tile") for r in rows]
        yield from products(f"{c}_share", scores)
    for r in rows:
        yield f"mismatch += ({of_row[r]} - {r}_low.to(gl.float32)) * {r}_share"
        if f"{r}_unseen" in begun:
            yield f"mismatch += {of_row[r]} * {r}_unseen  # by columns"
            yield f"{r}_share += {r}_unseen"
        yield f"d_{r} += from_border{_before(plan, r)} * {r}_share"
    yield awaited([f"{c}_share" for c in columns])
    for c in columns:
        yield f"mismatch -= ({c} * to_border - {c}_low.to(gl.float32)) * {c}_share"
        yield f"d_{c} += to_border * {c}_share"


def _entering(plan: KernelPlan) -> Iterator[str]:
    rows = {"dq_in": "read", **{f"da_in_{i}": f"erase_{i}" for i in plan.erasing}}
    sums = products_with(plan, "S", turned=True)
    yield from chain.from_iterable(products(name, pairs) for name, pairs in sums)
    yield awaited([name for name, _ in sums])
    for name, _ in sums:  # other rows of dO are not this sequence's
        code = "gl.where(live[None, :], dq_in, 0.0)" if name == "dq_in" else name
        yield f"d_{rows[name]} += from_start{_before(plan, rows[name])} * {code}"


def _leaving(plan: KernelPlan) -> Iterator[str]:
    sums = products_with(plan, "dS_next", turned=True)
    yield from chain.from_iterable(products(name, pairs) for name, pairs in sums)
    yield awaited([name for name, _ in sums])
    for j in plan.terms:
        yield f"dw_out_{j} = to_end * dw_out_{j}"
        yield f"d_write_{j} += dw_out_{j}"


def _ending(plan: KernelPlan) -> Iterator[str]:
    leaving = "".join(f" + gl.sum(write_{j} * dw_out_{j}, axis=1)" for j in plan.terms)
    yield f"dG_end = gl.exp2(G_end) * d_decay_out{leaving}"
