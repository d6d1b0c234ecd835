"""Serial kernels in roles for few heads: programs of 32 columns, which work equations out as they are written.

Tensor cores multiply 64 rows at once. Of 64 columns of the state or more these are values, and sums are transposed
(`gluon_serial`); of 32 they are keys or the tokens of a chunk. Left operands are then the tiles as they were copied,
and what is a right one (the state, values that are corrected, what is scaled by token) is laid into shared memory
first. Sums are the same to the last bit. There are twice the programs, where fewer would leave multiprocessors idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kcpgen.derivation.blocks import DIAGONALS
from kcpgen.derivation.chunk_form import Equation
from kcpgen.emit import scores_in_scan, solve_in_scan, triton_values
from kcpgen.emit.gluon_sums import Products, renamed
from kcpgen.emit.render import Value
from kcpgen.emit.triton_scratch import field_of, row_decays
from kcpgen.plan import KernelPlan

LAID = ("fence_async_shared()", "gl.thread_barrier()")  # for tensor cores to read what all threads have stored


def upright(plan: KernelPlan) -> bool:
    """Whether an op has them: where tokens decay as a whole or not at all, so that chunks can have 64, and of one term
    that the scan, where it erases, solves for itself."""
    solved = not plan.erasing or solve_in_scan.solves_in_scan(plan)
    return scores_in_scan.scores_in_scan(plan) and solved


def _none(*names: str) -> dict[str, Value]:
    """What a template of an op without them is given."""
    return {"upright": 0, **{f"upright_{name}": [] for name in names}}


def scan(plan: KernelPlan) -> dict[str, Value]:
    """Lines and names for a template."""
    if not upright(plan):
        return _none("staged", "begun", "read", "solved", "advance", "output")
    (term,) = plan.terms
    solving = bool(plan.erasing)
    corrected = [f"U_{term}"] if solving else []
    printer = _printer(plan, "S", corrected)
    output, advance = (e for e in plan.form.solved if e.target.name in ("O", "S_next"))
    reading = [t for t in output.terms if "S" in (f.name for f in t.factors)]
    read, written = printer.sum(output, reading), printer.sum(output, [t for t in output.terms if t not in reading])
    advanced = printer.sum(advance)
    staged = list(_scaled(plan, printer, advance))
    solved: list[str] = []
    if solving:
        R, U = f"R_{term}", f"U_{term}"
        value = printer.sum(triton_values.equations(plan)[term]).start
        solved = [
            f"value_{term} = {value}",
            f"erase_from_start = {printer.numbers('erase_from_start')}",
            f"{R} = warpgroup_mma_wait(1 if STORE_OUTPUT else 0, deps=({R},))",
            f"{R} = gl.fma({R}, erase_from_start, value_{term})",
            f"{R}_staged.store({R}.to(low))",
            *LAID,
            f"{U} = product(inverse_{term}_tile, {R}_staged, {R})",
            f"{U} = warpgroup_mma_wait(0, deps=({U},))",
            f"{U}_low = in_bf16({U})",
            "if KEEP:  # the copy out of the chunk before",
            "    tma.store_wait(1 + STATES)",
            f"{U}_leaving.store({U}_low)",
        ]
    return {
        "upright": 1,
        "upright_staged": [*([f"R_{term}"] if solving else []), *(name for name, _ in staged)],
        "upright_begun": [f"R_{term} = fresh_product({field_of(plan, f'w_out_{term}')}_tile, S_tile, nothing)"]
        if solving
        else [],
        "upright_read": [*read.lines()],
        "upright_solved": [*solved, *_stored(staged), *(LAID if solving or staged else ())],
        "upright_advance": [*advanced.lines()],
        "upright_output": [
            *read.settled("1"),
            *scores_in_scan.awaited(),
            *(f"O = product({left}, {right}, O)" for left, right in written.products),
        ],
    }


def reverse(plan: KernelPlan) -> dict[str, Value]:
    """Likewise, of the backward."""
    if not upright(plan):
        return _none("staged", "decayed", "correct", "scaled", "settled", "solved")
    (term,) = plan.terms
    equations = plan.form.reverse_scan
    printer = _printer(plan, "dS_next", [f"dU_{term}"])
    (correction,) = (e for e in equations if e.target.name == "dU")
    (advance,) = (e for e in equations if e.target.name == "dS")
    corrected = printer.sum(correction, halves=True)
    begun = printer.sum(advance, [t for t in advance.terms if "dU" not in (f.name for f in t.factors)])
    staged = list(_scaled(plan, printer, advance))
    dU, dR, inverse = f"dU_{term}", f"dR_{term}", f"inverse_{term}"
    handed_back = bool(solve_in_scan.handed_back(plan))
    leaving = dR if handed_back else dU
    lines = [f"{dU} = warpgroup_mma_wait({len(begun.opening)}, deps=({dU},))"]
    if handed_back:
        lines += [
            f"{dU}_low, {dU}_rest = rounded({dU})",
            f"{dU}_staged.store({dU}_low)",
            f"{dU}_rest_staged.store({dU}_rest.to(low))",
            *LAID,
            f"{dR} = product({inverse}_rest_tile.permute([1, 0]), {dU}_staged, {dU})",
            f"{dR} = product({inverse}_tile.permute([1, 0]), {dU}_rest_staged, {dR})",
            f"{dR} = product({inverse}_tile.permute([1, 0]), {dU}_staged, {dR})",
            f"erase_from_start = {printer.numbers('erase_from_start')}",
            f"{dR} = warpgroup_mma_wait(0, deps=({dR},))",
            f"{dR}_staged.store(({dR} * erase_from_start).to(low))",
        ]
    lines += [
        "if STORE_GRADIENTS:",
        "    tma.store_wait(1)",
        f"    {leaving}_leaving.store(in_bf16({leaving}))",
        *LAID,
    ]
    if handed_back:
        written = f"{field_of(plan, f'w_out_{term}')}_tile.permute([1, 0])"
        lines.append(f"dS_next = product({written}, {dR}_staged, dS_next)")
    return {
        "upright": 1,
        "upright_staged": [name for name, _ in staged] + ([dU, f"{dU}_rest", dR] if handed_back else []),
        "upright_decayed": [*begun.beginning()],
        "upright_correct": [*corrected.lines()],
        "upright_scaled": [*_stored(staged), *(LAID if staged else ())],
        "upright_settled": [*corrected.settled("0"), *corrected.closed(), *begun.opened()],
        "upright_solved": lines,
    }


def _printer(plan: KernelPlan, state: str, corrected: Iterable[str]) -> Products:
    rename = renamed(plan, {"S_next": "S", "dS": "dS_next"})
    return Products(plan=plan, state=state, corrected=frozenset(corrected), rename=rename, upright=True)


def _scaled(plan: KernelPlan, printer: Products, equation: Equation) -> Iterator[tuple[str, str]]:
    """Right operands whose rows a vector's decay scales: the name, and what is staged."""
    for term in equation.terms:
        factors = [f for f in term.factors if f.name not in DIAGONALS]
        rows, _ = row_decays(plan).get(factors[0].name, ("", ""))
        if rows and factors[0].transposed:
            name = printer.name(factors[1])
            held = f"{name}_low" if name in printer.corrected else printer.values(name)
            yield name, f"({held}.to(gl.float32) * {printer.numbers(rows)}).to(low)"


def _stored(staged: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from (f"{name}_staged.store({value})" for name, value in staged)
