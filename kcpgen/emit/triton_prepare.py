"""`prepare.py`: scores, the triangular solve and the scan's operands, laid out by templates/prepare.py.jinja."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from kcpgen.emit import gluon_prepare_channels as by_channels
from kcpgen.emit import scores_in_scan, solve_in_scan, triton_values
from kcpgen.emit.gluon_prepare import emit_prepare_hopper, in_flight
from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_blocks import math
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_key_axis import strings
from kcpgen.emit.triton_prologue import (
    apply_rewrites,
    base_variable,
    decayed,
    form_bases,
    in_rows,
    launch_arguments,
    load_inputs,
    load_params,
    pair_decays,
    parameters,
    printer,
    rounded,
    running_decay,
    starts,
)
from kcpgen.emit.triton_scratch import (
    allocation,
    field_type,
    in_place,
    let_go,
    passed,
    room_to_solve,
    row_decays,
    scratch,
    solved_in_passing,
    waiting_rests,
)
from kcpgen.emit.triton_sums import before_keys
from kcpgen.plan import KernelPlan, Row


def emit_prepare(plan: KernelPlan, shared: Mapping[str, Value]) -> dict[str, str]:
    """File name -> source: the portable kernel, and the one for Hopper where an op has it."""
    fields = scratch(plan)
    filled = [f"U_{e}" for e in plan.erasing]  # by the scan
    for_roles = [*solve_in_scan.fields(plan), *scores_in_scan.fields(plan)]
    made = [name for name in fields if name not in [*filled, *for_roles]]
    body: dict[str, list[str]] = {
        "starts": starts(plan),
        "before_keys": [*before_keys(plan), *_scalar_decay(plan), *_read_scale(plan)],
        "score_sums": _score_sums(plan),
        "key_inputs": _key_inputs(plan),
        "key_operands": _kept_vectors(plan) if plan.decays_rows else _key_operands(plan),
        "key_scores": _key_scores(plan),
        "scores": [*_finished_scores(plan), *_store_scores(plan)],
        "solve": _solve(plan),
        "solved_scores": _solved_scores(plan),
        "solved_keys": _solved_keys(plan) if plan.erasing else [],
        "value_operands": triton_values.store_values(plan),
    }
    more = body | {
        "equations": _equations(plan),
        "finished": _finished_scores(plan),
        "scaled": [_scaled_inverse(plan, i, i) for i in plan.erasing],
    }
    hopper = {}
    if in_flight(plan):
        hopper = {"prepare_hopper.py": emit_prepare_hopper(plan, shared, more, list(rows_of_scores(plan)))}
    elif by_channels.in_flight(plan):
        found = by_channels.emit_prepare_channels_hopper(plan, shared, more)
        hopper = {"prepare_hopper.py": found}
    portable = render(
        "prepare.py.jinja",
        **shared,
        **body,
        in_flight=len(hopper),
        solves_in_scan=int(solve_in_scan.solves_in_scan(plan)),
        for_roles=int(scores_in_scan.scores_in_scan(plan)),
        fields_for_roles=for_roles,
        portable_fields=list(_made_for_portable_scans(plan)),
        inputs=[d.name for d in (*plan.spec.inputs, *plan.spec.params)],
        passed_on=[keyword.partition(":")[0] for keyword in strings(shared["keywords"])],
        equations=_equations(plan),
        device_functions=device_functions(chain.from_iterable(body.values())),
        scratch_fields=[[name, field_type(plan, name), meaning] for name, (_, meaning) in fields.items()],
        let_go=let_go(plan),
        scratch_allocations=[[name, allocation(plan, name, shape)] for name, (shape, _) in fields.items()],
        in_place=in_place(plan),
        values_in_place=triton_values.in_place(plan),
        host_functions=[
            "PrepareTiles",
            *(["readable_in_place"] if "readable" in in_place(plan) + triton_values.in_place(plan) else []),
            *(["room_within"] if "room_within" in room_to_solve(plan) else []),
        ],
        scratch_pointers=in_rows(f"{name}_ptr" for name in made),
        solved_in_passing=solved_in_passing(plan),
        room_to_solve=room_to_solve(plan),
        scratch_tensors=in_rows(name if name == solved_in_passing(plan) else passed(plan, name) for name in made),
        waiting_pointers=["work_ptr", *(f"{name}_ptr" for name in waiting_rests(plan))] if plan.decay_axis else [],
        waiting_rooms=[f"{shared['value_input']}.new_empty((len(chunks), HV, C, KP), dtype=scratch_dtype)"]
        * len(waiting_rests(plan)),
        exchanges=int(bool(plan.decay_axis)),
        parameters=parameters(plan),
        launch_arguments=launch_arguments(plan),
    )
    return {"prepare.py": portable, **hopper}


def _made_for_portable_scans(plan: KernelPlan) -> Iterator[list[str]]:
    """Name and allocation of what is wanted once scans are not to be in roles."""
    for name, (shape, _) in scratch(plan).items():
        condition = solve_in_scan.condition(plan, name) or scores_in_scan.condition(plan, name)
        if condition and name not in {**solve_in_scan.fields(plan), **scores_in_scan.fields(plan)}:
            unless = " if differentiable else None" if "differentiable" in condition else ""
            yield [name, f"scratch({shape}){unless}"]


def _equations(plan: KernelPlan) -> list[str]:
    solve = ["T = (I - L)^-1"] if plan.erasing else []
    weights = [math(e) for e in plan.form.solved if e.target.name == "W"]
    return [*solve, *weights, *triton_values.block_equations(plan)]


def _scalar_decay(plan: KernelPlan) -> list[str]:
    """Running decays of a token as a whole."""
    if plan.decay_axis != "":
        return []
    ends = [
        "tl.store(decay_out_ptr + at, tl.exp2(tl.sum(log_decay)))",
        "# Summed from a token on: what the write of the token before it decays by.",
        "G_from = tl.cumsum(log_decay, axis=0, reverse=True)",
        "tl.store(to_end_ptr + at * C + rows - 1, tl.exp2(G_from), mask=rows > 0)",
        "tl.store(to_end_ptr + at * C + (C - 1), 1.0)",
    ]
    return [*running_decay(plan), *ends]


def _read_scale(plan: KernelPlan) -> list[str]:
    """What scales a read as a whole, its decay from the chunk's start included."""
    if "q_in" not in row_decays(plan):
        return []
    code, coefficient = printer(plan), plan.read.coefficient
    factors = [] if coefficient == 1 else [code.atom(coefficient, "")]
    if plan.decay_axis == "":
        factors.append("tl.exp2(G)")
    elif not code.varies_by_token(coefficient):
        factors.append("tl.full((C,), 1.0, tl.float32)")
    return [f"tl.store(from_start_ptr + at * C + rows, {' * '.join(factors)})"]


