"""Random inputs of any op, made from what its description says of each tensor.

A recurrence is only worth comparing where it is stable, so erases are drawn to contract the state: a vector that erases
and another that writes in the same term are aligned, with the sign that shrinks the state. "Repeated" keys are the
hardest of these: every vector over the key axis nearly along one direction, erased as strongly as the op bears, up to
the reflection that twice its share is.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from kcpgen.verify.cases import Case
from kcpgen.verify.op import Op

STRONG = -20.0
Strength = tuple[float, float]
# How strong "repeated" erases are, by scalars and by vectors that only erase: the first with which no state grows.
STRENGTHS: tuple[Strength, ...] = ((2.0, 2.0), (2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (0.5, 0.5), (0.25, 0.25))


TRIAL = Case(label="sign", backend="naive", tokens=16, heads=1, value_heads=1, key_width=8, value_width=8, gates="zero")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of one call, leaves that require gradients, and the gradients of its outputs."""

    tokens: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    initial_state: Tensor | None
    keywords: Mapping[str, object]
    d_output: Tensor | None
    d_state: Tensor | None

    @property
    def device(self) -> torch.device:
        return next(iter(self.tokens.values())).device

    @property
    def leaves(self) -> dict[str, Tensor]:
        state = {} if self.initial_state is None else {"initial_state": self.initial_state}
        return {**self.tokens, **self.params, **state}


def make_inputs(op: Op, case: Case, device: str) -> Inputs:
    """Inputs rounded to what they are passed in: data in `case.dtype`, log decays, parameters and states in fp32.

    In float64 if the case is.
    """
    signs = contracting_signs(op)
    draw = _Draw(op, case, signs, bearable_strength(op, signs) if case.keys == "repeated" else (1.0, 1.0))
    data = getattr(torch, case.dtype)
    precise = torch.float64 if data == torch.float64 else torch.float32

    def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(device=device, dtype=dtype).requires_grad_()

    decays = op.description.log_decays
    return Inputs(
        tokens={name: leaf(x, precise if name in decays else data) for name, x in draw.tokens().items()},
        params={name: leaf(x, precise) for name, x in draw.params().items()},
        initial_state=leaf(draw.state(), precise) if case.initial_state else None,
        keywords=case.keywords,
        d_output=draw.output().to(device=device, dtype=data) if case.loss != "state" else None,
        d_state=draw.state().to(device=device, dtype=precise) if case.loss != "output" else None,
    )


def in_float64(inputs: Inputs, perturbed: float = 0.0) -> Inputs:
    """The same numbers as float64 leaves; `perturbed` moves each 16-bit one up or down by that relative amount."""
    generator = torch.Generator().manual_seed(0)

    def leaf(x: Tensor) -> Tensor:
        exact = x.detach().double()
        sign = torch.randint(0, 2, exact.shape, generator=generator).to(exact) * 2 - 1
        move = perturbed if x.dtype in (torch.bfloat16, torch.float16) else 0.0
        return (exact * (1 + move * sign)).requires_grad_()

    return Inputs(
        tokens={name: leaf(x) for name, x in inputs.tokens.items()},
        params={name: leaf(x) for name, x in inputs.params.items()},
        initial_state=None if inputs.initial_state is None else leaf(inputs.initial_state),
        keywords=inputs.keywords,
        d_output=None if inputs.d_output is None else inputs.d_output.double(),
        d_state=None if inputs.d_state is None else inputs.d_state.double(),
    )


