"""Torch sides of generated ops, built from specs into modules of their own, and inputs to call them with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kcpgen.derivation import derive_chunk_form, derive_normal_form
from kcpgen.emit.arguments import axes
from kcpgen.emit.torch import emit_eager, emit_init, emit_interface, emit_naive
from kcpgen.language import parse
from kcpgen.runtime.signature import Signature
from kcpgen.spec import Option, Spec, TokenInput

Tensors = dict[str, Tensor]
Op = Callable[..., tuple[Tensor, Tensor | None]]
SPECS = sorted((Path(__file__).resolve().parents[2] / "specs").glob("*.kcp"))
OPS = [path.stem for path in SPECS]

# Forms that no paper has written yet: several erases and writes, sums, powers, parameters in the equation.
HEADER = """op {name}
token q, k : [H, K]
token v : [HV, V]
token a, b : [HV, K]
token g : [HV, K] log decay
token d : [HV] log decay
token β : [HV]
token x : [HV, V]
param c : [HV, K]
state S : [HV, K, V]
"""
MADE = {
    "two_factors": "(I - k a^T) Diag(exp(g)) (I - b k^T) S[t-1] + β k v^T",
    "three_terms": "Diag(exp(g)) S[t-1] - β k (k^T S[t-1]) + b (a^T S[t-1]) + k v^T + a (x - v)^T",
    "decayed_sum": "exp(d) (S[t-1] - β k (S[t-1]^T k)^T) + (k + b) (v .* x)^T / 2",
    "nested": "Diag(exp(g)) S[t-1] - k (k^T (I - a b^T / 2) Diag(exp(g)) S[t-1]) + k v^T / sqrt(sum(a .* a) + 1)",
    "accumulate": "S[t-1] + sigmoid(β) k v^T",
    "parameter": "exp(d) S[t-1] + (c .* k) (v - S[t-1]^T (c .* a))^T",
    "projected": "exp(d) S[t-1] + ((I - a a^T) k) v^T",
    "transposed": "exp(d) S[t-1] - (S[t-1]^T (a k^T + b b^T)^T k k^T)^T + k v^T",
}
READOUTS = {"nested": "scale S[t]^T (q - (k^T q) (c .* k))", "two_factors": "scale ((I - a b^T) S[t])^T q"}


def made_spec(name: str) -> Spec:
    """One of `MADE`, its declarations reduced to what it mentions."""
    readout = READOUTS.get(name, "scale S[t]^T q")
    equation = f"{MADE[name]} {readout}"
    words = {word.strip("()^T[]-1") for word in equation.replace("(", " ").replace(")", " ").replace("^", " ").split()}
    lines = []
    for line in HEADER.format(name=name).splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("token", "param"):
            names, _, shape = rest.partition(":")
            kept = [n.strip() for n in names.split(",") if n.strip() in words]
            line = f"{kind} {', '.join(kept)} :{shape}" if kept else ""
        lines.append(line)
    return parse("\n".join([*lines, f"S[t] = {MADE[name]}", f"o[t] = {readout}", ""]), f"{name}.kcp")


@dataclass(frozen=True, kw_only=True)
class Built:
    spec: Spec
    sources: Mapping[str, str]
    modules: Mapping[str, ModuleType]

    @property
    def chunk(self) -> Op:
        return getattr(self.modules["interface"], f"chunk_{self.spec.name}")

    @property
    def eager(self) -> Op:
        return getattr(self.modules["eager"], f"eager_chunk_{self.spec.name}")

    @property
    def naive(self) -> Op:
        return getattr(self.modules["naive"], f"naive_recurrent_{self.spec.name}")

    @property
    def signature(self) -> Signature:
        return self.modules["interface"].SIGNATURE


@cache
def build(name: str) -> Built:
    """The torch side of one of `specs/` or of `MADE`."""
    return build_spec(load_spec(name))


def load_spec(name: str) -> Spec:
    path = next((path for path in SPECS if path.stem == name), None)
    return parse(path.read_text(encoding="utf-8"), str(path)) if path else made_spec(name)


def build_spec(spec: Spec, edit: Callable[[str, str], str] = lambda name, text: text) -> Built:
    """Emit, pass each file through `edit`, import."""
    form = derive_chunk_form(derive_normal_form(spec))
    return _import(spec, {**emit_naive(spec), **emit_eager(form), **emit_interface(form), **emit_init(spec)}, edit)


def build_naive(name: str) -> Op:
    """The per-token reference of one of `specs/` or of `MADE`; nothing is derived."""
    spec = load_spec(name)
    return _import(spec, emit_naive(spec), lambda name, text: text).naive


def _import(spec: Spec, files: Mapping[str, str], edit: Callable[[str, str], str]) -> Built:
    sources = {name: edit(name, text) for name, text in files.items()}
    package = f"kcpgen_test_{spec.name}_{len(sys.modules)}"
    order = [name for name in ("naive", "eager", "interface", "__init__") if f"{name}.py" in sources]
    sys.modules[package] = ModuleType(package)
    sys.modules[package].__path__ = []
    modules = {name: _load(package, name, sources[f"{name}.py"]) for name in order}
    return Built(spec=spec, sources=sources, modules=modules)


def _load(package: str, name: str, text: str) -> ModuleType:
    full = package if name == "__init__" else f"{package}.{name}"
    module = sys.modules.setdefault(full, ModuleType(full))
    module.__package__ = package
    exec(compile(text, f"{full}.py", "exec"), module.__dict__)
    return module


@dataclass(frozen=True, kw_only=True)
class Sizes:
    B: int = 1
    T: int = 17
    H: int = 1
    HV: int = 2
    K: int = 5
    V: int = 3
    sequences: int = 0  # 0: as many as B

    @property
    def N(self) -> int:
        return self.sequences or self.B

    def of(self, letters: str) -> list[int]:
        return [getattr(self, letter) for letter in letters.split()]


def draw(
    built: Built, sizes: Sizes, *, seed: int = 0, dtype: torch.dtype = torch.float64, **keywords: object
) -> Tensors:
    """Token inputs, the parameters that the keywords need and an initial state, all requiring gradients."""
    needed = {*built.signature.always}
    for option, variants in built.signature.options.items():
        if keywords.get(option):
            needed |= {*[reads for when, reads in variants.items() if not when or when in keywords][-1]}
    return draw_for(built.spec, sizes, seed=seed, dtype=dtype, params=needed)


def draw_for(
    spec: Spec, sizes: Sizes, *, seed: int = 0, dtype: torch.dtype = torch.float64, params: Iterable[str] | None = None
) -> Tensors:
    """As `draw`, with the parameters named (all of them by default)."""
    random = torch.Generator().manual_seed(seed)

    def normal(letters: str) -> Tensor:
        return torch.randn(sizes.of(letters), generator=random, dtype=torch.float64)

    tensors = {i.name: _in_range(i, normal(axes(i))) for i in spec.inputs}
    kept = [param for param in spec.params if params is None or param.name in params]
    tensors |= {param.name: 0.5 * normal(axes(param)) for param in kept}
    tensors["initial_state"] = normal("N HV K V")
    return {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}


def _in_range(declared: TokenInput, raw: Tensor) -> Tensor:
    """Raw numbers as values that keep a state bounded."""
    if declared.role == "log_decay":
        return -raw.abs()
    if declared.axis == "":
        return torch.sigmoid(raw)
    return 0.8 * normalize(raw, dim=-1) if declared.axis == "K" else raw


def option_sets(spec: Spec) -> list[dict[str, object]]:
    """No option, every variant of every option by itself, and the last variants of all options together."""
    single = [_selecting(spec, option, variant.when) for option in spec.options for variant in option.variants]
    together = {k: v for option in spec.options for k, v in _selecting(spec, option, option.variants[-1].when).items()}
    return [{}, *single, *([together] if len(spec.options) > 1 else [])]


def _selecting(spec: Spec, option: Option, when: str) -> dict[str, object]:
    return {option.name: True, **({when: True if when in spec.flags else -3.0} if when else {})}


def run(function: Op, tensors: Mapping[str, Tensor], **keywords: object) -> dict[str, Tensor]:
    """o, final state and the gradient of every tensor under one fixed loss on both."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    o, state = function(**leaves, output_final_state=True, **keywords)
    assert state is not None
    gradients = torch.autograd.grad(
        [o, state], list(leaves.values()), [_weights(o), _weights(state)], allow_unused=True
    )
    found = {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {
        "o": o.detach(),
        "final_state": state.detach(),
        **{n: g if g is not None else torch.zeros(()) for n, g in found.items()},
    }


def _weights(x: Tensor) -> Tensor:
    """Fixed numbers of a tensor's shape, irregular enough that nothing cancels."""
    return torch.cos(torch.arange(x.numel(), dtype=torch.float64) * 1.7 + 0.3).reshape(x.shape).to(x.dtype)


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative RMS deviation and the tensor that has it; NaN counts as infinite."""
    errors = {name: relative_rms(found[name], expected[name]) for name in expected}
    name = max(errors, key=lambda key: errors[key])
    return errors[name], name


def relative_rms(x: Tensor, y: Tensor) -> float:
    difference = (x.double() - y.double()).square().sum().sqrt().item()
    size = y.double().square().sum().sqrt().item()
    return difference / max(size, 1e-12) if difference == difference else float("inf")
