"""Random arguments of one call at full size, drawn on the device from what the op's description says of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from benchmarks.harness.shapes import Shape
from kcpgen.verify.inputs import contracting_signs
from kcpgen.verify.op import Op

BOUND = -5.0  # of a promised log decay, per token


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """keywords: the op's own options. bound: the promised lower bound of the log decay, None without a promise."""

    tokens: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    keywords: Mapping[str, bool | float]
    bound: float | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    d_output: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {**self.tokens, **self.params}


def promise(op: Op) -> tuple[str, str] | None:
    """The option and the constant with which a caller bounds the log decay, if the op has them."""
    for option, variants in op.description.rewrites.items():
        for when, targets in variants.items():
            if when in op.signature.constants and set(targets) & set(op.description.log_decays):
                return option, when
    return None


def gate_kinds(op: Op) -> tuple[str, ...]:
    """ "open": any decay is handled. "bounded": the caller promises one of at least BOUND per token."""
    return ("open", "bounded") if promise(op) else ("open",)


def draw(op: Op, shape: Shape, gates: str, device: str, seed: int = 0) -> Arguments:
    """Data in bfloat16, log decays and parameters in float32; erases contract the state, keys have norm one."""
    given = promise(op) if gates == "bounded" else None
    keywords: dict[str, bool | float] = {given[0]: True, given[1]: BOUND} if given else {}
    source = _Source(op, shape, keywords, torch.Generator(device).manual_seed(seed))
    offsets = torch.tensor(shape.offsets, dtype=torch.int64) if shape.lengths else None
    return Arguments(
        tokens={name: x.requires_grad_() for name, x in source.tokens().items()},
        params={name: source.param(name).requires_grad_() for name in op.params_read(keywords)},
        keywords=keywords,
        bound=BOUND if given else None,
        cu_seqlens=None if offsets is None else offsets.to(device),
        cu_seqlens_cpu=offsets,
        d_output=source.normal("B T HV V").bfloat16(),
    )


class _Source:
    def __init__(self, op: Op, shape: Shape, keywords: Mapping[str, bool | float], generator: torch.Generator) -> None:
        self.op = op
        self.sizes = shape.sizes
        self.generator = generator
        self.rewritten = op.rewritten(keywords)
        self.signs = contracting_signs(op)

    def tokens(self) -> dict[str, Tensor]:
        drawn = {name: self._token(name) for name in self.op.signature.inputs}
        for term in self.op.description.terms:
            self._contract(drawn, term.erase, term.write)
        return {name: x.contiguous() for name, x in drawn.items()}

    def param(self, name: str) -> Tensor:
        return 0.5 * self.normal(self.op.signature.params[name])

    def normal(self, letters: str) -> Tensor:
        shape = [self.sizes[letter] for letter in letters.split()]
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def _token(self, name: str) -> Tensor:
        raw = self.normal(self.op.signature.inputs[name])
        if name in self.op.description.log_decays:
            return raw if name in self.rewritten else self._log_decay(raw, name)
        if name in self.rewritten:
            return raw.bfloat16()
        if self.op.is_scalar(name):
            return raw.sigmoid_().bfloat16()
        return normalize(raw, dim=-1).bfloat16() if self.op.axis(name) == "K" else raw.bfloat16()

    def _log_decay(self, raw: Tensor, name: str) -> Tensor:
        low, high = self.op.description.bounds.get(name, (-float("inf"), 0.0))
        return -softplus(raw - 1.0).clamp_(-high, -low)

    def _contract(self, drawn: dict[str, Tensor], erase: tuple[str, ...], write: tuple[str, ...]) -> None:
        """As `kcpgen.verify.inputs` does: gates on the erase in (0, 1), other erasing vectors along what is written."""
        writers = [name for name in write if self.op.is_key(name)]
        for name in erase:
            if name in write or not self.op.is_key(name) or not writers:
                continue
            if set(writers) & set(erase):
                drawn[name] = self.normal(self.op.signature.inputs[name]).sigmoid_().bfloat16()
            else:
                drawn[name] = self._along(drawn[writers[0]], name)

    def _along(self, keys: Tensor, name: str) -> Tensor:
        weaker = torch.rand((*keys.shape[:3], 1), generator=self.generator, device=keys.device)
        return (self.signs.get(name, 1.0) * weaker * keys).bfloat16()
