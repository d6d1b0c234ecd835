"""The states that enter ranks, watched where they are put together, and the same states on one device.

`o` and gradients are rounded to the dtype of the inputs; these states are fp32 and show what merging alone costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel import passes
from kcpgen.runtime.context_parallel.merge import merge_elementwise
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import relative_rms
from kcpgen.verify.inputs import Inputs
from kcpgen.verify.op import Op


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A state [HV, K, V] that a rank was given, or (`backward`) the gradient of one that left it.

    from_fold: its distance to the float64 fold of the very summaries that were gathered.
    """

    rank: int
    backward: bool
    kind: str
    state: Tensor
    from_fold: float


@dataclass(frozen=True, kw_only=True)
class Entering:
    """Worst over ranks, relative. from_one: to one device's own fp32 states at the cuts; forward, backward."""

    kind: str
    from_fold: float
    from_one: tuple[float, float]


@contextmanager
def observed_merges() -> Iterator[list[Merged]]:
    """What is merged inside, in the order in which it is."""
    seen: list[Merged] = []
    merge = passes._merge

    def observed(op: Any, cp: Any, form: Any, gathered: Tensor, transitions: Any, *, backward: bool) -> Tensor:
        merged = merge(op, cp, form, gathered, transitions, backward=backward)
        twice: Any = SimpleNamespace(kind=op.kind, merge=_in_float64)
        exact = merge(twice, cp, form, gathered, transitions, backward=backward)
        from_fold = relative_rms(merged, exact)
        seen.append(Merged(rank=cp.rank, backward=backward, kind=op.kind, state=merged.clone(), from_fold=from_fold))
        return merged

    with mock.patch.object(passes, "_merge", observed):
        yield seen


def _in_float64(states: Tensor, transitions: Tensor | None, **how: Any) -> Tensor:
    return merge_elementwise(states.double(), None if transitions is None else transitions.double(), **how)


def entering(op: Op, case: Case, inputs: Inputs, bounds: tuple[int, ...], merged: list[Merged]) -> Entering | None:
    """Merged states beside those of one device, where every cut lies on a chunk border. None: nothing crosses a cut."""
    if not merged:
        return None
    distances: dict[bool, list[float]] = {False: [], True: []}
    states: dict[int, tuple[Tensor, Tensor]] = {}
    for m in merged:
        cut = bounds[m.rank + 1] if m.backward else bounds[m.rank]
        if cut not in states:
            states[cut] = at_cut(op, case, inputs, cut)
        state = states[cut][m.backward]
        distances[m.backward].append(relative_rms(m.state, state[0].double()))
    return Entering(
        kind=merged[0].kind,
        from_fold=max(m.from_fold for m in merged),
        from_one=(max(distances[False], default=0.0), max(distances[True], default=0.0)),
    )


def at_cut(op: Op, case: Case, inputs: Inputs, cut: int) -> tuple[Tensor, Tensor]:
    """[1, HV, K, V] each, on one device: the state between tokens `cut - 1` and `cut`, and its gradient."""
    n, (begin, end) = next((n, s) for n, s in enumerate(pairwise(case.offsets)) if s[0] < cut < s[1])
    initial = None if inputs.initial_state is None else inputs.initial_state[n : n + 1].detach()
    with torch.no_grad():
        state = _part(op, case, inputs, slice(begin, cut), initial)[1]
    state = state.detach().requires_grad_()
    span = slice(cut, end)
    o, final = _part(op, case, inputs, span, state)
    roots = [] if inputs.d_output is None else [(o, inputs.d_output[:, span])]
    roots += [] if inputs.d_state is None else [(final, inputs.d_state[n : n + 1])]
    (gradient,) = torch.autograd.grad([y for y, _ in roots], [state], [dy for _, dy in roots])
    return state.detach(), gradient


def _part(op: Op, case: Case, inputs: Inputs, span: slice, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    o, final = op.chunk(
        **{name: x.detach()[:, span] for name, x in inputs.tokens.items()},
        **{name: x.detach() for name, x in inputs.params.items()},
        **inputs.keywords,
        initial_state=initial,
        output_final_state=True,
        backend=case.backend,
    )
    assert final is not None
    return o, final
