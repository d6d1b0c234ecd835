"""Three results of one row, two by two: on ranks (CP), on one device, and token by token in float64 (naive)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kcpgen.runtime.context_parallel.context import shard_bounds
from kcpgen.simulate.call import Spread, by_token, long_memory, on_ranks
from kcpgen.simulate.reference import exact
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import bound_of, evaluate, relative_rms
from kcpgen.verify.inputs import Inputs
from kcpgen.verify.op import Op

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Relative RMS differences of one tensor, of one sequence where it is divided by sequences (`sequence` else None).

    worst_token: the global token that differs most between CP and one device (from naive, where these two are equal),
    and the rank that holds it; None for tensors without tokens. heads: the differences of each head, CP to one device.
    """

    tensor: str
    sequence: int | None
    cp_to_one: float
    one_to_naive: float
    cp_to_naive: float
    equal: bool
    bound: float
    worst_token: int | None
    worst_rank: int | None
    ranks: tuple[float, ...]
    heads: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    op: Op
    case: Case
    spread: Spread
    bounds: tuple[int, ...]
    chunk: int | None  # tokens per chunk of the kernels, None without kernels or where ranks used other chunks
    figures: tuple[Figure, ...]


def simulate(
    op: Op, case: Case, spread: Spread, device: str, *, reference: str = "naive", inputs: Inputs | None = None
) -> Comparison:
    """Run a packed row on one device and on simulated ranks; `reference` as in `exact`, `inputs` of long memory."""
    case = replace(case, segments=1)  # one device is the witness: it must not be cut as ranks are
    inputs = long_memory(op, case, device) if inputs is None else inputs
    naive = exact(op, case, inputs, reference)
    with observed_chunks() as chunks:
        one = evaluate(op.chunk, inputs, case, backend=case.backend)
        cp = on_ranks(op, case, inputs, spread)
    return compared(op, case, spread, cp=cp, one=one, naive=naive, chunks=chunks)


def compared(
    op: Op, case: Case, spread: Spread, *, cp: Tensors, one: Tensors, naive: Tensors, chunks: set[int]
) -> Comparison:
    """The three results of a row, side by side. chunks: lengths of the chunks that kernels worked in."""
    bounds = shard_bounds(case.offsets[-1], spread.ranks, spread.layout)
    figures = [f for name in one for f in _figures(op, case, bounds, name, cp[name], one[name], naive[name])]
    (chunk,) = chunks if len(chunks) == 1 else (None,)
    return Comparison(op=op, case=case, spread=spread, bounds=bounds, chunk=chunk, figures=tuple(figures))


@contextmanager
def observed_chunks() -> Iterator[set[int]]:
    """The set of chunk lengths that kernels are launched with inside."""
    seen: set[int] = set()
    try:
        from kcpgen.runtime import chunk_op
    except ImportError:  # no Triton, no kernels
        yield seen
        return
    make = chunk_op.chunk_layout  # type: ignore[attr-defined]

    def observed(*arguments: Any) -> Any:
        layout = make(*arguments)
        seen.add(layout.chunk)
        return layout

    with mock.patch.object(chunk_op, "chunk_layout", observed):
        yield seen


def _figures(
    op: Op, case: Case, bounds: tuple[int, ...], name: str, cp: Tensor, one: Tensor, naive: Tensor
) -> Iterator[Figure]:
    """One figure a sequence; one in all for parameters."""
    bound = bound_of(op, case, name)
    if name in by_token(op):
        for n, (begin, end) in enumerate(pairwise(case.offsets)):
            if end > begin:
                span = slice(begin, end)
                yield _of_tokens(name, n, begin, bounds, bound, cp[0, span], one[0, span], naive[0, span])
    elif name in ("final_state", "dinitial_state"):
        for n in range(case.sequences):
            yield _figure(name, n, bound, cp[n], one[n], naive[n], heads=_by_head(cp[n], one[n]))
    else:
        yield _figure(name, None, bound, cp, one, naive, heads=_by_head(cp, one))


def _figure(
    name: str,
    sequence: int | None,
    bound: float,
    cp: Tensor,
    one: Tensor,
    naive: Tensor,
    *,
    worst: tuple[int, int] | None = None,
    ranks: tuple[float, ...] = (),
    heads: tuple[float, ...] = (),
) -> Figure:
    return Figure(
        tensor=name,
        sequence=sequence,
        cp_to_one=relative_rms(cp, one.double()),
        one_to_naive=relative_rms(one, naive),
        cp_to_naive=relative_rms(cp, naive),
        equal=torch.equal(cp, one),
        bound=bound,
        worst_token=None if worst is None else worst[0],
        worst_rank=None if worst is None else worst[1],
        ranks=ranks,
        heads=heads,
    )


def _of_tokens(
    name: str, n: int, begin: int, bounds: tuple[int, ...], bound: float, cp: Tensor, one: Tensor, naive: Tensor
) -> Figure:
    """Tensors [tokens of the sequence, heads, ...]."""
    against = naive if torch.equal(cp, one) else one
    difference = (cp.double() - against.double()).flatten(1).norm(dim=1)
    token = begin + int(difference.argmax())
    spans = [(max(a, begin) - begin, min(b, begin + len(cp)) - begin) for a, b in pairwise(bounds)]
    ranks = tuple(relative_rms(cp[a:b], one[a:b].double()) if b > a else 0.0 for a, b in spans)
    rank = next(rank for rank, (a, b) in enumerate(pairwise(bounds)) if a <= token < b)
    heads = _by_head(cp.transpose(0, 1), one.transpose(0, 1))
    return _figure(name, n, bound, cp, one, naive, worst=(token, rank), ranks=ranks, heads=heads)


def _by_head(cp: Tensor, one: Tensor) -> tuple[float, ...]:
    """Of tensors [heads, ...]."""
    return tuple(relative_rms(a, b.double()) for a, b in zip(cp, one, strict=True))
