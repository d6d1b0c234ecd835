"""`gradients.py` where every channel decays on its own: near pairs one by one, and what follows token by token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kcpgen.emit.render import Value, render
from kcpgen.emit.tidy import live
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_key_axis import later_sweeps, launcher, lines_in, make_sweeps, resumed, store_scalars, strings
from kcpgen.emit.triton_operands import (
    column_names,
    form_operands,
    is_exclusive,
    load_keys,
    load_scalars,
    row_names,
    scalar_inputs,
    score_gradient,
    score_gradients,
)
from kcpgen.emit.triton_prologue import in_rows, log_decay, used_arguments, where_read
from kcpgen.emit.triton_score_gradients import lines_of, start_sums, summed_over_values
from kcpgen.emit.triton_sweeps import (
    Collected,
    Sweeps,
    begun,
    collected,
    key_inputs,
    key_params,
    start_gradient,
    store_input,
    store_param,
)
from kcpgen.plan import KernelPlan
from kcpgen.spec import Param, TokenInput


def emit_near_gradients(plan: KernelPlan, shared: Mapping[str, Value]) -> str:
    sweeps = make_sweeps(plan)
    rows, columns, scores = row_names(plan), column_names(plan), score_gradients(plan)
    row_inputs = [*load_scalars(plan), *load_keys(plan)]
    row_operands = [*row_inputs, log_decay(plan), *form_operands(plan)]
    parts = _parts(plan, sweeps)
    gradients, key_gradients = _collected(plan, parts, _key_gradients(plan, sweeps))
    pair = list(_pair(plan))
    block_parts = lines_of(_block_parts(plan, parts, gradients))
    finish = _finish(plan, sweeps, parts)
    whole = [*row_operands, *key_gradients, *block_parts]
    sums = ["sums"] if plan.sums else []
    far = [*(f"d_{name}" for name in (*rows, *columns)), "dG_border"]
    on_keys: list[TokenInput | Param] = [*key_inputs(plan), *key_params(plan)]
    finished = [*scalar_inputs(plan), *(d for d in on_keys if any(d.name in s.touched for s in sweeps.sweeps[1:]))]
    finish_sums = strings(finish["sums"])
    device = ["decays(", *whole, *pair, *lines_in(finish)]
    return render(
        "decay/gradients_vector.py.jinja",
        **launcher(plan, shared, sweeps),
        used=used_arguments(plan, whole),
        device_functions=device_functions(device),
        row_inputs=row_inputs,
        row_operands=row_operands,
        rows=rows,
        columns=columns,
        scores=scores,
        own_pairs=[[c, score_gradient("read", j)] for j, c in enumerate(columns)],
        before=plan.exclusive,
        pair=pair,
        dG=_decay_share(plan, [r for r in rows if not is_exclusive(plan, r)], columns),
        dG_before=_decay_share(plan, [r for r in rows if is_exclusive(plan, r)], []) if plan.exclusive else "",
        far=far,
        begun=[gradient.start for gradient in gradients],
        key_gradients=key_gradients,
        row_parts=list(_row_parts(plan, parts)),
        block_parts=block_parts,
        parts=parts,
        operand_pointers=in_rows(f"{name}_ptr" for name in [*scores, *sums, *far, "dG_end"]),
        operand_tensors=in_rows([*scores, *(f"prepared.{name}" for name in sums), *far, "dG_end"]),
        gradient_pointers=in_rows(f"d_{d.name}_ptr" for d in on_keys),
        gradient_tensors=in_rows(f"d_{d.name}" for d in on_keys),
        finishes=bool(parts or finished),
        finish=finish,
        finish_operands=in_rows(f"{name}_ptr" for name in finish_sums),
        finish_operand_tensors=in_rows("prepared.sums" if name == "sums" else name for name in finish_sums),
        finish_pointers=in_rows(f"d_{d.name}_ptr" for d in finished),
        finish_tensors=in_rows(f"d_{d.name}" for d in finished),
    )


def _pair(plan: KernelPlan) -> Iterator[str]:
    """Tokens t > s: what arrives of column s at row t, and the other way round."""
    rows = row_names(plan)
    kinds = {"decay": [r for r in rows if not is_exclusive(plan, r)]}
    if plan.exclusive:
        kinds["decay_before"] = [r for r in rows if is_exclusive(plan, r)]
    for j, column in enumerate(column_names(plan)):
        for decay, chosen in kinds.items():
            yield f"arriving = {column}s[s] * {decay}"
            yield from (f"d_{row} += {score_gradient(row, j)} * arriving" for row in chosen)
        shares = (
            f"({' + '.join(f'{score_gradient(row, j)} * {row}s[t]' for row in chosen)}) * {decay}"
            for decay, chosen in kinds.items()
        )
        yield f"d_{column}s = replaced(d_{column}s, s, d_{column}s[s] + {' + '.join(shares)})"


def _decay_share(plan: KernelPlan, rows: list[str], columns: list[str]) -> str:
    """What token t adds to dG. Rows gain by later decays, columns lose by their own."""
    return " + ".join(f"{r}s[t] * d_{r}s[t]" for r in rows) + "".join(f" - {c}s[t] * d_{c}s[t]" for c in columns)


def _key_gradients(plan: KernelPlan, sweeps: Sweeps) -> list[str]:
    """From the operands of one row to the inputs, on the key axis and, in this block of it, beside it."""
    lines = sweeps.sweeps[0].loop
    starting = [d for d in scalar_inputs(plan) if isinstance(d, TokenInput) and d.name in _touched(lines)]
    summed = [f"d_{s.name} = tl.zeros((BLOCKS,), tl.float32)" for s in plan.sums if s.name in _touched(lines)]
    stores = [store_input(i) for i in key_inputs(plan)]
    return lines_of([*summed, *begun([*key_inputs(plan), *starting], lines, "BLOCKS"), *stores])


def _collected(plan: KernelPlan, parts: list[str], lines: list[str]) -> tuple[list[Collected], list[str]]:
    """Gradients of parameters, and the lines of one row that add to them: a program sums over its tokens once."""
    gradients = []
    for p in plan.spec.params:
        if p in key_params(plan) or p.name in parts:
            gradient, lines = collected(p, lines)
            gradients.append(gradient)
    return gradients, lines


def _touched(lines: list[str]) -> set[str]:
    return set(re.findall(r"\bd_(\w+) [+-]?= ", "\n".join(lines)))


def _parts(plan: KernelPlan, sweeps: Sweeps) -> list[str]:
    """What every block of the key axis has a part in: sums over keys, and inputs of one number."""
    touched = _touched(sweeps.sweeps[0].loop)
    return [name for name in [*(d.name for d in scalar_inputs(plan)), *(s.name for s in plan.sums)] if name in touched]


def _row_parts(plan: KernelPlan, parts: list[str]) -> Iterator[str]:
    place = f"parts_ptr + tl.program_id(0).to(tl.int64) * ({len(parts)} * C)"
    for number, name in enumerate(parts):
        if not _per_head(plan, name):
            yield f"tl.store({place} + {number} * C + rows, d_{name})"


def _block_parts(plan: KernelPlan, parts: list[str], gradients: list[Collected]) -> Iterator[str]:
    place = f"parts_ptr + tl.program_id(0).to(tl.int64) * ({len(parts)} * C)"
    for gradient in gradients:
        p = gradient.param
        if p.axis:
            yield f"if d_{p.name}_ptr is not None:\n    {store_param(p, gradient.whole)}"
        else:
            yield from where_read(plan, p, f"tl.store({place} + {parts.index(p.name)} * C, {gradient.whole})")


def _per_head(plan: KernelPlan, name: str) -> bool:
    return name in {p.name for p in plan.spec.params}


def _add_part(plan: KernelPlan, number: int, name: str) -> list[str]:
    """What `finish_kernel` adds of one block of the key axis; of a parameter that nothing reads there is none."""
    part = f"part + {number} * C"
    if name in (params := {p.name: p for p in plan.spec.params}):
        return where_read(plan, params[name], f"d_{name} += tl.load({part})")
    return [f"d_{name} += tl.load({part} + rows)"]


def _finish(plan: KernelPlan, sweeps: Sweeps, parts: list[str]) -> dict[str, Value]:
    """The kernel that adds up the blocks of the key axis, and sees to what needed all of it."""
    later = later_sweeps(sweeps)
    shared = summed_over_values(plan)
    early = [*load_scalars(plan), *start_sums(plan)]
    for d in scalar_inputs(plan):
        early += resumed(d) if d in shared else [start_gradient(d)]
    added = [line for number, name in enumerate(parts) for line in _add_part(plan, number, name)]
    body = [*early, *added, *lines_of(sweeps.sweeps[0].scalars)]
    for sweep in later:
        loop = [f"        {line}" for line in strings(sweep["loop"])]
        body += [str(sweep["condition"]), "    for key_start in range(0, KP, BK):", *loop]
        body += [f"    {line}" for line in strings(sweep["scalars"])]
    kept = live([*body, *store_scalars(plan)])
    return {
        "early": early,
        "parts": added,
        "scalars": sweeps.sweeps[0].scalars,
        "sweeps": later,
        "stores": store_scalars(plan),
        "used": used_arguments(plan, kept),
        "sums": [name for name in ("sums", "d_sums") if f"{name}_ptr" in " ".join(kept)],
    }
