"""The public function: its signature and documentation, and names a spec may use without harm."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch_ops import OPS, Sizes, build, build_spec, draw, option_sets, run, worst

from kcpgen.language import parse

COMMON = ["scale", "initial_state", "output_final_state", "cu_seqlens", "cu_seqlens_cpu", "backend"]

# Names that generated code uses too, or might.
CLASHING = """op call "Names that generated code uses too"
token partial, tokens : [H, K]
token Tensor, SIGNATURE : [HV, V]
token G : [HV, K] log decay
token values, X : [HV]
param shared : [HV, K]
param chunked, Signature : [HV]
constant by_sequence
flag Sequence
state o : [HV, K, V]
o[t] = (I - values (shared .* tokens) tokens^T) Diag(exp(G)) o[t-1] + chunked values tokens (Tensor + X SIGNATURE)^T
S[t] = scale o[t]^T partial
option check:
  G <- -exp(Signature) softplus(G)
  when by_sequence:
    G <- by_sequence * sigmoid(G)
option chunks:
  values <- sigmoid(values)
  when Sequence:
    values <- values / 2
"""


@pytest.mark.parametrize("name", OPS)
def test_signature(name: str) -> None:
    built = build(name)
    parameters = inspect.signature(built.chunk).parameters
    tokens = [declared.name for declared in built.spec.inputs]
    assert list(parameters)[: len(tokens) + len(COMMON)] == tokens + COMMON
    assert all(parameters[n].default is inspect.Parameter.empty for n in tokens)
    rest = list(parameters)[len(tokens) + len(COMMON) :]
    assert all(parameters[n].kind is inspect.Parameter.KEYWORD_ONLY for n in rest)
    declared = {*(o.name for o in built.spec.options), *built.spec.flags}
    declared |= {p.name for p in (*built.spec.params, *built.spec.constants)}
    assert {*rest} == {*declared, "cp_context"}
    for function in (built.eager, built.naive):
        own = inspect.signature(function).parameters
        assert [n for n in own if n != "chunk_size"] == [
            n for n in parameters if n not in ("cu_seqlens_cpu", "backend", "cp_context")
        ]


@pytest.mark.parametrize("name", OPS)
def test_documentation_names_every_argument_and_the_equation(name: str) -> None:
    built = build(name)
    text = inspect.getdoc(built.chunk) or ""
    assert "S[t] = " in text
    assert "o[t] = " in text
    for argument in inspect.signature(built.chunk).parameters:
        assert f" {argument}: " in text, argument


@pytest.mark.parametrize("name", OPS)
def test_an_unknown_keyword_raises(name: str) -> None:
    built = build(name)
    tensors = draw(built, Sizes(T=3))
    for function in (built.chunk, built.eager, built.naive):
        with pytest.raises(TypeError, match="cu_seqlen'"):
            function(**tensors, cu_seqlen=None)


@pytest.mark.parametrize("name", OPS)
def test_backends_agree_and_are_called_with_checked_arguments(name: str) -> None:
    built = build(name)
    keywords = option_sets(built.spec)[-1]
    tensors = draw(built, Sizes(T=21), **keywords)
    flat = {n: x.detach().reshape(-1) if n in {p.name for p in built.spec.params} else x for n, x in tensors.items()}
    expected = run(built.naive, tensors, **keywords)
    assert worst(run(built.chunk, tensors, **keywords), expected) < (1e-10,)
    assert worst(run(built.chunk, tensors, backend="naive", **keywords), expected) == (0.0, "o")
    assert torch.equal(built.chunk(**flat, **keywords)[0], built.chunk(**tensors, **keywords)[0])
    assert built.chunk(**tensors, **keywords)[1] is None
    with pytest.raises(RuntimeError, match="`backend` 'triton' needs CUDA tensors"):
        built.chunk(**{n: x.detach().float() for n, x in tensors.items()}, backend="triton", **keywords)


def test_names_of_a_spec_do_not_clash_with_generated_ones() -> None:
    built = build_spec(parse(CLASHING, "clashing.kcp"))
    for keywords in option_sets(built.spec):
        tensors = draw(built, Sizes(T=11), **keywords)
        assert worst(run(built.chunk, tensors, **keywords), run(built.naive, tensors, **keywords)) < (1e-10,)
