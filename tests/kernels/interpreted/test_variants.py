"""A parameter that one variant of an option reads is not there in the others."""

from __future__ import annotations

from pathlib import Path

from kcpgen.compiler import compile_spec
from kcpgen.emit.package import write
from kcpgen.verify.cases import Case, option_keywords
from kcpgen.verify.compare import compare
from kcpgen.verify.op import load_op

SPEC = """op varied "Two gates"
token q, k : [HV, K]
token v : [HV, V]
token g : [HV, K] log decay
token x : [HV]
param c : [HV, K]
param a : [HV]
flag twice
state S : [HV, K, V]
S[t] = Diag(exp(g)) (I - x k k^T) S[t-1] + x k v^T
o[t] = scale S[t]^T q
option gate: g <- -softplus(g)
    when twice: g <- -2 exp(a) softplus(g + c)
"""


def test_parameters_of_one_variant(tmp_path: Path) -> None:
    spec = tmp_path / "varied.kcp"
    spec.write_text(SPEC, encoding="utf-8")
    write(compile_spec(spec, tmp_path / "generated"), tmp_path / "generated")
    op = load_op(tmp_path / "generated" / "varied")
    labels = []
    for label, keywords in option_keywords(op):
        case = Case(
            label=label, backend="triton", dtype="float32", tokens=39, heads=1, value_heads=2, key_width=12,
            value_width=20, keywords=keywords,
        )  # fmt: skip
        found = compare(op, case, "cpu")
        assert found.ok, (label, found)
        labels.append(label)
    assert len(labels) == 2
