"""Run by a process in which Triton interprets: rows cut on chunk borders, on ranks and on one device. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
from cp_rows import OPS, op, row
from torch import Tensor

from kcpgen.runtime import chunk_op, split_passes, stretches
from kcpgen.runtime.context_parallel import passes
from kcpgen.simulate.call import Spread, long_memory, on_ranks
from kcpgen.simulate.compare import simulate
from kcpgen.simulate.merges import entering, observed_merges
from kcpgen.simulate.verdict import cuts_on_chunks

SMALL = {"backend": "triton", "heads": 1, "value_heads": 1, "key_width": 16, "value_width": 16}


def two_ranks() -> dict[str, list[str]]:
    """Of every op in bf16: the tensors in which two ranks differ from one device at all."""
    found = {}
    for name in OPS:
        case = row((128,), dtype="bfloat16", **SMALL)  # two chunks a rank where every channel decays, else one
        comparison = simulate(op(name), case, Spread(ranks=2), "cpu", reference="eager")
        assert comparison.chunk is not None
        assert cuts_on_chunks(comparison, comparison.chunk)
        found[name] = [figure.tensor for figure in comparison.figures if not figure.equal]
    return found


def entering_states() -> dict[str, list[float]]:
    """Of three ranks: merged states to the float64 fold of what was gathered; to one device's, forward and backward."""
    found = {}
    for name, dtype in (("kda", "bfloat16"), ("kda", "float32"), ("simple_gla", "bfloat16")):
        case = row((192,), dtype=dtype, **SMALL)
        inputs = long_memory(op(name), case, "cpu")
        with observed_merges() as merged:
            simulated = simulate(op(name), case, Spread(ranks=3), "cpu", reference="eager", inputs=inputs)
        states = entering(op(name), case, inputs, simulated.bounds, merged)
        assert states is not None
        found[f"{name} {dtype}"] = [states.from_fold, *states.from_one]
    return found


def ranks_in_segments() -> dict[str, float]:
    """Of three ranks that cut their parts up once more, in fp32: the largest difference to one device."""
    found = {}
    for name, lengths in (("kda", (372,)), ("delta_rule", (7, 365)), ("gla", (7, 365)), ("simple_gla", (372,))):
        case = row(lengths, dtype="float32", **SMALL)
        with (
            mock.patch.object(split_passes, "summarise", wraps=split_passes.summarise) as cut,
            mock.patch.object(split_passes, "fold", wraps=split_passes.fold) as fold,
        ):
            comparison = simulate(op(name), case, Spread(ranks=3, segments=3), "cpu", reference="eager")
        assert cut.call_count == 1  # of the rank that hands on a state which it does not know yet
        forward = [call for call in fold.call_args_list if not call.kwargs["backward"]]
        ahead = [call.kwargs["backward"] for call in fold.call_args_list if call.kwargs.get("ahead")]
        assert sorted(ahead) == [False] * 2 + [True] * 2  # by the ranks that wait for a state, and for its gradient
        assert len(forward) == 4  # that rank's summary, and one run of every rank
        found[f"{name} {lengths}"] = max(figure.cp_to_one for figure in comparison.figures)
    return found


def ranks_in_stretches() -> dict[str, list[str]]:
    """Of three ranks whose chunk-parallel kernels run beside serial ones, in bf16: tensors that differ from three where
    they do not."""

    def halves(chunks: list[int], *_: int) -> tuple[range, ...]:
        return (range(chunks[0] // 2), range(chunks[0] // 2, chunks[0])) if len(chunks) == 1 else ()

    found = {}
    for name, lengths in (("kda", (384,)), ("delta_rule", (384,)), ("gla", (7, 377)), ("simple_gla", (384,))):
        case = row(lengths, dtype="bfloat16", **SMALL)
        inputs = long_memory(op(name), case, "cpu")
        plain = on_ranks(op(name), case, inputs, Spread(ranks=3))
        with (
            mock.patch.object(stretches, "side_by_side", halves),
            mock.patch.object(stretches, "forward", wraps=stretches.forward) as forward,
            mock.patch.object(
                stretches.Behind, "reverse", autospec=True, side_effect=stretches.Behind.reverse
            ) as behind,
        ):
            beside = on_ranks(op(name), case, inputs, Spread(ranks=3))
        alone = 3 - (len(lengths) > 1)  # ranks that hold one sequence
        assert (forward.call_count, behind.call_count) == (alone, alone)
        found[name] = [tensor for tensor, x in plain.items() if not torch.equal(x, beside[tensor])]
    return found


def kept() -> list[list[int]]:
    """Of each rank that received a state: bytes of what it keeps of it, and of the memory that this is part of."""
    found = []
    forward = passes.forward

    def observed(*args: Any) -> passes.Kept:
        kept = forward(*args)
        if kept.entering is not None:
            found.append([kept.entering.nbytes, kept.entering.untyped_storage().nbytes()])
        return kept

    case = row((384,), dtype="bfloat16", **SMALL)
    with mock.patch.object(passes, "forward", observed):
        on_ranks(op("kda"), case, long_memory(op("kda"), case, "cpu"), Spread(ranks=3))
    return found


def scanned() -> dict[str, list[int]]:
    """Of four ranks of two chunks that hold AA, AA, AB, BB: tokens that the forward's scans on each go through."""
    found = {}
    for segments in (1, 2):
        case = row((172, 84), dtype="float32", **SMALL)
        inputs = long_memory(op("kda"), case, "cpu")
        with mock.patch.object(chunk_op.Forward, "scan", autospec=True, side_effect=chunk_op.Forward.scan) as scan:
            on_ranks(op("kda"), case, inputs, Spread(ranks=4, segments=segments))
        counts = [0] * 4
        for call in scan.call_args_list:
            op_, layout = call.args[:2]
            counts[op_._run.cp.rank] += int(layout.sequences[:, 2].sum())
        found[f"{segments} segments"] = counts
    return found


def summaries() -> dict[str, list[bool]]:
    """Of every op in bf16, by the rank inside a sequence: is a summary, forward and backward, what a run arrives at?"""
    found: dict[str, list[bool]] = {}
    seen: list[bool] = []
    summarise, summarise_gradient = chunk_op.Forward.summarise, chunk_op.Backward.summarise

    def forward(self: Any, sequence: int, external: Tensor, transition: Tensor | None) -> None:
        summarise(self, sequence, external, transition)
        again = torch.empty_like(external)
        self.run(range(sequence, sequence + 1), None, again)
        seen.append(torch.equal(again, external))

    def backward(self: Any, sequence: int, entering: Tensor) -> None:
        summarise_gradient(self, sequence, entering)
        again = torch.empty_like(entering)
        self.run(range(sequence, sequence + 1), None, again)
        seen.append(torch.equal(again, entering))

    for name in OPS:
        case = row((192,), dtype="bfloat16", **SMALL)
        with (
            mock.patch.object(chunk_op.Forward, "summarise", forward),
            mock.patch.object(chunk_op.Backward, "summarise", backward),
        ):
            on_ranks(op(name), case, long_memory(op(name), case, "cpu"), Spread(ranks=3))
        found[name] = seen.copy()
        seen.clear()
    return found


if __name__ == "__main__":
    bodies = (two_ranks, entering_states, ranks_in_segments, ranks_in_stretches, kept, scanned, summaries)
    print(json.dumps({f.__name__: f for f in bodies}[sys.argv[1]]()))
