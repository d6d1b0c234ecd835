"""What the scan makes corrected values of: raw values, and what the solve of a chunk's erases takes of each of them.

    U_p = V_p                                        a pure write
    U_i = strength_i value_i + sum_j B_i_j value_j + sum_p B_i_p U_p + W_i S
    B_i_e = strict_tril(T_i_e strength_e)            of what another erasing term writes
    B_i_p = sum_e T_i_e L_e_p                        of a pure write

T has ones on its diagonal: a token's own value comes to its corrected one as it is, but for its strength, in fp32. Only
what erases between tokens take of it is rounded, with B. Raw values come without what scales a token's as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from kcpgen.derivation.chunk_form import Equation, Factor, Monomial
from kcpgen.emit.triton_prologue import apply_rewrites, load_inputs, load_params, masked, printer, rounded
from kcpgen.plan import KernelPlan
from kcpgen.tokenwise import RowSum, split_scalar, symbol


def own_values(plan: KernelPlan) -> list[int]:
    """Erasing terms that write a value of their own."""
    return [e for e in plan.erasing if plan.values[e] != 0]


def blocks(plan: KernelPlan) -> dict[str, tuple[int, int]]:
    """By the name of B: the term whose corrected value it adds to, and the term whose raw value it multiplies."""
    return {f"B_{i}_{j}": (i, j) for i in plan.erasing for j in [*own_values(plan), *plan.pure_writes]}


def strengths(plan: KernelPlan) -> dict[str, sympy.Expr]:
    """What scales each value as a whole, by its name, unless it is nothing."""
    found = {f"strength_{e}": _split(plan, e)[0] for e in own_values(plan)}
    return {name: coefficient for name, coefficient in found.items() if coefficient != 1}


def equations(plan: KernelPlan) -> dict[int, Equation]:
    """U by term, pure writes first."""
    found = {p: _equation(p, [_product(_factor("V", p))]) for p in plan.pure_writes}
    for i in plan.erasing:
        scale = [_factor("strength", i)] if f"strength_{i}" in strengths(plan) else []
        own = [_product(*scale, _factor("value", i))] if i in own_values(plan) else []
        taken = [_product(_factor("B", i, j), _factor("value", j)) for j in own_values(plan)]
        taken += [_product(_factor("B", i, p), _factor("U", p)) for p in plan.pure_writes]
        found[i] = _equation(i, [*own, *taken, _product(_factor("W", i), _factor("S"))])
    return found


def block_equations(plan: KernelPlan) -> list[str]:
    """What B is, for a person."""
    lines = []
    for i in plan.erasing:
        for e in own_values(plan):
            scaled = f" strength_{e}" if f"strength_{e}" in strengths(plan) else ""
            lines.append(f"B_{i}_{e} = strict_tril(T_{i}_{e}{scaled})")
    for i in plan.erasing:
        for p in plan.pure_writes:
            lines.append(f"B_{i}_{p} = " + " + ".join(f"T_{i}_{e} L_{e}_{p}" for e in plan.erasing))
    return lines


def in_parts(plan: KernelPlan) -> bool:
    """Whether raw values are made in fp32 and so kept in two parts; plain inputs are what they are."""
    return any(not _plain(plan, e) for e in own_values(plan))


def value_fields(plan: KernelPlan) -> list[str]:
    """Scratch of raw values, unless they are read in place."""
    parts = ("", "_rest") if in_parts(plan) else ("",)
    return [f"value_{e}{part}" for e in own_values(plan) for part in parts]


def in_place(plan: KernelPlan) -> str:
    """Host code: whether `scan_only` values are inputs as they lie; a backward wants pure writes as scratch."""
    if in_parts(plan) or not scan_only(plan):
        return "False"
    inputs = list(dict.fromkeys(input_of(plan, field) for field in scan_only(plan)))
    options = dict.fromkeys(r.option for r in plan.rewrites if r.target in inputs)
    conditions = [*([] if own_values(plan) else ["not differentiable"]), *(f"{option}_mode == 0" for option in options)]
    return " and ".join([*conditions, f"readable_in_place(VP, scratch_dtype, {', '.join(inputs)})"])


def scan_only(plan: KernelPlan) -> list[str]:
    """Fields of values that the scan alone reads, of pure writes in inference: plain inputs may stay where they are."""
    pure = [] if own_values(plan) else plan.pure_writes
    return value_fields(plan) or [f"U_{p}" for p in pure if all(_plain(plan, other) for other in pure)]


def input_of(plan: KernelPlan, field: str) -> str:
    """The input that a field of plain values stands for."""
    return str(_raw(plan, int(field.split("_")[1])))


def store_strengths(plan: KernelPlan) -> Iterator[str]:
    code = printer(plan)
    for name, coefficient in strengths(plan).items():
        value = code.atom(coefficient, "")
        whole = value if code.varies_by_token(coefficient) else f"tl.full((C,), {value}, tl.float32)"
        yield f"{name} = {whole}"
        yield f"tl.store({name}_ptr + at * C + rows, {name})"


def store_blocks(plan: KernelPlan) -> Iterator[str]:
    """B from T and L in registers."""
    for name, value in block_values(plan).items():
        yield f"tl.store({name}_ptr + score_tile, {rounded(value)})"


def block_values(plan: KernelPlan) -> dict[str, str]:
    """B in fp32, by its name."""
    found = {}
    for name, (i, j) in blocks(plan).items():
        if j in plan.erasing:
            scaled = f" * strength_{j}[None, :]" if f"strength_{j}" in strengths(plan) else ""
            found[name] = f"tl.where(before(rows), T_{i}_{j}{scaled}, 0.0)"
        else:
            found[name] = " + ".join(f"dot_fp32(T_{i}_{e}, L_{e}_{j}, PRECISION)" for e in plan.erasing)
    return found


def store_values(plan: KernelPlan) -> list[str]:
    """Pure writes, and raw values that are not read in place; no lines if there are none."""
    inputs = plan.inputs_on("V")
    pure = [f"tl.store(U_{p}_ptr + value_tile, {rounded(_code(plan, plan.values[p]))})" for p in plan.pure_writes]
    raw = [line for e in own_values(plan) for line in _store_raw(plan, e)]
    if not pure and not raw:
        return []
    if in_place(plan) != "False":
        scratch_only = f"if {scan_only(plan)[0]}_ptr is not None:  # else the scan reads them in place"
        guarded = [scratch_only, *(f"    {line}" for line in raw or pure)]
        pure, raw = (pure, guarded) if raw else (guarded, [])
    return [
        *load_inputs(plan, inputs),
        *load_params(plan, [p for p in plan.spec.params if p.axis == "V"]),
        *apply_rewrites(plan, [i.name for i in inputs], backward=False),
        *pure,
        *raw,
    ]


def _store_raw(plan: KernelPlan, e: int) -> Iterator[str]:
    yield f"raw_{e} = {_code(plan, _raw(plan, e))}"
    yield f"raw_{e}_low = raw_{e}.to(LOW)"
    yield f"tl.store(value_{e}_ptr + value_tile, raw_{e}_low)"
    if in_parts(plan):
        yield f"tl.store(value_{e}_rest_ptr + value_tile, (raw_{e} - raw_{e}_low.to(tl.float32)).to(LOW))"


def _code(plan: KernelPlan, value: sympy.Expr) -> str:
    return masked(plan, value, "V", printer(plan).code(value, "V"))


def _split(plan: KernelPlan, e: int) -> tuple[sympy.Expr, sympy.Expr]:
    """(coefficient, rest). A coefficient that needs a sum over values is not split off: that sum is not known yet."""
    coefficient, base = split_scalar(plan.values[e], {**plan.spec.axes, **{s.name: "" for s in plan.sums}})
    return (sympy.Integer(1), plan.values[e]) if coefficient.atoms(RowSum) else (coefficient, base)


def _raw(plan: KernelPlan, e: int) -> sympy.Expr:
    return _split(plan, e)[1]


def _plain(plan: KernelPlan, e: int) -> bool:
    """Whether what remains of a term's value is an input; of a pure write nothing is split off."""
    value = _raw(plan, e) if e in plan.erasing else plan.values[e]
    return value in {symbol(i.name) for i in plan.inputs_on("V")}


def _factor(name: str, *index: int) -> Factor:
    return Factor(name=name, index=index)


def _product(*factors: Factor) -> Monomial:
    return Monomial(sign=1, factors=factors)


def _equation(term: int, terms: list[Monomial]) -> Equation:
    return Equation(target=_factor("U", term), terms=tuple(terms))
