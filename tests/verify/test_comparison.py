"""Verification itself: what it draws, and that it sees each kind of fault."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kcpgen.compiler import compile_spec
from kcpgen.emit.package import write
from kcpgen.verify.cases import Case, exact_cases
from kcpgen.verify.command import run
from kcpgen.verify.compare import DATA, EXACT, SENSITIVE, bound_of, compare, relative_rms
from kcpgen.verify.inputs import bearable_strength, contracting_signs, in_float64, make_inputs
from kcpgen.verify.op import Op, load_op

SPEC = """\
op probe "Probe"

token q, k : [H, K]
token v    : [HV, V]
token a, b : [H, K]
token c    : [HV, K]
token g    : [HV, K] log decay in [-3, 0]
token x    : [HV]
param bias : [HV, K]
constant floor

state S : [HV, K, V]

S[t] = (Diag(exp(g[t])) + b[t] a[t]^T - k[t] (c[t] ⊙ k[t])^T) S[t-1] + x[t] k[t] v[t]^T
o[t] = scale S[t]^T q[t]

option activate:
  g <- -softplus(g + bias)
  when floor:
    g <- floor * sigmoid(g + bias) in [floor, 0]
"""
SMALL = Case(label="small", backend="eager", dtype="float64", tokens=20, key_width=8, value_width=6)


@pytest.fixture(scope="module")
def op(tmp_path_factory: pytest.TempPathFactory) -> Op:
    home = tmp_path_factory.mktemp("probe")
    spec = home / "probe.kcp"
    spec.write_text(SPEC, encoding="utf-8")
    write(compile_spec(spec, home / "generated"), home / "generated")
    return load_op(home / "generated" / "probe")


def test_an_ops_own_package_says_how_to_draw_its_inputs(op: Op) -> None:
    assert op.description.log_decays == ("g",)
    assert op.description.bounds == {"g": (-3.0, 0.0)}
    assert op.description.rewrites == {"activate": {"": ("g",), "floor": ("g",)}}
    assert {(term.write, term.erase) for term in op.description.terms} == {(("b",), ("a",)), (("k",), ("k", "c"))}


def test_inputs_keep_promises_and_are_rounded_to_what_they_are_passed_in(op: Op) -> None:
    inputs = make_inputs(op, replace(SMALL, dtype="bfloat16", gates="spikes"), "cpu")
    g, x = inputs.tokens["g"], inputs.tokens["x"]
    assert (g.dtype, x.dtype) == (torch.float32, torch.bfloat16)
    assert g.min() == -3
    assert g.max() <= 0
    assert x.min() > 0
    assert x.max() < 1
    assert inputs.params == {}
    assert all(torch.equal(y, inputs.leaves[name].double()) for name, y in in_float64(inputs).leaves.items())


def test_an_options_parameters_are_drawn_with_it(op: Op) -> None:
    inputs = make_inputs(op, replace(SMALL, keywords={"activate": True, "floor": -2.0}), "cpu")
    assert list(inputs.params) == ["bias"]
    assert inputs.tokens["g"].max() > 0  # a raw activation


def test_erases_contract_the_state(op: Op) -> None:
    inputs = make_inputs(op, SMALL, "cpu")
    assert contracting_signs(op)["a"] == -1.0
    a, b = inputs.tokens["a"], inputs.tokens["b"]
    assert ((a * b).sum(-1) <= 0).all()
    assert (inputs.tokens["c"] > 0).all()


def test_repeated_keys_are_one_direction_in_whatever_erases_or_writes(op: Op) -> None:
    tokens = make_inputs(op, replace(SMALL, keys="repeated"), "cpu").tokens
    one = tokens["k"][:, :1, :1]
    for name, sign in (("k", 1), ("b", 1), ("a", -1)):
        cosines = torch.cosine_similarity(sign * tokens[name], one, dim=-1)
        assert cosines.min() > 0.98
    assert tokens["x"].mean() > 1.9
    assert 0.9 < tokens["c"].mean() < 1


@pytest.mark.parametrize(
    ("erases", "borne"),
    [
        ("I", (2.0, 2.0)),
        ("I - x[t] k[t] k[t]^T", (2.0, 2.0)),
        ("(I - x[t] k[t] k[t]^T) (I - y[t] b[t] b[t]^T)", (2.0, 2.0)),
        ("I - x[t] k[t] b[t]^T", (2.0, 1.0)),
        ("I - x[t] k[t] k[t]^T - y[t] b[t] b[t]^T", (1.0, 2.0)),
        ("I - b[t] k[t]^T - k[t] b[t]^T - x[t] k[t] k[t]^T", (0.5, 0.5)),
    ],
)
def test_erases_are_as_strong_as_a_state_bears(erases: str, borne: tuple[float, float], tmp_path: Path) -> None:
    name = f"strong_{zlib.crc32(erases.encode()):x}"  # an op is imported under its name, once a process
    declared = "".join(
        f"token {n} : {s}\n" for n, s in {"b": "[H, K]", "x": "[HV]", "y": "[HV]"}.items() if f"{n}[t]" in erases
    )
    text = f"op {name}\ntoken q, k : [H, K]\ntoken v : [HV, V]\n{declared}state S : [HV, K, V]\n"
    spec = tmp_path / "probe.kcp"
    spec.write_text(f"{text}S[t] = ({erases}) S[t-1] + k[t] v[t]^T\no[t] = scale S[t]^T q[t]\n", encoding="utf-8")
    write(compile_spec(spec, tmp_path / "generated"), tmp_path / "generated")
    op = load_op(tmp_path / "generated" / name)
    assert bearable_strength(op, contracting_signs(op)) == borne
    repeated = replace(SMALL, keys="repeated", tokens=70)
    assert compare(op, repeated, "cpu").ok


def test_a_case_draws_the_same_numbers_every_time(op: Op) -> None:
    first, second = make_inputs(op, SMALL, "cpu"), make_inputs(op, SMALL, "cpu")
    assert all(torch.equal(x, second.leaves[name]) for name, x in first.leaves.items())
    other = make_inputs(op, replace(SMALL, label="other"), "cpu")
    assert not torch.equal(first.tokens["q"], other.tokens["q"])


def test_the_right_op_passes_every_exact_case(op: Op) -> None:
    missed = [c.case.label for c in (compare(op, case, "cpu") for case in exact_cases(op, quick=True)) if not c.ok]
    assert missed == []


def spoiled(op: Op, spoil: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Op:
    def chunk(*args: Tensor, backend: str, **keywords: object) -> tuple[Tensor, Tensor]:
        return spoil(*op.chunk(*args, backend=backend, **keywords))

    return replace(op, chunk=chunk)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 1.001


FAULTS = {
    "an output off by 1e-8": lambda o, S: (o * (1 + 1e-8), S),
    "a wrong state": lambda o, S: (o, S + 1e-6),
    "one NaN": lambda o, S: (torch.cat([o[:, :1] * torch.nan, o[:, 1:]], 1), S),
    "a wrong shape": lambda o, S: (o[..., :-1], S),
    "a gradient alone": lambda o, S: (WrongGradient.apply(o), S),
    "a state that gives no gradient": lambda o, S: (o, S.detach() + 0 * o.sum()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(op: Op, fault: str) -> None:
    comparison = compare(spoiled(op, FAULTS[fault]), SMALL, "cpu")
    assert comparison.failure == "" or fault == "a wrong shape"  # seen in the numbers
    assert not comparison.ok


def test_what_the_op_raises_is_a_failure_of_its_case(op: Op) -> None:
    def chunk(**_: object) -> tuple[Tensor, Tensor]:
        raise RuntimeError("out of shared memory\nin detail")

    comparison = compare(replace(op, chunk=chunk), SMALL, "cpu")
    assert (comparison.ok, comparison.failure) == (False, "RuntimeError: out of shared memory")


def test_a_fault_in_one_short_sequence_is_seen(op: Op) -> None:
    packed = replace(SMALL, offsets=(0, 1, 1, 400), tokens=400, dtype="bfloat16")

    def spoil(o: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([o[:, :1] * 1.02, o[:, 1:]], 1), S

    assert compare(op, packed, "cpu").ok
    figures = {figure.tensor: figure for figure in compare(spoiled(op, spoil), packed, "cpu").figures}
    assert figures["o"].error < DATA  # hidden in the sum over all tokens
    assert not figures["o"].ok


def test_bounds_follow_the_roles(op: Op) -> None:
    bf16 = replace(SMALL, dtype="bfloat16")
    tensors = ("o", "final_state", "dq", "da", "dg", "dx", "dbias", "dinitial_state")
    found = {name: bound_of(op, bf16, name) for name in tensors}
    assert {name for name, bound in found.items() if bound == SENSITIVE} == {"dg", "dx", "dbias"}
    assert {bound for name, bound in found.items() if name not in ("dg", "dx", "dbias")} == {DATA}
    assert bound_of(op, SMALL, "o") == EXACT


def test_errors_are_relative_and_nan_never_passes() -> None:
    x = torch.ones(4, dtype=torch.float64)
    assert relative_rms(1.5 * x, x) == pytest.approx(0.5)
    assert relative_rms(0 * x, 0 * x) == 0
    assert not relative_rms(x * torch.nan, x) <= 1


def test_the_command_returns_1_when_a_bound_is_missed(
    op: Op, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("kcpgen.verify.command.load_op", lambda _: spoiled(op, lambda o, S: (2 * o, S)))
    assert run(op.directory, device="cpu", quick=True, json_path=tmp_path / "out.json") == 1
    assert "MISSED" in capsys.readouterr().out
    assert '"ok": false' in (tmp_path / "out.json").read_text(encoding="utf-8")


def test_several_processes_give_what_one_does(op: Op, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for jobs in (1, 2):
        assert run(op.directory, device="cpu", quick=True, json_path=None, jobs=jobs) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


def test_only_some_cases_are_run_and_none_is_an_error(op: Op, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = [case.label for case in exact_cases(op, quick=True)]
    assert run(op.directory, device="cpu", quick=True, json_path=None, only=(first, "nothing")) == 0
    shown = capsys.readouterr().out
    assert first in shown
    assert not any(label in shown for label in others if first not in label)
    assert run(op.directory, device="cpu", quick=True, json_path=None, only=("nothing",)) == 1
    assert "no case" in capsys.readouterr().out
