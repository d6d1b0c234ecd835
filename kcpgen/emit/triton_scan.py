"""`scan.py` and `reverse.py`: the serial kernels, whose loop bodies are the derived block equations themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from kcpgen.derivation.chunk_form import Equation
from kcpgen.emit import solve_in_scan, triton_values
from kcpgen.emit.render import Value, render
from kcpgen.emit.roles import in_roles
from kcpgen.emit.triton_blocks import BlockPrinter, math
from kcpgen.emit.triton_forgetting import halves
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_scratch import field_of, row_decays
from kcpgen.emit.triton_serial import loads
from kcpgen.plan import KernelPlan


def emit_scan(plan: KernelPlan) -> str:
    equations = [e for e in plan.form.solved if e.target.name in ("O", "S_next")]
    values = triton_values.equations(plan)
    out = replace(
        _printer(plan, {"S", "U"}, {"S_next": "S"}), in_sum=frozenset({"value"} if triton_values.in_parts(plan) else ())
    )
    whole = _in_halves(out, "S") if plan.reads_state_alone else out
    raw = triton_values.scan_only(plan)
    values_loaded = [f"U_{p}" for p in plan.pure_writes if f"U_{p}" not in raw]
    operands = _operands(plan, value_operands=values_loaded, by_themselves=["q_in"])  # rows of the output
    if raw:
        operands["descriptors"] = ["tile_descriptor", "vector_descriptor"]
    body = {
        "written": _corrected(out, [values[p] for p in plan.pure_writes], "U"),
        "correct": _corrected(whole, [values[e] for e in plan.erasing], "U"),
        "output": _assigned(out, equations, "O"),
        "advance": _assigned(out, equations, "S_next"),
    }
    return render(
        "scan.py.jinja",
        **operands,
        **body,
        device_functions=_functions(operands, *body.values(), ["load_vectors("] if raw else []),
        equations=[math(e) for e in [*values.values(), *equations]],
        in_roles=int(in_roles(plan)),
        raw_values=raw,
        raw_loads=[f"{name}_tile = {_load_raw(name)}" for name in raw],
        raw_tensors=[f"vector_descriptor(prepared.{name}, prepared.values_in_place, C, block)," for name in raw],
        blocks=list(triton_values.blocks(plan)),
        strengths=list(triton_values.strengths(plan)),
        corrected=[f"U_{i}" for i in plan.erasing],
        halves=int(halves(plan)),
    )


def emit_states(plan: KernelPlan) -> str:
    (advance,) = (e for e in plan.form.solved if e.target.name == "S_next")
    out = _printer(plan, {"S"}, {"S_next": "S"})
    named = replace(
        out,
        low=f"{field_of(plan, 'w_out_0')}_tile.dtype",
    )
    written = [f"w_out_{j}" for j in plan.terms]  # the state that leaves a sequence entered none of its chunks
    operands = _operands(
        plan,
        value_operands=[f"U_{j}" for j in plan.terms],
        by_themselves=written,
        reads=False,
        erases=False,
    )
    del operands["score_operands"]
    line = named.assign(advance)
    return render(
        "states.py.jinja",
        **operands,
        device_functions=_functions(operands, [line]),
        next=math(advance).partition(" = ")[2],
        advance=line,
    )


def emit_reverse(plan: KernelPlan) -> str:
    equations = plan.form.reverse_scan
    out = _printer(plan, {"dS_next", "dU"}, {"dS": "dS_next"})
    operands = _operands(plan, value_operands=[])
    del operands["value_operands"]
    body = {
        "correct": _corrected(_in_halves(out, "dS_next"), equations, "dU"),
        "advance": _assigned(out, equations, "dS"),
    }
    left_behind = str(len(plan.terms) + len(plan.erasing))
    if solves := solve_in_scan.handed_back(plan):  # in roles, and the whole of it in one part
        left_behind = f"{left_behind} if prepared.inverse_{plan.terms[0]} is None else {len(solves)}"
    return render(
        "reverse.py.jinja",
        **operands,
        **body,
        device_functions=_functions(operands, *body.values()),
        equations=[math(e) for e in equations],
        in_roles=int(in_roles(plan)),
        gradients=[f"dU_{j}" for j in plan.terms],
        solved=[f"dU_{e}" for e in plan.erasing],
        solves=int(bool(solves)),
        left_behind=left_behind,
        left_behind_alone=f"({left_behind})" if solves else left_behind,
        halves=int(halves(plan)),
    )


def _load_raw(name: str) -> str:
    place = "batch, head, first + c * C, first_chunk + c, head, block"
    return f"load_vectors({name}, {place}, tokens - c * C, VALUES_IN_PLACE, APART)"


def _printer(plan: KernelPlan, accumulators: set[str], rename: dict[str, str]) -> BlockPrinter:
    vectors = {name: field_of(plan, name) for name in ["q_in", *(f"w_out_{j}" for j in plan.terms)]}
    values = {f"V_{p}": f"U_{p}" for p in plan.pure_writes}
    return BlockPrinter(
        accumulators=frozenset({*accumulators, *rename.values(), *rename}),
        rename={**vectors, **values, **rename},
        tile_suffix="_tile",
        transposed=True,
        decay="" if plan.decay_axis is None else "decay_out",
        decay_axis=plan.decay_axis or "",
        row_decays={vector: name for vector, (name, _) in row_decays(plan).items()},
        low=f"{vectors['q_in']}_tile.dtype",
    )


def _operands(
    plan: KernelPlan,
    value_operands: list[str],
    *,
    by_themselves: Collection[str] = (),
    reads: bool = True,
    erases: bool = True,
) -> dict[str, Value]:
    read, erased = ["q_in"] if reads else [], [f"W_{i}" for i in plan.erasing] if erases else []
    vectors = [*read, *(f"w_out_{j}" for j in plan.terms), *erased]
    scores = [f"A_{j}" for j in plan.terms] if reads else []
    loaded = loads(plan, vectors, "prepared.key_width", by_themselves)
    if value_operands or scores:
        loaded["descriptors"] = ["tile_descriptor", *(["vector_descriptor"] if loaded["by_rows"] else [])]
    fields = loaded.pop("key_operands")
    assert isinstance(fields, list)
    return {
        "title": plan.spec.title,
        "operands": [*fields, *value_operands, *scores],
        "value_operands": value_operands,
        "score_operands": scores,
        **loaded,
    }


def _functions(operands: Mapping[str, Value], *bodies: Sequence[str]) -> list[str]:
    vectors = ["load_vectors("] if operands["by_rows"] else []
    return device_functions([*vectors, *(line for body in bodies for line in body)])


def _in_halves(out: BlockPrinter, state: str) -> BlockPrinter:
    return replace(out, kept_whole=frozenset({state}))


def _corrected(out: BlockPrinter, equations: Sequence[Equation], target: str) -> list[str]:
    return [line for e in equations if e.target.name == target for line in out.corrected(e, out.low)]


def _assigned(out: BlockPrinter, equations: Sequence[Equation], target: str) -> list[str]:
    return [out.assign(e) for e in equations if e.target.name == target]
