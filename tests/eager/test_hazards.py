"""Inputs that break chunked kernels: extreme gates, repeated keys, garbage behind a prefix, odd layouts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch_ops import OPS, Built, Sizes, build, draw, option_sets, relative_rms, run, worst

from kcpgen.derivation import derive_normal_form

GATED = [name for name in OPS if any(i.role == "log_decay" for i in build(name).spec.inputs)]


def built_exclusive(name: str) -> bool:
    terms = derive_normal_form(build(name).spec).terms
    return any(term.erase != 0 and not term.erase_reads_decayed for term in terms)


ERASING = [name for name in OPS if any(term.erase != 0 for term in derive_normal_form(build(name).spec).terms)]
# A term that reads the state before it decays carries what was there across a reset.
FORGETTING = [name for name in GATED if not built_exclusive(name)]
Tensors = dict[str, torch.Tensor]


def gates(built: Built, tensors: Tensors, pattern: str) -> Tensors:
    """The tensors with log decays of a pattern."""
    changed = dict(tensors)
    for declared in built.spec.inputs:
        if declared.role == "log_decay":
            changed[declared.name] = _pattern(tensors[declared.name].detach(), pattern).requires_grad_()
    return changed


def _pattern(g: torch.Tensor, pattern: str) -> torch.Tensor:
    if pattern == "zero":
        return torch.zeros_like(g)
    if pattern == "half":
        return torch.where(torch.arange(g.shape[1]).reshape(1, -1, *[1] * (g.ndim - 2)) % 2 == 0, 0.0, 20 * g)
    if pattern == "heads":
        return (
            torch.where(torch.arange(g.shape[2]).reshape(1, 1, -1, *[1] * (g.ndim - 3)) == 0, -20.0, 0.0)
            .expand_as(g)
            .clone()
        )
    if pattern == "spikes":
        return torch.where(g < -1, torch.full_like(g, -1000.0), g)
    reset = torch.zeros_like(g)
    reset[:, g.shape[1] // 3] = float(pattern)
    return reset


@pytest.mark.parametrize("pattern", ["zero", "half", "heads", "spikes", "-90", "-1e30", "-inf"])
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_extreme_gates(name: str, pattern: str, dtype: torch.dtype, bound: float) -> None:
    built = build(name)
    tensors = gates(built, draw(built, Sizes(T=70, K=8, V=4)), pattern)
    single = {n: x.detach().to(dtype) for n, x in tensors.items()}
    exact = run(built.naive, {n: x.double() for n, x in single.items()})
    found = run(built.eager, single)
    assert all(x.isfinite().all() for x in found.values())
    assert worst(found, exact) < (bound,)


@pytest.mark.parametrize("name", FORGETTING)
def test_a_reset_forgets_exactly(name: str) -> None:
    built = build(name)
    tensors = gates(built, draw(built, Sizes(T=40), dtype=torch.float32), "-inf")
    other = {**tensors, "initial_state": tensors["initial_state"] + 100}
    for function in (built.eager, built.naive):
        first, second = function(**tensors)[0], function(**other)[0]
        assert torch.equal(first[:, 13:], second[:, 13:])


def _erased_along_one_direction(built: Built, strength: float) -> Tensors:
    """Nothing decays, and all key vectors are one; the erase takes `strength` of it, by a scalar or by a vector."""
    tensors = gates(built, draw(built, Sizes(T=130, K=8)), "zero")
    one = torch.nn.functional.normalize(torch.arange(1.0, 9.0, dtype=torch.float64), dim=-1)
    keys = [i for i in built.spec.inputs if i.axis == "K" and i.role != "log_decay" and i.name != "q"]
    scalars = [i for i in built.spec.inputs if i.axis == "" and i.role != "log_decay"]
    with torch.no_grad():
        for declared in keys:
            tensors[declared.name][:] = one
        for declared in scalars:
            tensors[declared.name][:] = strength
        if not scalars:
            tensors.update(_vector_strength(built, tensors, strength))
    return {name: x.detach().requires_grad_() for name, x in tensors.items()}


def _vector_strength(built: Built, tensors: Tensors, strength: float) -> Tensors:
    """What a spec with no scalar erases by: b, a gate on the channels of k, or else a, which b writes."""
    gated = "a" not in tensors
    return {"b": torch.full_like(tensors["b"], strength)} if gated else {"a": -strength * tensors["b"]}


@pytest.mark.parametrize("strength", [0.5, 0.999, 1.5, 1.99])
@pytest.mark.parametrize("name", ERASING)
def test_repeated_keys(name: str, strength: float) -> None:
    built = build(name)
    tensors = _erased_along_one_direction(built, strength)
    single = {n: x.detach().float() for n, x in tensors.items()}
    assert worst(run(built.eager, tensors), run(built.naive, tensors)) < (1e-10,)
    assert worst(run(built.eager, single), run(built.naive, {n: x.double() for n, x in single.items()})) < (1e-4,)


@pytest.mark.parametrize("name", ["gdn", "kda"])
@pytest.mark.parametrize(
    ("A_log", "raw"), [(100.0, -200.0), (100.0, 0.0), (100.0, 200.0), (-100.0, 200.0), (5.0, -1e4)]
)
@pytest.mark.parametrize("bounded", [False, True])
def test_saturated_activations_are_finite(name: str, A_log: float, raw: float, bounded: bool) -> None:
    built = build(name)
    keywords: dict[str, object] = {"use_gate_in_kernel": True}
    if bounded and "lower_bound" in {constant.name for constant in built.spec.constants}:
        keywords["lower_bound"] = -5.0
    tensors = {n: x.detach() for n, x in draw(built, Sizes(T=20), dtype=torch.float32, **keywords).items()}
    tensors["g"] = torch.full_like(tensors["g"], raw)
    tensors["A_log"] = torch.full_like(tensors["A_log"], A_log)
    for function in (built.eager, built.naive):
        assert all(x.isfinite().all() for x in run(function, tensors, **keywords).values())
    if raw == -200 and not bounded:  # softplus wins: an open gate
        plain = {**tensors, "g": torch.zeros_like(tensors["g"])}
        del plain["A_log"], plain["dt_bias"]
        assert relative_rms(built.eager(**tensors, **keywords)[0], built.eager(**plain)[0]) < 1e-6


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("prefix", [1, 16, 23])
def test_causality_is_bitwise(name: str, prefix: int) -> None:
    """Holds for any later tokens whose intermediates stay finite: masks multiply by zero, and 0 * inf is NaN.

    Tokens after the prefix in its own chunk go through the same matrix products; one that holds inf or NaN, or whose
    products overflow, may spoil earlier tokens of that chunk, never of a chunk before. The prefix alone agrees to
    rounding: in how many chunks a product is batched decides on some CPUs how its sums are ordered.
    """
    built = build(name)
    tensors = draw(built, Sizes(T=90, K=8, V=8), dtype=torch.float32)
    rows = []
    for seed in (1, 2):
        later = draw(built, Sizes(T=90, K=8, V=8), seed=seed, dtype=torch.float32)
        rows.append(
            {
                n: x.detach().clone()
                if n == "initial_state"
                else torch.cat([x.detach()[:, :prefix], later[n].detach()[:, prefix:]], 1)
                for n, x in tensors.items()
            }
        )
    for declared in built.spec.inputs:
        if declared.role == "log_decay":
            rows[0][declared.name][:, prefix + 5 :] = -1e3
    rows.append({n: x.detach() if n == "initial_state" else x.detach()[:, :prefix] for n, x in tensors.items()})
    outputs, gradients = [], []
    for values in rows:
        leaves = {n: x.clone().requires_grad_() for n, x in values.items()}
        o = built.eager(**leaves)[0][:, :prefix]
        outputs.append(o.detach())
        gradients.append(torch.autograd.grad(o.sin().sum(), [*leaves.values()], allow_unused=True))
    assert torch.equal(outputs[0], outputs[1])
    assert relative_rms(outputs[2], outputs[0]) < 1e-6
    for declared, *found in zip(tensors, *gradients, strict=True):
        kept = [x if declared == "initial_state" else x[:, :prefix] for x in found]
        assert torch.equal(kept[0], kept[1]), declared
        assert relative_rms(kept[2], kept[0]) < 1e-5, declared


@pytest.mark.parametrize("name", OPS)
def test_states_chain(name: str) -> None:
    built = build(name)
    tensors = draw(built, Sizes(T=50))
    start = tensors.pop("initial_state")
    whole, last = built.chunk(**tensors, initial_state=start, output_final_state=True)
    for cut in (1, 16, 33):
        first = {n: x[:, :cut] for n, x in tensors.items()}
        second = {n: x[:, cut:] for n, x in tensors.items()}
        o1, state = built.chunk(**first, initial_state=start, output_final_state=True)
        o2, end = built.chunk(**second, initial_state=state, output_final_state=True)
        assert relative_rms(torch.cat([o1, o2], dim=1), whole) < 1e-12
        assert relative_rms(end, last) < 1e-12


@pytest.mark.parametrize("name", OPS)
def test_packed_sequences_equal_separate_calls(name: str) -> None:
    built = build(name)
    offsets = [0, 17, 17, 50]
    tensors = draw(built, Sizes(T=50, sequences=3))
    states = tensors.pop("initial_state")
    packed, last = built.chunk(
        **tensors, initial_state=states, output_final_state=True, cu_seqlens=torch.tensor(offsets)
    )
    assert torch.equal(last[1], states[1])  # no token: the state goes through
    for n, (begin, end) in enumerate(pairwise(offsets)):
        part = {name: x[:, begin:end] for name, x in tensors.items()}
        o, state = built.chunk(**part, initial_state=states[n : n + 1], output_final_state=True)
        assert torch.equal(packed[:, begin:end], o)
        assert torch.equal(last[n : n + 1], state)


@pytest.mark.parametrize("name", OPS)
def test_no_token_at_all(name: str) -> None:
    built = build(name)
    tensors = draw(built, Sizes(T=0, B=2))
    for backend in (None, "naive"):
        o, state = built.chunk(**tensors, output_final_state=True, backend=backend)
        assert o.shape == (2, 0, 2, 3)
        assert torch.equal(state, tensors["initial_state"])


@pytest.mark.parametrize("name", OPS)
def test_grouped_heads_are_repeated_ones(name: str) -> None:
    built = build(name)
    tensors = draw(built, Sizes(T=20, H=2, HV=8))
    shared = {i.name for i in built.spec.inputs if i.heads == "H"}
    repeated = {n: x.repeat_interleave(4, dim=2) if n in shared else x for n, x in tensors.items()}
    assert relative_rms(built.chunk(**tensors)[0], built.chunk(**repeated)[0]) < 1e-14


@pytest.mark.parametrize("name", OPS)
def test_strides_do_not_matter(name: str) -> None:
    built = build(name)
    tensors = {n: x.detach() for n, x in draw(built, Sizes(B=2, T=20)).items()}
    poisoned = {n: torch.stack([x, torch.full_like(x, math.nan)], dim=-1)[..., 0] for n, x in tensors.items()}
    swapped = {n: x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in tensors.items()}
    expanded = {n: x[:1].expand_as(x) for n, x in tensors.items()}
    same = {n: x.contiguous() for n, x in expanded.items()}
    assert torch.equal(built.chunk(**tensors)[0], built.chunk(**poisoned)[0])
    assert torch.equal(built.chunk(**tensors)[0], built.chunk(**swapped)[0])
    assert torch.equal(built.chunk(**same)[0], built.chunk(**expanded)[0])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("backend", ["eager", "naive"])
def test_mixed_dtypes_and_autocast(name: str, backend: str) -> None:
    built = build(name)
    tensors = {n: x.detach() for n, x in draw(built, Sizes(T=20), dtype=torch.float32).items()}
    narrow = {n: x if n in ("g", "gk", "initial_state") else x.bfloat16() for n, x in tensors.items()}
    o, state = built.chunk(**narrow, output_final_state=True, backend=backend)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = built.naive(**{n: x.double() for n, x in narrow.items()})
    assert relative_rms(o, exact) < 4e-3  # the rounding of o alone: everything in between is float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(built.chunk(**tensors, backend=backend)[0], built.chunk(**tensors, backend=backend)[0])
        inside = built.chunk(**tensors, backend=backend)[0]
    assert torch.equal(inside, built.chunk(**tensors, backend=backend)[0])


def test_checkpointing_gives_the_same_gradients() -> None:
    built = build("kda")
    keywords = option_sets(built.spec)[-1]
    tensors = draw(built, Sizes(T=40), **keywords)

    def checkpointed(**values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        names = [n for n, x in values.items() if isinstance(x, torch.Tensor)]
        rest = {n: x for n, x in values.items() if n not in names}
        call = lambda *xs: built.chunk(**dict(zip(names, xs, strict=True)), **rest)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(call, *(values[n] for n in names), use_reentrant=False)

    assert worst(run(checkpointed, tensors, **keywords), run(built.chunk, tensors, **keywords)) == (0.0, "o")


def test_the_compiler_of_torch_takes_it_whole() -> None:
    built = build("simple_gla")
    torch.compiler.reset()
    compiled = torch.compile(built.chunk, backend="eager", fullgraph=True)
    for length, scale in ((20, 0.5), (33, 0.7)):  # the second call traces a length and a scale that vary
        tensors = draw(built, Sizes(T=length))
        assert relative_rms(compiled(**tensors, scale=scale)[0], built.chunk(**tensors, scale=scale)[0]) < 1e-12
