"""The chunked torch form against the per-token reference, in float64: outputs, states and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch_ops import MADE, OPS, SPECS, Sizes, build, build_spec, draw, option_sets, run, worst

from kcpgen.language import parse

EXACT = 1e-10
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65)
OPTIONS = [(path.stem, keywords) for path in SPECS for keywords in option_sets(parse(path.read_text(), str(path)))[1:]]


def deviation(name: str, sizes: Sizes, **keywords: object) -> tuple[float, str]:
    built = build(name)
    options = {key: value for key, value in keywords.items() if key not in ("chunk_size", "cu_seqlens")}
    tensors = draw(built, sizes, **options)
    plain = {key: value for key, value in keywords.items() if key != "chunk_size"}
    return worst(run(built.eager, tensors, **keywords), run(built.naive, tensors, **plain))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", OPS)
def test_agrees_at_every_length(name: str, length: int) -> None:
    assert deviation(name, Sizes(B=2, T=length)) < (EXACT,)


@pytest.mark.parametrize("name", MADE)
def test_agrees_for_forms_no_paper_has(name: str) -> None:
    assert deviation(name, Sizes(T=19), chunk_size=8) < (EXACT,)


@pytest.mark.parametrize(
    ("name", "keywords"), OPTIONS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x))
)
def test_agrees_with_options(name: str, keywords: dict[str, object]) -> None:
    assert deviation(name, Sizes(T=18, H=2, HV=4), **keywords) < (EXACT,)


@pytest.mark.parametrize("name", OPS)
def test_agrees_for_packed_sequences(name: str) -> None:
    offsets = (0, 0, 1, 20, 20, 37, 40, 40)  # empty at the start, in the middle and at the end
    assert deviation(name, Sizes(T=40, sequences=7), cu_seqlens=offsets) < (EXACT,)


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("name", OPS)
def test_does_not_depend_on_the_chunk_size(name: str, chunk_size: int) -> None:
    assert deviation(name, Sizes(T=33, V=7), chunk_size=chunk_size) < (EXACT,)


@pytest.mark.parametrize("name", [*OPS, *MADE])
def test_gradcheck(name: str) -> None:
    built = build(name)
    keywords = option_sets(built.spec)[-1]
    tensors = draw(built, Sizes(T=5, K=3, V=2), **keywords)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(tensors, values, strict=True))
        return built.eager(**named, output_final_state=True, chunk_size=3, **keywords)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()), fast_mode=len(tensors) > 9)


@pytest.mark.parametrize("name", OPS)
def test_losses_on_one_output_alone(name: str) -> None:
    built = build(name)
    tensors = draw(built, Sizes(T=18))
    for index in (0, 1):
        grads = [
            torch.autograd.grad(
                f(**tensors, output_final_state=True)[index].square().sum(), [*tensors.values()], allow_unused=True
            )
            for f in (built.eager, built.naive)
        ]
        named = [
            {n: torch.zeros(1) if g is None else g for n, g in zip(tensors, found, strict=True)} for found in grads
        ]
        assert worst(*named) < (EXACT,)


# (text of the eager file, a wrong one): each must be seen, or the comparisons above say nothing.
FAULTS = [
    ("U0_0 + W_0 @ S", "U0_0 - W_0 @ S"),
    ("q_in @ S + A_0", "q_in @ S - A_0"),
    ("(read, write_0, D)", "(read, write_0, D).tril(-1)"),
    ("runtime.inverse([[L_0_0]])", "runtime.inverse([[-L_0_0]])"),
    ("decay_out * S", "S"),
    ("exp(R) * write_0", "write_0"),
    ("exp(G) * read", "read"),
    ("-beta * k", "beta * k"),
    ("exp(G) * erase_0", "erase_0"),
    ("beta * v", "v"),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_a_planted_fault_is_seen(right: str, wrong: str) -> None:
    built = build("kda")
    assert right in built.sources["eager.py"]
    broken = build_spec(built.spec, lambda name, text: text.replace(right, wrong) if name == "eager.py" else text)
    tensors = draw(built, Sizes(T=18, H=2, HV=4))
    error, _ = worst(run(broken.eager, tensors), run(built.naive, tensors))
    assert error > 1e-4
