"""What `prepare` must know before it walks the key axis: numbers per token and head, and sums over all keys.

The key axis is walked in blocks, and a sum over it is whole only after a walk of its own. Most ops need one such walk
or none; a sum of what another sum scales needs a second.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

import sympy

from kcpgen.emit.triton_prologue import apply_rewrites, load_inputs, load_params, masked, mode_name, printer
from kcpgen.plan import KernelPlan, PlannedSum
from kcpgen.tokenwise import names


def known_after(plan: KernelPlan) -> dict[str, int]:
    """Name -> walks that must be over before a sum, or an input with its options applied, is known; 0 is left out.

    An option finds its target as it was loaded, so the sums of an option wait for nothing but the sums inside them.
    """
    sums: dict[str, int] = {}
    targets: dict[str, int] = {}
    for index, rewrite in enumerate(plan.rewrites):
        for planned in plan.sums:
            if planned.rewrite == index:
                sums[planned.name] = 1 + _latest(sums, planned.value)
        targets[rewrite.target] = max(targets.get(rewrite.target, 0), _latest(sums, rewrite.value))
    for planned in plan.sums:
        if planned.rewrite is None:
            sums[planned.name] = 1 + _latest({**targets, **sums}, planned.value)
    return {**targets, **sums}


def _latest(known: Mapping[str, int], expr: sympy.Expr) -> int:
    return max((known.get(name, 0) for name in names(expr)), default=0)


def before_keys(plan: KernelPlan, *, kept: bool = True) -> Iterator[str]:
    """Scalars per token and head, and every sum over keys, each as soon as what it reads is known.

    kept: whether sums are stored for the backward.
    """
    known = known_after(plan)
    scalars = plan.inputs_on("")
    yield from load_inputs(plan, scalars)
    yield from load_params(plan, [p for p in plan.spec.params if not p.axis])
    for walk in range(1 + max(known.values(), default=0)):
        ready = [i.name for i in scalars if known.get(i.name, 0) == walk]
        yield from apply_rewrites(plan, ready, backward=False)
        yield from _walk(plan, [planned for planned in plan.sums if known[planned.name] == walk + 1], kept)


def _walk(plan: KernelPlan, sums: Sequence[PlannedSum], kept: bool) -> list[str]:
    """One walk over the key axis for all of `sums`, skipped when no option asks for any of them."""
    if not sums:
        return []
    guards = dict.fromkeys(_guard(plan, planned) for planned in sums)
    inner = guards if len(guards) > 1 else {"": None}
    loop = _loads(plan, sums)
    for guard in sorted(inner, key=lambda guard: not guard):  # options find inputs as loaded, operands as rewritten
        chosen = [planned for planned in sums if len(guards) == 1 or _guard(plan, planned) == guard]
        loop += _guarded(guard, _add(plan, chosen))
    head = ["keys = key_start + lanes", "inside = live[:, None] & (keys < K)[None, :]"]
    lines = [f"{planned.name} = tl.zeros((C,), tl.float32)" for planned in sums]
    lines += ["for key_start in range(0, KP, BK):", *_indented([*head, *loop])]
    for guard in inner if kept else ():
        chosen = [planned for planned in sums if len(guards) == 1 or _guard(plan, planned) == guard]
        stores = _indented(_store(plan, planned) for planned in chosen)
        lines += _guarded(guard, ["if sums_ptr is not None:  # for the backward", *stores])
    return _guarded("" if len(guards) > 1 else next(iter(guards)), lines)


def _loads(plan: KernelPlan, sums: Iterable[PlannedSum]) -> list[str]:
    read = _read(sums)
    of_operands = _read(planned for planned in sums if planned.rewrite is None)
    by_options = {name for r in plan.rewrites if r.target in of_operands for name in names(r.value)}
    inputs = [i for i in plan.inputs_on("K") if i.name in read]
    params = [p for p in plan.spec.params if p.axis == "K" and p.name in read | by_options]
    return [*load_inputs(plan, inputs), *load_params(plan, params)]


def _read(sums: Iterable[PlannedSum]) -> set[str]:
    return {name for planned in sums for name in names(planned.value)}


def _add(plan: KernelPlan, sums: Sequence[PlannedSum]) -> Iterator[str]:
    if sums[0].rewrite is None:
        yield from apply_rewrites(plan, [i.name for i in plan.inputs_on("K") if i.name in _read(sums)], backward=False)
    for planned in sums:
        code = masked(plan, planned.value, "K", printer(plan).code(planned.value, "K"), "(keys < K)[None, :]")
        yield f"{planned.name} += tl.sum({code}, axis=1)"


def _guard(plan: KernelPlan, planned: PlannedSum) -> str:
    if planned.rewrite is None:
        return ""
    rewrite = plan.rewrites[planned.rewrite]
    return f"{mode_name(rewrite.option)} == {rewrite.mode}"


def _guarded(guard: str, lines: Iterable[str]) -> list[str]:
    return [f"if {guard}:", *_indented(lines)] if guard else [*lines]


def _indented(lines: Iterable[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]


def _store(plan: KernelPlan, planned: PlannedSum) -> str:
    number = plan.sums.index(planned)
    return f"tl.store(sums_ptr + (at * {len(plan.sums)} + {number}) * C + rows, {planned.name})"
