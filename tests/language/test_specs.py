"""The specs that come with the compiler: the inputs, options and defaults their users know."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcpgen.language import format_spec, load, parse
from kcpgen.language.check import shape_of
from kcpgen.language.format import without_spans
from kcpgen.language.reads import nodes

SPECS = Path(__file__).resolve().parents[2] / "specs"
QK = {"q": "H,K", "k": "H,K"}
INPUTS = {
    "gdn": {**QK, "v": "HV,V", "g": "HV", "beta": "HV"},
    "kda": {**QK, "v": "HV,V", "g": "HV,K", "beta": "HV"},
    "dplr": {**QK, "v": "HV,V", "a": "H,K", "b": "H,K", "gk": "HV,K"},
    "delta_rule": {**QK, "v": "HV,V", "beta": "HV"},
    "gla": {**QK, "v": "HV,V", "g": "HV,K"},
    "simple_gla": {**QK, "v": "HV,V", "g": "HV"},
    "gdn2": {**QK, "v": "HV,V", "g": "HV,K", "b": "HV,K", "w": "HV,V"},
    "comba": {**QK, "v": "HV,V", "p": "H,K", "g": "HV", "beta": "HV"},
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name: str) -> None:
    spec = load(SPECS / f"{name}.kcp")
    shapes = {given.name: ",".join(filter(None, (given.heads, given.axis))) for given in spec.inputs}
    assert spec.name == name
    assert list(shapes.items()) == list(INPUTS[name].items())
    decays = [given.name for given in spec.inputs if given.role == "log_decay"]
    assert decays == [given for given in shapes if given in ("g", "gk")]


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.kcp")), ids=lambda path: path.stem)
def test_prints_back(path: Path) -> None:
    spec = load(path)
    assert without_spans(parse(format_spec(spec), "again.kcp")) == without_spans(spec)
    assert len(spec.text.splitlines()) <= 40  # one screen


def test_without_a_title_the_name_is_the_title() -> None:
    titled = load(SPECS / "gdn.kcp")
    spec = parse(titled.text.replace(f' "{titled.title}"', ""), "untitled.kcp")
    assert spec.title == "gdn"
    assert format_spec(spec).startswith("op gdn\n")
    assert without_spans(parse(format_spec(spec), "again.kcp")) == without_spans(spec)


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.kcp")), ids=lambda path: path.stem)
def test_every_node_has_a_shape_and_a_place(path: Path) -> None:
    spec = load(path)
    lines = spec.text.split("\n")
    for expr in (spec.update, spec.readout):
        for node in nodes(expr):
            assert set(shape_of(node, spec.shapes)) <= {"1", "K", "V"}
            assert lines[node.span.line - 1][node.span.column - 1 : node.span.end_column - 1].strip()


def test_gate_and_its_lower_bound() -> None:
    spec = load(SPECS / "kda.kcp")
    (gate,) = (option for option in spec.options if option.name == "use_gate_in_kernel")
    plain, bounded = gate.variants
    assert (plain.when, bounded.when) == ("", "lower_bound")
    assert plain.rewrites[0].bounds is None
    assert bounded.rewrites[0].bounds is not None
    assert (bounded.rewrites[0].bounds.low_constant, bounded.rewrites[0].bounds.high) == ("lower_bound", 0.0)
    assert [constant.name for constant in spec.constants] == ["lower_bound"]
    assert spec.flags == ("allow_neg_eigval",)
    assert [(param.name, param.axis) for param in spec.params] == [("A_log", ""), ("dt_bias", "K")]
