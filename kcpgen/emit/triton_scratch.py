"""What `prepare` leaves behind for the other kernels: fields, their shapes, and when they are there."""

from __future__ import annotations

from kcpgen.emit import scores_in_scan, solve_in_scan, triton_values
from kcpgen.plan import KernelPlan


def scratch(plan: KernelPlan) -> dict[str, tuple[str, str]]:
    """Name -> (shape, meaning) of everything `prepare` leaves behind, in kernel parameter order."""
    read, writes, meanings = vector_fields(plan)
    fields = {read: ("C, KP", meanings[0])}
    for j in plan.terms:
        fields[writes[j]] = ("C, KP", meanings[1])
        fields[f"A_{j}"] = ("C, C", "[NT, HV, C, C] read scores, s <= t")
    for p in plan.pure_writes:
        place = ", or an input" if f"U_{p}" in triton_values.scan_only(plan) else ""
        fields[f"U_{p}"] = ("C, VP", f"[NT, HV, C, VP] values that are written as they are{place}")
    for name in triton_values.value_fields(plan):
        meaning = "what rounding left of them" if name.endswith("_rest") else "raw values, without their strength"
        place = "" if triton_values.in_place(plan) == "False" else ", or an input"
        fields[name] = ("C, VP", f"[NT, HV, C, VP] {meaning}{place}")
    for name, (i, j) in triton_values.blocks(plan).items():
        fields[name] = ("C, C", f"[NT, HV, C, C] what corrected value {i} takes of earlier tokens' value {j}")
    for i in plan.erasing:
        fields[f"U_{i}"] = ("C, VP", "[NT, HV, C, VP] corrected values, once the scan has run")
        fields[f"W_{i}"] = ("C, KP", "[NT, HV, C, KP] what the solved erases read of the entering state")
        for e in plan.erasing:
            fields[f"T_{i}_{e}"] = ("C, C, dtype=torch.float32", "[NT, HV, C, C] fp32, block of (I - L)^-1")
        for p in plan.pure_writes:
            fields[f"L_{i}_{p}"] = ("C, C", "[NT, HV, C, C] erase scores against a pure write, s < t")
    if plan.decay_axis is not None:
        width = "KP, dtype=torch.float32" if plan.decay_axis else "dtype=torch.float32"
        fields["decay_out"] = (width, f"[NT, HV{', KP' if plan.decay_axis else ''}] fp32, decay over the whole chunk")
    for name in triton_values.strengths(plan):
        fields[name] = ("C, dtype=torch.float32", "[NT, HV, C] fp32, what scales a value as a whole")
    for name, start in row_decays(plan).values():
        fields[name] = ("C, dtype=torch.float32", f"[NT, HV, C] fp32, {start}")
    fields |= solve_in_scan.fields(plan) | scores_in_scan.fields(plan)
    if plan.sums:
        shape = f"{len(plan.sums)}, C"
        fields["sums"] = (f"{shape}, dtype=torch.float32", f"[NT, HV, {shape}] fp32, sums over keys")
    return fields


def vector_fields(plan: KernelPlan) -> tuple[str, list[str], tuple[str, str]]:
    """Fields of the read vectors and of each term's write vectors, and what the two kinds of them are."""
    if plan.decays_rows:
        place = "[NT, HV, C, KP]" + ("" if in_place(plan) == "False" else ", or an input [B, T, heads, K] in_place")
        return "read", [f"write_{j}" for j in plan.terms], (f"read vectors, {place}", f"write vectors, {place}")
    read = "[NT, HV, C, KP] read vectors, decayed from the chunk's start, scaled"
    write = "[NT, HV, C, KP] write vectors, decayed to the chunk's end"
    return "q_in", [f"w_out_{j}" for j in plan.terms], (read, write)


def row_decays(plan: KernelPlan) -> dict[str, tuple[str, str]]:
    """Of vectors left as they are: their letter -> the field with what scales each row, and what that is."""
    found = {}
    if plan.decays_rows and (plan.decay_axis == "" or plan.read.coefficient != 1):
        meaning = "of a read: decay from the chunk's start and scale"
        found["q_in"] = ("from_start", meaning if plan.decay_axis == "" else "scale of a read")
    if plan.decay_axis == "":
        found["w_out"] = ("to_end", "of a write: decay to the chunk's end")
    return found