def _key_inputs(plan: KernelPlan) -> list[str]:
    """One block of what the key axis is made of, options applied, and the running decay of its channels."""
    inputs = plan.inputs_on("K")
    return [
        *load_inputs(plan, inputs),
        *load_params(plan, [p for p in plan.spec.params if p.axis == "K"]),
        *apply_rewrites(plan, [i.name for i in inputs], backward=False),
        *(_channel_decay(plan) if plan.decay_axis else []),
        *form_bases(plan),
    ]


def _channel_decay(plan: KernelPlan) -> list[str]:
    """G of a block of channels, in `work` too, where any thread reads any row.

    Reading it back at once leaves all of it in the multiprocessor's own cache: one trip beyond it, not one a level. The
    select changes no value. Without it Triton sees nothing but elementwise work between that load and the products, and
    does all of it twice, in the layout of either operand.
    """
    return [
        *running_decay(plan),
        "work_tile = rows[:, None] * BK + lanes[None, :]",
        "tl.debug_barrier()  # the block before has been read",
        "tl.store(work + work_tile, G)",
        "tl.debug_barrier()",
        "G_end = tl.load(work + (C - 1) * BK + lanes)",
        "# Through memory and a select, or Triton would work out all that follows in two layouts.",
        "G = tl.where(live[:, None], tl.load(work + work_tile), G_end[None, :])",
        "G_after = tl.minimum(G_end[None, :] - G, 0.0)",
        "tl.store(decay_out_ptr + at * KP + keys, tl.exp2(G_end))",
    ]


