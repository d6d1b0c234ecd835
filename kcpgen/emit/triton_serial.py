"""What serial kernels load of a chunk: read and write vectors, W, and decays."""

from __future__ import annotations

from collections.abc import Collection

from kcpgen.emit.render import Value
from kcpgen.emit.triton_scratch import field_of, row_decays, vector_fields
from kcpgen.plan import KernelPlan


def loads(
    plan: KernelPlan, vectors: Collection[str], width: str, by_themselves: Collection[str] = ()
) -> dict[str, Value]:
    """Template context for loads of vectors, given as letters of the derivation, q_in, w_out_j and W_i.

    width: host code for the padded key width. by_themselves: those of which rows behind a sequence's end may be another
    sequence's, since nobody reads what comes of them.
    """
    fields = [field_of(plan, name) for name in vectors]
    whole_tiles = {field_of(plan, name) for name in by_themselves}
    by_rows = plan.decays_rows and any(is_vector(plan, name) for name in fields)
    scales = [name for vector, (name, _) in row_decays(plan).items() if any(v.startswith(vector) for v in vectors)]
    whole = [] if plan.decay_axis is None else ["decay_out"]
    offset = " * KP + keys" if plan.decay_axis else ""
    dense = not by_rows or any(not is_vector(plan, name) for name in fields)
    return {
        "by_rows": int(by_rows),
        "descriptors": [*(["tile_descriptor"] if dense else []), *(["vector_descriptor"] if by_rows else [])],
        "low": f"{fields[0]}_tile.dtype",
        "key_operands": fields,
        "key_loads": [f"{name}_tile = {_load(plan, name, name in whole_tiles)}" for name in fields],
        "key_tensors": [_descriptor(plan, name, width) for name in fields],
        "decays": [*whole, *scales],
        "decay_loads": [f"{d} = tl.load({d}_ptr + at{offset})" for d in whole]
        + [f"{name} = tl.load({name}_ptr + at * C + rows)" for name in scales],
    }


def is_vector(plan: KernelPlan, field: str) -> bool:
    """Whether a field may be an input itself."""
    read, writes, _ = vector_fields(plan)
    return plan.decays_rows and field in (read, *writes)


def _load(plan: KernelPlan, name: str, whole: bool) -> str:
    if not is_vector(plan, name):
        return f"{name}.load([at * C, 0])"
    head = "group" if shared(plan, name) else "head"
    place = f"batch, {head}, first + c * C, first_chunk + c, head, 0"
    return f"load_vectors({name}, {place}, {'C, IN_PLACE, True' if whole else 'tokens - c * C, IN_PLACE, APART'})"


def shared(plan: KernelPlan, name: str) -> bool:
    """Whether the input that a field may be has heads that value heads share."""
    base = plan.read.base if name == "read" else plan.write[int(name.removeprefix("write_"))]
    return any(i.name == base and i.heads == "H" for i in plan.spec.inputs)


def _descriptor(plan: KernelPlan, name: str, width: str) -> str:
    if is_vector(plan, name):
        return f"vector_descriptor(prepared.{name}, prepared.in_place, C, {width}),"
    return f"tile_descriptor(prepared.{name}, C, {width}),"