def in_place(plan: KernelPlan) -> str:
    """Host code: whether the vectors that serial kernels want are inputs as they lie in memory."""
    bases = [plan.read.base, *plan.write]
    if not plan.decays_rows or not all(plan.loaded(base) for base in bases):
        return "False"
    options = dict.fromkeys(r.option for r in plan.rewrites if r.target in bases)
    conditions = [f"{option}_mode == 0" for option in options]
    inputs = ", ".join(dict.fromkeys(bases))
    return " and ".join([*conditions, f"readable_in_place(KP, scratch_dtype, {inputs})"])


def optional(plan: KernelPlan, name: str) -> str:
    """Host code: when a field is scratch, "" for always."""
    if solving := solve_in_scan.condition(plan, name):
        return solving
    if scoring := scores_in_scan.condition(plan, name):
        return scoring
    if plan.decays_rows and name.startswith(("read", "write")):
        return "not in_place"
    if name in triton_values.scan_only(plan):
        return "not values_in_place" if triton_values.in_place(plan) != "False" else ""
    solved_elsewhere = name.startswith("T_") and (len(plan.erasing) > 1 or name == solved_in_passing(plan))
    corrected = name in [f"U_{e}" for e in plan.erasing]
    for_backward = solved_elsewhere or corrected or name.startswith("L_") or name == "sums"
    return "differentiable" if for_backward else ""


def let_go(plan: KernelPlan) -> list[str]:
    """What only the forward's scan reads."""
    made = [*triton_values.value_fields(plan), *triton_values.blocks(plan), *triton_values.strengths(plan)]
    return [*made, *scores_in_scan.fields(plan)]


def field_type(plan: KernelPlan, name: str) -> str:
    missing = optional(plan, name) not in ("", "not in_place", "not values_in_place") or name in let_go(plan)
    return "torch.Tensor | None" if missing else "torch.Tensor"


def allocation(plan: KernelPlan, name: str, shape: str) -> str:
    condition = optional(plan, name)
    if condition == "not values_in_place":
        return f"{triton_values.input_of(plan, name)} if values_in_place else scratch({shape})"
    if condition != "not in_place":
        return f"scratch({shape})" + (f" if {condition} else None" if condition else "")
    if in_place(plan) == "False":
        return f"scratch({shape})"
    base = plan.read.base if name == "read" else plan.write[int(name.removeprefix("write_"))]
    return f"{base} if in_place else scratch({shape})"


def solved_in_passing(plan: KernelPlan) -> str:
    """The field of (I - L)^-1 that only a backward reads and that may be worked out in shared memory; "" if none is."""
    alone = len(plan.terms) == len(plan.erasing) == 1
    return f"T_{plan.erasing[0]}_{plan.erasing[0]}" if alone else ""


def room_to_solve(plan: KernelPlan) -> str:
    """Host code: memory to work it out in elsewhere, which is that of W where nothing lies there meanwhile."""
    if not solved_in_passing(plan):
        return ""
    apart = "scratch(C, C, dtype=torch.float32)"
    return f"room_within(prepared.W_{plan.erasing[0]}, C, C)" if plan.decays_rows else apart


def waiting_rests(plan: KernelPlan) -> list[str]:
    """Of erase vectors that wait for the solve: what rounding left of them, where it would be a gradient's noise."""
    return [f"a_in_{e}_rest" for e in plan.erasing if plan.erases_apart and not plan.decays_rows]


def passed(plan: KernelPlan, name: str) -> str:
    condition = optional(plan, name)
    given = f"prepared.{name}"
    if condition == "not values_in_place":
        return f"None if values_in_place else {given}"
    return f"None if in_place else {given}" if condition == "not in_place" and in_place(plan) != "False" else given


def field_of(plan: KernelPlan, vector: str) -> str:
    """The field that holds a vector of the derivation: q_in, w_out_j, W_i or V_j."""
    read, writes, _ = vector_fields(plan)
    values = {f"V_{p}": f"U_{p}" for p in plan.pure_writes}
    return {"q_in": read, **{f"w_out_{j}": writes[j] for j in plan.terms}, **values}.get(vector, vector)