def rows_of_scores(plan: KernelPlan) -> Iterator[tuple[str, Row, int]]:
    """(score, row operand, writing term) of every score matrix."""
    for j in plan.terms:
        yield f"A_{j}", plan.read, j
    for i, row in plan.erase.items():
        for j in plan.terms:
            yield f"L_{i}_{j}", row, j


def _score_sums(plan: KernelPlan) -> list[str]:
    lines = [f"{score} = tl.zeros((C, C), tl.float32)" for score, _, _ in rows_of_scores(plan)]
    own = [f"own_{j} = tl.zeros((C,), tl.float32)" for j in plan.terms if plan.decay_axis]
    return [*lines, *own]


def _key_scores(plan: KernelPlan) -> list[str]:
    """What one block of keys adds to the scores. Decays of a token as a whole wait for the finished sums."""
    if plan.decay_axis:
        return _scores_vector(plan).splitlines()
    variable = {b: base_variable(plan, b) for b in plan.bases}
    lines = [f"{name}_low = {name}.to(LOW)" for name in dict.fromkeys(variable.values())]
    for score, row, j in rows_of_scores(plan):
        operands = f"{variable[row.base]}_low, tl.trans({variable[plan.write[j]]}_low)"
        lines.append(f"{score} += dot({operands}, PRECISION)")
    return lines


def _finished_scores(plan: KernelPlan) -> list[str]:
    """The finished sums, decayed or masked where that is left to do, times the coefficients of their rows."""
    code = printer(plan)
    lines = [*pair_decays(plan)] if plan.decay_axis == "" else []
    for j in plan.terms if plan.decay_axis else ():
        lines.append(f"A_{j} += tl.where(rows[:, None] == rows[None, :], own_{j}[:, None], 0.0)")
    for score, row, _ in rows_of_scores(plan):
        if plan.decay_axis is None:
            lines.append(f"{score} = tl.where({'up_to' if row is plan.read else 'before'}(rows), {score}, 0.0)")
        elif plan.decay_axis == "":
            strict = "since_before" if row.exclusive else "tl.where(before(rows), since, 0.0)"
            lines.append(f"{score} *= {'since' if row is plan.read else strict}")
        if row.coefficient != 1:
            column = "[:, None]" if code.varies_by_token(row.coefficient) else ""
            lines.append(f"{score} *= {code.atom(row.coefficient, '')}{column}")
    return lines


def _store_scores(plan: KernelPlan) -> list[str]:
    stores = (f"tl.store(A_{j}_ptr + score_tile, A_{j}.to(LOW))" for j in plan.terms)
    return ["score_tile = at * (C * C) + rows[:, None] * C + rows[None, :]", *stores]


def _scores_vector(plan: KernelPlan) -> str:
    scores = list(rows_of_scores(plan))
    variable = {b: base_variable(plan, b) for b in plan.bases}
    scaled = {f"{variable[b]}_column": f"{variable[b]} * to_edge" for b in plan.bases if b in plan.write}
    for exclusive, suffix, decay in ((False, "row", "from_edge"), (True, "before", "tl.exp2(G_before - edge)")):
        rows = {row.base for _, row, _ in scores if row.exclusive is exclusive}
        scaled |= {f"{variable[b]}_{suffix}": f"{variable[b]} * {decay}" for b in plan.bases if b in rows}
    pairs = {
        score: (f"{variable[row.base]}_{'before' if row.exclusive else 'row'}", f"{variable[plan.write[j]]}_column")
        for score, row, j in scores
    }
    whole = {f"L_{i}_{j}" for i in plan.erasing for j in plan.terms if plan.passes_on(i, j)}
    in_two = {operand for score in whole for operand in pairs[score]}

    def added(score: str, row: str, column: str) -> str:
        if score in whole:
            return f"dot_both({row}, {row}_rest, tl.trans({column}), tl.trans({column}_rest), {score}, PRECISION)"
        return f"{score} + dot({row}, tl.trans({column}), PRECISION)"

    return render(
        "decay/scores_vector.py.jinja",
        operands=[
            f"{name}, {name}_rest = in_two({value}, LOW)" if name in in_two else f"{name} = {rounded(value)}"
            for name, value in scaled.items()
        ],
        pairs=[[score, added(score, *operands)] for score, operands in pairs.items()],
        own_token=[[f"own_{j}", variable[plan.read.base], variable[plan.write[j]]] for j in plan.terms],
    )


