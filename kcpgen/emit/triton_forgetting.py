"""`forgetting.py`: a bound on what tokens leave of a state, from gates and erases with their options applied.

A product of matrices is at most the product of their norms. A token's is its decay, the greatest one of its channels,
times that of I plus one term that erases, which has a closed form. Where nothing erases, channels stay apart, and what
is left of each is known exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcpgen.emit.gluon_upright import upright
from kcpgen.emit.render import Value, render
from kcpgen.emit.tidy import live
from kcpgen.emit.triton_imports import device_functions
from kcpgen.emit.triton_prologue import (
    apply_rewrites,
    base_variable,
    form_bases,
    load_inputs,
    load_params,
    log_decay,
    printer,
    used_arguments,
)
from kcpgen.emit.triton_sums import before_keys
from kcpgen.plan import KernelPlan, Row

BOUNDS = ("chunks_until", "erase_across", "erase_along", "largest", "log2_of_decay", "looks_on", "summed_on")


def forgets(plan: KernelPlan) -> bool:
    """Whether gates bound what is left: of at most one erase, after the decay or of a token that decays as a whole."""
    if plan.decay_axis is None or len(plan.erasing) > 1:
        return False
    return not (plan.decay_axis and plan.exclusive)


def halves(plan: KernelPlan) -> bool:
    """Whether serial kernels can be launched for heads that forget, or for the others (`kcpgen.runtime.halves`): where
    a head has as many programs whole, of 32 columns, as in halves."""
    return forgets(plan) and upright(plan)


def emit_forgetting(plan: KernelPlan, shared: Mapping[str, Value]) -> str:
    by_channel = bool(plan.decay_axis) and not plan.erasing
    body = live(
        ["live = rows < count", *before_keys(plan, kept=False), *_keys(plan), *_bound(plan), "tl.store(token_bounds)"]
    )[:-1]
    used = used_arguments(plan, body)
    body += _summed(by_channel)
    called = ["looks_on()", "chunks_until()", *body]
    return render(
        "forgetting.py.jinja",
        title=shared["title"],
        arguments=shared["arguments"],
        keywords=shared["backward_keywords"],
        sizes=shared["sizes"],
        bound=_in_words(plan),
        by_channel=int(by_channel),
        halves=int(halves(plan)),
        body=body,
        bounds=[name for name in BOUNDS if any(f"{name}(" in line for line in called)],
        device_functions=device_functions(body),
        **used,
    )


def _summed(by_channel: bool) -> list[str]:
    """`norm_bound` of all tokens looked at so far, and `bounds`, what it was up to each of these."""
    if not by_channel:
        return [
            "bounds = norm_bound + summed_on(token_bounds, FROM_THE_START)",
            "norm_bound += tl.sum(token_bounds, axis=0)",
        ]
    return [
        "so_far = channel_bounds[None, :] + summed_on(token_bounds, FROM_THE_START)",
        "bounds = largest(so_far, (lanes < K)[None, :], 1)",
        "channel_bounds += tl.sum(token_bounds, axis=0)",
        "norm_bound = largest(channel_bounds, lanes < K, 0)",
    ]


def _in_words(plan: KernelPlan) -> str:
    if not plan.erasing:
        return "log2 decay" + (", summed over tokens, of the channel that decays least" if plan.decay_axis else "")
    (row,) = plan.erase.values()
    if row.exclusive:
        return "log2 |decay I + w e^T|"
    decay = "the greatest log2 decay of a channel" if plan.decay_axis else "log2 decay"
    return f"{decay} + log2 |I {'- c w w^T' if _along(plan, row) else '+ w e^T'}|"


def _along(plan: KernelPlan, row: Row) -> bool:
    """Whether a term erases along the vector that it writes, whatever the numbers are."""
    (term,) = plan.erasing
    return row.base == plan.write[term]


def _keys(plan: KernelPlan) -> list[str]:
    """All keys at once: inputs with options applied, and what the plan makes of them."""
    inputs = plan.inputs_on("K")
    return [
        "keys = lanes",
        "inside = live[:, None] & (keys < K)[None, :]",
        *load_inputs(plan, inputs),
        *load_params(plan, [p for p in plan.spec.params if p.axis == "K"]),
        *apply_rewrites(plan, [i.name for i in inputs], backward=False),
        log_decay(plan, "log2_of_decay"),
        *form_bases(plan),
    ]


def _bound(plan: KernelPlan) -> list[str]:
    """`token_bounds`: of each token, per channel where these stay apart."""
    if not plan.erasing:
        return ["token_bounds = log_decay"]
    (row,) = plan.erase.values()
    decay = "largest(log_decay, (keys < K)[None, :], 1)" if plan.decay_axis else "log_decay"
    return [*_erase(plan, row), f"token_bounds = {'' if row.exclusive else f'{decay} + '}erase_bound"]


def _erase(plan: KernelPlan, row: Row) -> list[str]:
    (term,) = plan.erasing
    code = printer(plan)
    written, erased = base_variable(plan, plan.write[term]), base_variable(plan, row.base)
    square = f"tl.sum({written} * {written}, axis=1)"
    if _along(plan, row) and not row.exclusive:
        factor = "" if row.coefficient == -1 else f"{code.atom(-row.coefficient, '')} * "
        return [f"erase_bound = erase_along({factor}{square})"]
    lines = [
        f"erase_squares = {square} * tl.sum({erased} * {erased}, axis=1)",
        f"erase_inner = tl.sum({written} * {erased}, axis=1)",
    ]
    if row.coefficient != 1:
        factor = code.atom(row.coefficient, "")
        lines += [f"erase_squares *= {factor} * {factor}", f"erase_inner *= {factor}"]
    decay = "tl.exp2(log_decay)" if row.exclusive else "1.0"
    return [*lines, f"erase_bound = erase_across({decay}, erase_squares, erase_inner)"]
