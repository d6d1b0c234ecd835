"""All Triton files of one op: the plan laid out by the kernel templates."""

from __future__ import annotations

from collections.abc import Mapping

from kcpgen.emit import gluon_gradients
from kcpgen.emit.arguments import value_input
from kcpgen.emit.gluon_far_gradients import emit_far_gradients_hopper, in_flight
from kcpgen.emit.gluon_serial import emit_reverse_hopper, emit_scan_hopper, emit_summary_hopper
from kcpgen.emit.gluon_upright import upright
from kcpgen.emit.gluon_value_axis import on_both_axes
from kcpgen.emit.render import Value, render
from kcpgen.emit.roles import in_roles
from kcpgen.emit.scores_in_scan import scores_in_scan
from kcpgen.emit.solve_in_scan import solves_in_scan
from kcpgen.emit.triton_far_gradients import emit_far_gradients
from kcpgen.emit.triton_forgetting import emit_forgetting, forgets
from kcpgen.emit.triton_gradients import emit_gradients
from kcpgen.emit.triton_near_gradients import emit_near_gradients
from kcpgen.emit.triton_operands import scalar_inputs
from kcpgen.emit.triton_prepare import emit_prepare
from kcpgen.emit.triton_scan import emit_reverse, emit_scan, emit_states
from kcpgen.emit.triton_score_gradients import emit_score_gradients
from kcpgen.emit.triton_summary import emit_summary
from kcpgen.plan import KernelPlan
from kcpgen.spec import Bounds, Option, Spec


def emit_triton(plan: KernelPlan) -> dict[str, str]:
    """File name -> unformatted source of the kernels and their autograd function."""
    shared = _shared(plan)
    forward = {name: value for name, value in shared.items() if name != "backward_keywords"}
    return {
        **emit_prepare(plan, forward),
        "scan.py": emit_scan(plan),
        "states.py": emit_states(plan),
        "reverse.py": emit_reverse(plan),
        **_serial_in_roles(plan),
        "score_gradients.py": emit_score_gradients(plan, shared),
        **_key_axis(plan, shared),
        **({"summary.py": emit_summary(plan)} if plan.form.transition == "dense" else {}),
        **({"forgetting.py": emit_forgetting(plan, shared)} if forgets(plan) else {}),
        "autograd.py": _emit_autograd(plan),
    }


def _serial_in_roles(plan: KernelPlan) -> dict[str, str]:
    if not in_roles(plan):
        return {}
    dense = {"summary_hopper.py": emit_summary_hopper(plan)} if plan.form.transition == "dense" else {}
    return {"scan_hopper.py": emit_scan_hopper(plan), "reverse_hopper.py": emit_reverse_hopper(plan), **dense}


def _key_axis(plan: KernelPlan, shared: Mapping[str, Value]) -> dict[str, str]:
    """The backward's kernels on the key axis: a decay per channel keeps near pairs of tokens apart from far ones."""
    if not plan.decay_axis:
        return emit_gradients(plan, shared)
    return {
        "far_gradients.py": emit_far_gradients(plan, shared),
        **({"far_gradients_hopper.py": emit_far_gradients_hopper(plan, shared)} if in_flight(plan) else {}),
        "gradients.py": emit_near_gradients(plan, shared),
    }


def _launches(plan: KernelPlan) -> str:
    """How many kernels the backward launches, where states were kept."""
    finishes = bool(scalar_inputs(plan) or plan.sums)
    return {3: "three", 4: "four", 5: "five"}[3 + bool(plan.decay_axis) + (bool(plan.decay_axis) and finishes)]


def _modes(plan: KernelPlan) -> list[str]:
    return [f"{o.name}_mode" for o in plan.spec.options]


def _shared(plan: KernelPlan) -> dict[str, Value]:
    spec = plan.spec
    keywords = [
        *(f"{c.name}: float | None" for c in spec.constants),
        "scale: float",
        *(f"{mode}: int" for mode in _modes(plan)),
    ]
    return {
        "title": spec.title,
        "arguments": [f"{d.name}: torch.Tensor" for d in spec.inputs]
        + [f"{p.name}: torch.Tensor | None" for p in spec.params],
        "keywords": [*keywords, *(["bounded: bool"] if plan.decay_axis else [])],
        "backward_keywords": keywords,
        "sizes": _sizes(plan),
        "value_input": value_input(spec).name,
    }