def _solve(plan: KernelPlan) -> list[str]:
    """The blocks T_i_e of (I - L)^-1."""
    lines = _solve_together(plan) if len(plan.erasing) > 1 else []
    for i in plan.erasing if not lines else ():
        place = f"T_{i}_{i}_ptr + at * (C * C)"
        lines.append(f"T_{i}_{i} = unit_lower_inverse(L_{i}_{i}, {place}, rows, C, LEVELS, PRECISION)")
    return lines


def _solve_together(plan: KernelPlan) -> list[str]:
    """Several erases: token first. Half a span is solved for all terms before the next half sees any of it.

    Eliminating one term after the other would be shorter and is unstable: the inverse of one term's block alone can
    grow by a factor per token where the product of all erases is a contraction.
    """
    erasing = plan.erasing
    identity, zero = "tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)", "tl.zeros((C, C), tl.float32)"
    lines = [f"T_{i}_{e} = {identity if i == e else zero}" for i in erasing for e in erasing]
    body = ["owned = same_level(rows, rows, level)"]
    body += [f"across_{a}_{b} = tl.where(owned, L_{a}_{b}, 0.0)" for a in erasing for b in erasing]
    for i in erasing:
        for b in erasing:
            seen = " + ".join(f"dot_fp32(T_{i}_{a}, across_{a}_{b}, PRECISION)" for a in erasing)
            body.append(f"seen_{i}_{b} = {seen}")
    for i in erasing:
        for e in erasing:
            passed = " + ".join(f"dot_fp32(seen_{i}_{b}, T_{b}_{e}, PRECISION)" for b in erasing)
            body.append(f"next_{i}_{e} = T_{i}_{e} + {passed}")
    body += [f"T_{i}_{e} = next_{i}_{e}" for i in erasing for e in erasing]
    return [*lines, "for level in tl.range(0, LEVELS, num_stages=1):", *(f"    {line}" for line in body)]


def _operand(plan: KernelPlan, row: Row) -> str:
    code = printer(plan)
    base = base_variable(plan, row.base)
    if row.coefficient == 1:
        return base
    factor = code.atom(row.coefficient, "")
    return f"{factor}[:, None] * {base}" if code.varies_by_token(row.coefficient) else f"{factor} * {base}"


def _kept_vectors(plan: KernelPlan) -> list[str]:
    """Read and write vectors, where serial kernels cannot read them in place."""
    bases = {"read": plan.read.base, **{f"write_{j}": plan.write[j] for j in plan.terms}}
    stores = [f"tl.store({name}_ptr + key_tile, {rounded(base_variable(plan, b))})" for name, b in bases.items()]
    if in_place(plan) == "False":
        return stores
    comment = "  # else serial kernels read them in place"
    return [f"if read_ptr is not None:{comment}", *(f"    {line}" for line in stores)]


def _key_operands(plan: KernelPlan) -> list[str]:
    """What reads the entering state or reaches the leaving one. An erase waits in its W for the solve."""
    lines = ["# What reads the entering state, and what reaches the leaving one."]
    lines += [f"tl.store(q_in_ptr + key_tile, {rounded(_operand(plan, plan.read) + decayed(plan, 'G'))})"]
    for j in plan.terms:
        written = base_variable(plan, plan.write[j]) + decayed(plan, "G_after")
        lines.append(f"tl.store(w_out_{j}_ptr + key_tile, {rounded(written)})")
    for i, row in plan.erase.items():
        exponent = "G_before" if row.exclusive else "G"
        vector = decayed(plan, exponent) if plan.decay_axis else ""  # one number per token goes onto T, in fp32
        erase = base_variable(plan, row.base) + vector
        if not waiting_rests(plan):
            lines.append(f"tl.store(W_{i}_ptr + key_tile, {rounded(erase)})")
            continue
        lines += [
            f"a_in_{i} = {erase}",
            f"a_in_{i}_low = a_in_{i}.to(LOW)",
            f"tl.store(W_{i}_ptr + key_tile, a_in_{i}_low)",
        ]
        rest = f"(a_in_{i} - a_in_{i}_low.to(tl.float32)).to(LOW)"
        lines.append(f"tl.store(a_in_{i}_rest_ptr + (key_tile - (at - here) * (C * KP)), {rest})")
    return lines