class _Draw:
    """float64 random tensors of one case, from a seed of its own. `strength` scales erases, see `STRENGTHS`."""

    def __init__(self, op: Op, case: Case, signs: Mapping[str, float], strength: Strength = (1.0, 1.0)) -> None:
        self.op = op
        self.case = case
        self.signs = signs
        self.scalars, self.erases = strength
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{op.name} {case.label}".encode()))
        self.rewritten = op.rewritten(case.keywords)
        self.direction = self._normal("B K")[:, None, None] if case.keys == "repeated" else torch.zeros(())

    def tokens(self) -> dict[str, Tensor]:
        drawn = {name: self._token(name) for name in self.op.signature.inputs}
        for term in self.op.description.terms:
            self._contract(drawn, term.erase, term.write)
        return {name: x.contiguous() for name, x in drawn.items()}

    def params(self) -> dict[str, Tensor]:
        letters = self.op.signature.params
        return {name: 0.5 * self._normal(letters[name]) for name in self.op.params_read(self.case.keywords)}

    def state(self) -> Tensor:
        return self._normal("N HV K V")

    def output(self) -> Tensor:
        return self._normal("B T HV V")

    def _token(self, name: str) -> Tensor:
        raw = self._normal(self.op.signature.inputs[name])
        if name in self.rewritten:
            return raw
        if name in self.op.description.log_decays:
            return self._log_decay(raw, name)
        if self.op.is_scalar(name):
            return self._share(raw, self.scalars)
        return self._key(raw) if self.op.axis(name) == "K" else raw

    def _share(self, raw: Tensor, strength: float) -> Tensor:
        """In (0, 1); "repeated": in (0, strength), nearly all of it."""
        return strength * torch.sigmoid(raw + 4.0) if self.case.keys == "repeated" else torch.sigmoid(raw)

    def _key(self, raw: Tensor) -> Tensor:
        """Unit vectors; "repeated": one direction for all tokens, heads and inputs of a row, each 2 % away from it."""
        if self.case.keys == "repeated":
            raw = self.direction + 0.02 * raw
        return normalize(raw, dim=-1)

    def _log_decay(self, raw: Tensor, name: str) -> Tensor:
        tokens = torch.arange(raw.shape[1]).reshape(1, -1, *[1] * (raw.ndim - 2))
        heads = torch.arange(raw.shape[2]).reshape(1, 1, -1, *[1] * (raw.ndim - 3))
        zero = torch.zeros_like(raw)
        kinds = {
            "random": lambda: -softplus(raw - 1.0),
            "slow": lambda: -softplus(raw - 1.0) / 50,  # half of a state is left after 90 tokens
            "zero": lambda: zero,
            "mixed": lambda: torch.where(raw > 0, zero, STRONG),
            "heads": lambda: torch.where(heads % 2 == 0, zero + STRONG, zero),
            "reset": lambda: torch.where(tokens == raw.shape[1] // 2, zero - torch.inf, zero),
            "spikes": lambda: torch.where(raw > 2.0, -1000.0, -softplus(raw)),
        }
        low, high = self.op.description.bounds.get(name, (-float("inf"), 0.0))
        return kinds[self.case.gates]().clamp(low, high)

    def _contract(self, drawn: dict[str, Tensor], erase: tuple[str, ...], write: tuple[str, ...]) -> None:
        """Make the vectors that erase in one term erase what the term writes, at most once.

        Where one vector erases and writes, another in the erase is a gate on its channels, unless some other term
        writes it; else both are made parallel.
        """
        written = {name for term in self.op.description.terms for name in term.write}
        writers = [name for name in write if self.op.is_key(name)]
        shared = [name for name in writers if name in erase]
        for name in erase:
            if name in write or not self.op.is_key(name) or not writers:
                continue
            if not shared:
                drawn[name] = self.signs.get(name, 1.0) * self._weakened(_as_heads(drawn[writers[0]], drawn[name]))
            elif name not in self.rewritten and name not in written:
                drawn[name] = self._share(self._normal(self.op.signature.inputs[name]), self.erases)

    def _weakened(self, keys: Tensor) -> Tensor:
        shape = (*keys.shape[:3], 1)
        if self.case.keys == "repeated":
            return keys * self._share(torch.randn(shape, generator=self.generator, dtype=torch.float64), self.erases)
        return keys * torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def _normal(self, letters: str) -> Tensor:
        case = self.case
        sizes = {"B": case.batch, "T": case.tokens, "N": case.sequences, "H": case.heads, "HV": case.value_heads}
        sizes |= {"K": case.key_width, "V": case.value_width}
        shape = [sizes[letter] for letter in letters.split()]
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)


def contracting_signs(op: Op) -> dict[str, float]:
    """For each input that only erases: the sign that makes it, parallel to a write, shrink a state. Found by trying."""
    signs: dict[str, float] = {}
    for term in op.description.terms:
        for name in term.erase:
            if name not in term.write and op.is_key(name):
                norms = {sign: _decayed_norm(op, {**signs, name: sign}) for sign in (1.0, -1.0)}
                signs[name] = min(norms, key=norms.__getitem__)
    return signs


def bearable_strength(op: Op, signs: Mapping[str, float]) -> Strength:
    """The first of `STRENGTHS` with which "repeated" keys do not make a state grow. Found by trying, like the signs.

    One reflection, or a product of several, is an isometry and bears 2; a sum of two erases bears 1.
    """
    case = replace(TRIAL, keys="repeated", tokens=64)
    borne = (strength for strength in STRENGTHS if _decayed_norm(op, signs, case, strength) < 1.05)
    return next(borne, STRENGTHS[-1])


def _decayed_norm(op: Op, signs: Mapping[str, float], case: Case = TRIAL, strength: Strength = (1.0, 1.0)) -> float:
    """Share of a state's norm that the tokens of `case` leave when nothing decays and no value is written."""
    draw = _Draw(op, case, signs, strength)
    start = draw.state()
    silent = {name: torch.zeros_like(x) if op.axis(name) == "V" else x for name, x in draw.tokens().items()}
    _, state = op.naive(**silent, **draw.params(), initial_state=start, output_final_state=True)
    assert state is not None
    return float(state.norm() / start.norm())


def _as_heads(x: Tensor, like: Tensor) -> Tensor:
    """[B, T, heads', K] seen by the heads of `like`: repeated for more, every group's first for fewer."""
    given, heads = x.shape[2], like.shape[2]
    return x.repeat_interleave(heads // given, dim=2) if heads >= given else x[:, :, :: given // heads]
