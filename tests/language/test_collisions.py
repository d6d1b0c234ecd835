"""Names that generated code uses itself are found before they can shadow anything, and only those."""

from __future__ import annotations

import pytest

from kcpgen.diagnostics import SpecError
from kcpgen.emit.collisions import check_collisions
from kcpgen.language import parse
from kcpgen.spec import Spec

TEXT = """op ours "Ours"
token q, k : [H, K]
token v : [HV, V]
token NAME : [HV] log decay
param p : [HV]
flag f
state S : [HV, K, V]
S[t] = exp(NAME[t]) S[t-1] + k[t] v[t]^T
o[t] = scale S[t]^T q[t]
option gate:
  NAME <- p NAME
  when f: NAME <- 2 NAME
"""


def emitted(spec: Spec) -> dict[str, str]:
    """A module in the manner of the templates: variables of its own, others derived from the spec's names."""
    q, *_, g = (given.name for given in spec.inputs)
    kernel = f"def kernel({q}_ptr, {g}_ptr):\n    tile = load({q}_ptr)\n    d{g} = tile + {g}\n    return d{g}, dA\n"
    return {
        "kernel.py": f"from runtime import load\n{kernel}",
        "op.py": f"def run({q}, {g}, {spec.options[0].name}, {spec.flags[0]}):\n    x = {q}\n    return x\n",
    }


@pytest.mark.parametrize("name", ["tile", "load", "A", "x", "run", "kernel"])
def test_found(name: str) -> None:
    with pytest.raises(SpecError) as rejected:
        check_collisions(parse(TEXT.replace("NAME", name), "ours.kcp"), emitted)
    (diagnostic,) = rejected.value.diagnostics
    assert diagnostic.code == "KCP124"
    assert (diagnostic.span.line, diagnostic.span.column) == (4, 7)


@pytest.mark.parametrize("name", ["g", "N", "B_", "tiles", "runtime_", "E"])
def test_not_found(name: str) -> None:
    check_collisions(parse(TEXT.replace("NAME", name), "ours.kcp"), emitted)


def test_names_of_the_spec_may_meet_each_other() -> None:
    with pytest.raises(SpecError, match="`q_ptr`"):
        check_collisions(parse(TEXT.replace("NAME", "q_ptr"), "ours.kcp"), clashing)


def clashing(spec: Spec) -> dict[str, str]:
    q, *_, g = (given.name for given in spec.inputs)
    return {"op.py": f"def run({q}, {g}):\n    return {q}_ptr, {g}\n"}
