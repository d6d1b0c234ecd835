"""The states that enter a rank: what the ranks before it summarised, put together in order.

    S <- M_j S + S_ext_j       from the first rank of the chain on; backward with M_j^T, from the last rank on

The first summary of a chain starts from a state of its own, so n summaries need n - 1 transitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel.payload import Kind

Method = Literal["fold", "scan"]
# (transitions [n, HV, ..], X [n, HV, K, m], added [n, HV, K, m] or None) -> transition X + added
Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
Merge = Callable[..., Tensor]


def merge_in_torch(
    states: Tensor, transitions: Tensor | None, *, kind: Kind, backward: bool, method: Method = "fold"
) -> Tensor:
    """[HV, K, V] from summaries [n, HV, K, V] and transitions [n - 1, HV, ...], both in the order of the ranks.

    Forward, transition j belongs to summary j + 1; backward, to summary j. `transitions` may be None for n = 1 and
    for the identity. Computes in float64: torch's float32 products are tf32 where a user allowed that.
    """
    exact = None if transitions is None else transitions.double()
    merged = merge_elementwise(states.double(), exact, kind=kind, backward=backward, method=method)
    return merged.to(states.dtype)


def merge_elementwise(
    states: Tensor, transitions: Tensor | None, *, kind: Kind, backward: bool, method: Method
) -> Tensor:
    """The merge in the dtype of the summaries, by torch's own products: for dense transitions in float64 only."""
    combine = scan if method == "scan" else fold
    return combine(*in_order(states, transitions, kind=kind, backward=backward), _PRODUCTS[kind])


def in_order(states: Tensor, transitions: Tensor | None, *, kind: Kind, backward: bool) -> tuple[Tensor, Tensor | None]:
    """Summaries and transitions in the order in which they are applied, transition j to what summary j started."""
    if not backward or len(states) == 1:
        return states, transitions
    if transitions is None:
        return states.flip(0), None
    turned = transitions.flip(0)
    return states.flip(0), turned.mT if kind == "dense" else turned


def fold(states: Tensor, transitions: Tensor | None, product: Product) -> Tensor:
    """One step a rank."""
    state = states[:1]
    for j in range(1, len(states)):
        state = product(_slice(transitions, j - 1, j), state, states[j : j + 1])
    return state[0]


def scan(states: Tensor, transitions: Tensor | None, product: Product) -> Tensor:
    """log2(n) steps, each of which joins neighbours: (M_b, S_b) after (M_a, S_a) is (M_b M_a, M_b S_a + S_b)."""
    while len(states) > 1:
        pairs, odd = divmod(len(states), 2)
        later = _slice(transitions, 0, 2 * pairs - 1, 2)
        joined = product(later, states[0 : 2 * pairs : 2], states[1 : 2 * pairs : 2])
        chained = _joined_transitions(transitions, pairs, product)
        states = torch.cat([joined, states[-1:]]) if odd else joined
        if transitions is not None:
            transitions = torch.cat([chained, transitions[-1:]]) if odd else chained
    return states[0]


def _joined_transitions(transitions: Tensor | None, pairs: int, product: Product) -> Tensor:
    """Transitions of the joined elements but the first, whose state needs none: M[2 p] M[2 p - 1]."""
    if transitions is None or pairs == 1:
        return torch.empty(0) if transitions is None else transitions[:0]
    later, earlier = transitions[2 : 2 * pairs - 1 : 2], transitions[1 : 2 * pairs - 2 : 2]
    return product(later, earlier, None)


def compose(transitions: Tensor, product: Product) -> Tensor:
    """[HV, K, K]: all of [n, HV, K, K] one after the other, M[n - 1] ... M[0], in log2(n) steps."""
    while len(transitions) > 1:
        pairs, odd = divmod(len(transitions), 2)
        joined = product(transitions[1 : 2 * pairs : 2], transitions[0 : 2 * pairs : 2], None)
        transitions = torch.cat([joined, transitions[-1:]]) if odd else joined
    return transitions[0]


def _dense(transitions: Tensor, x: Tensor, added: Tensor | None) -> Tensor:
    product = transitions @ x
    return product if added is None else product + added


def _diagonal(transitions: Tensor, x: Tensor, added: Tensor | None) -> Tensor:
    """Of a state [n, HV, K, V], or of another diagonal [n, HV, K]."""
    return transitions * x if added is None else transitions[..., None] * x + added


def _scalar(transitions: Tensor, x: Tensor, added: Tensor | None) -> Tensor:
    return transitions * x if added is None else transitions[..., None, None] * x + added


def _identity(transitions: Tensor | None, x: Tensor, added: Tensor | None) -> Tensor:
    return x if added is None else x + added


_PRODUCTS: dict[Kind, Product] = {
    "dense": _dense,
    "diagonal": _diagonal,
    "scalar": _scalar,
    "identity": _identity,
}


def _slice(x: Tensor | None, start: int, stop: int, step: int = 1) -> Tensor:
    return torch.empty(0) if x is None else x[start:stop:step]