def _sizes(plan: KernelPlan) -> list[str]:
    """Host code that reads H, HV, K and V off the inputs; where no input is on the shared heads, H is HV."""
    keys, values = _key_input(plan), value_input(plan.spec).name
    grouped = [i.name for i in plan.spec.inputs if i.heads == "H"]
    heads = keys if keys in grouped else [*grouped, values][0]
    both = f"{keys}.shape[2:]" if heads == keys else f"{heads}.shape[2], {keys}.shape[3]"
    return [f"H, K = {both}", f"HV, V = {values}.shape[2:]"]


def _key_input(plan: KernelPlan) -> str:
    return plan.inputs_on("K")[0].name


def _emit_autograd(plan: KernelPlan) -> str:
    spec = plan.spec
    plain = [*(c.name for c in spec.constants), "scale", *_modes(plan)]
    dense = plan.form.transition == "dense"
    return render(
        "autograd.py.jinja",
        title=plan.spec.title,
        op=spec.name,
        inputs=[i.name for i in spec.inputs],
        params=[p.name for p in spec.params],
        forwarded=[f'"{name}": {name}' for name in plain],
        promises=['"bounded": bounded'] if plan.decay_axis else [],
        launches=_launches(plan),
        keywords=[
            *(p.name for p in spec.params),
            *(c.name for c in spec.constants),
            *(o.name for o in spec.options),
            *spec.flags,
        ],
        modes=[*(line for option in spec.options for line in _mode_lines(spec, option)), *_promise_lines(plan)],
        form=_form(plan),
        key_index=spec.inputs.index(plan.inputs_on("K")[0]),
        value_index=spec.inputs.index(value_input(spec)),
        transition=plan.form.transition,
        transitions="transitions" if dense else "None",
        gradients_in_one=int(gluon_gradients.in_flight(plan) and on_both_axes(plan)),
        scores_in_scan=int(scores_in_scan(plan)),
        solves_in_scan=int(solves_in_scan(plan)),
        upright=int(upright(plan)),
        summary_import=["from .summary import transitions"] if dense else [],
        forgetting="forgetting" if forgets(plan) else "None",
        forgetting_import=["from .forgetting import forgetting"] if forgets(plan) else [],
    )


def _form(plan: KernelPlan) -> str:
    """Arguments of `Form`: what the choice of tiles depends on."""
    decay = "none" if plan.decay_axis is None else "vector" if plan.decay_axis else "scalar"
    whole = ", whole_value_axis=True" if plan.whole_value_axis else ""
    return f'decay="{decay}", terms={len(plan.terms)}, erases={len(plan.erasing)}{whole}'


def _mode_lines(spec: Spec, option: Option) -> list[str]:
    """Host code that picks an option's variant: the last one whose condition is given."""
    name = option.name
    lines = [f"{name}_mode = 1 if {name} else 0"]
    for mode, variant in enumerate(option.variants, start=1):
        if variant.when:
            given = variant.when if variant.when in spec.flags else f"{variant.when} is not None"
            lines += [f"if {name} and {given}:", f"    {name}_mode = {mode}"]
    return lines


def _promise_lines(plan: KernelPlan) -> list[str]:
    """Host code for `bounded`: what the active variant, or the input itself, promises about the decay per token."""
    if not plan.decay_axis:
        return []
    declared = {i.name: i.bounds for i in plan.spec.inputs}
    names = [s.name for s in plan.decay_log.free_symbols] if plan.decay_log.is_Symbol else []
    name = names[0] if names else ""
    given = _low(declared.get(name))
    lines = [f"promise = {given}"]
    for option in plan.spec.options:
        for mode, variant in enumerate(option.variants, start=1):
            for rewrite in variant.rewrites:
                if rewrite.target == name and _low(rewrite.bounds) != given:
                    lines += [f"if {option.name}_mode == {mode}:", f"    promise = {_low(rewrite.bounds)}"]
    nothing = lines == ["promise = None"]
    return ["bounded = False  # nothing is promised"] if nothing else [*lines, "bounded = within_block_range(promise)"]


def _low(bounds: Bounds | None) -> str:
    if bounds is None or (bounds.low == float("-inf") and not bounds.low_constant):
        return "None"
    return bounds.low_constant or repr(bounds.low)
