"""The time no implementation can beat: every tensor moved once, every product of the recurrence made once."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.inputs import Arguments
from kcpgen.verify.op import Op


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes (read plus written) and bfloat16 FLOP per second, measured in the same run."""

    copy: float
    matmul: float


@dataclass(frozen=True, kw_only=True)
class Work:
    bytes: int
    flops: int

    def floor_ms(self, rates: Rates) -> float:
        return 1e3 * max(self.bytes / rates.copy, self.flops / rates.matmul)


def work_of(op: Op, arguments: Arguments, direction: str) -> Work:
    """Forward: inputs in, output out. Training adds: inputs and the output's gradient in, inputs' gradients out.

    FLOPs are those of the recurrence token by token, one product with the state for each read, write and erase; each
    has two adjoints. A chunked form makes more.
    """
    inputs = sum(x.numel() * x.element_size() for x in arguments.leaves.values())
    output = arguments.d_output.numel() * arguments.d_output.element_size()
    flops = products(op) * 2 * _state_elements(arguments)
    if direction == "forward":
        return Work(bytes=inputs + output, flops=flops)
    return Work(bytes=3 * inputs + 2 * output, flops=3 * flops)


def products(op: Op) -> int:
    """Products with the state per token: the read, and for each term the write and the erase."""
    return 1 + sum(1 + bool(term.erase) for term in op.description.terms)


def _state_elements(arguments: Arguments) -> int:
    """K V for every token of every value head."""
    key_width = next(iter(arguments.tokens.values())).shape[-1]
    return arguments.d_output.numel() * key_width