def _solved_scores(plan: KernelPlan) -> list[str]:
    lines = []
    together = plan.erasing if len(plan.erasing) > 1 else ()  # one alone is solved in its place
    for i in plan.erasing:
        for e in together:
            lines += [f"if T_{i}_{e}_ptr is not None:", f"    tl.store(T_{i}_{e}_ptr + score_tile, T_{i}_{e})"]
        for p in plan.pure_writes:
            lines += [f"if L_{i}_{p}_ptr is not None:", f"    tl.store(L_{i}_{p}_ptr + score_tile, L_{i}_{p}.to(LOW))"]
    return [*lines, *triton_values.store_strengths(plan), *triton_values.store_blocks(plan)]


def _solved_keys(plan: KernelPlan) -> list[str]:
    """W, one block of keys, from the erases: formed once more or, decayed by channel, where they wait in its place."""
    lines = _erases_again(plan) if plan.decays_rows else _waiting_erases(plan)
    for i in plan.erasing:
        solved = ""
        for e in plan.erasing:
            negative = plan.erase[e].coefficient.could_extract_minus_sign()
            sign = ("-" if negative else "") if not solved else " - " if negative else " + "
            inverse = _scaled_inverse(plan, i, e)
            solved += f"{sign}dot_whole({inverse}, a_in_{e}_low, PRECISION)"
            if waiting_rests(plan):
                solved += f"{sign or ' + '}dot({rounded(inverse)}, a_in_{e}_rest, PRECISION)"
        lines.append(f"tl.store(W_{i}_ptr + key_tile, {rounded(solved)})")
    return lines


def _waiting_erases(plan: KernelPlan) -> list[str]:
    tile = "key_tile = at * (C * KP) + rows[:, None] * KP + (key_start + lanes)[None, :]"
    loads = [f"a_in_{e}_low = tl.load(W_{e}_ptr + key_tile)" for e in plan.erasing]
    loads += [f"{name} = tl.load({name}_ptr + (key_tile - (at - here) * (C * KP)))" for name in waiting_rests(plan)]
    return [tile, *loads, "tl.debug_barrier()  # before any thread writes over what another has to read"]


def _erases_again(plan: KernelPlan) -> list[str]:
    """Erase vectors without coefficients and decays, from what they are made of. Nothing waits for other threads."""
    bases = {row.base for row in plan.erase.values()}
    made = _made_of(plan, frozenset[str]().union(*(plan.reads(plan.bases[base]) for base in bases)))
    inputs = [i for i in plan.inputs_on("K") if i.name in made]
    return [
        "keys = key_start + lanes",
        "inside = live[:, None] & (keys < K)[None, :]",
        "key_tile = at * (C * KP) + rows[:, None] * KP + keys[None, :]",
        *load_inputs(plan, inputs),
        *load_params(plan, [p for p in plan.spec.params if p.axis == "K" and p.name in made]),
        *apply_rewrites(plan, [i.name for i in inputs], backward=False),
        *form_bases(plan, bases),
        *(f"a_in_{e}_low = {rounded(base_variable(plan, row.base))}" for e, row in plan.erase.items()),
    ]


def _made_of(plan: KernelPlan, wanted: frozenset[str]) -> frozenset[str]:
    """Declared names, and those that options make them of."""
    found = wanted.union(*(plan.reads(r.value) for r in plan.rewrites if r.target in wanted))
    return wanted if found == wanted else _made_of(plan, found)


def _scaled_inverse(plan: KernelPlan, i: int, e: int) -> str:
    """T with what scales erase vector e as a whole on its columns, in fp32: the vectors are rounded only once.

    But for its sign: what erases by beta mostly writes by beta, and T beta is then split into halves once for both.
    """
    code, row = printer(plan), plan.erase[e]
    size = -row.coefficient if row.coefficient.could_extract_minus_sign() else row.coefficient
    factors = []
    if size != 1:
        factors.append(code.atom(size, "") + ("[None, :]" if code.varies_by_token(size) else ""))
    if plan.decay_axis == "":
        factors.append(f"tl.exp2({'G_before' if row.exclusive else 'G'})[None, :]")
    return f"T_{i}_{e}" + (f" * {' * '.join(factors)}" if factors else "")
