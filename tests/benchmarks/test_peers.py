"""What peers are asked, and what they cannot be asked; with stand-ins for the packages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.harness import calls
from benchmarks.harness.inputs import BOUND, draw, gate_kinds
from benchmarks.harness.shapes import parse
from kcpgen.verify.op import load_op

ROOT = Path(__file__).resolve().parent.parent.parent
OPS = sorted(calls.FLA.entries)


@pytest.fixture
def peer_modules(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every peer is importable; its functions note their keywords."""
    noted: list[tuple[str, dict[str, Any]]] = []

    def function(name: str) -> Any:
        def stand_in(**keywords: Any) -> tuple[Any, None]:
            noted.append((name, keywords))
            return keywords["v"], None

        return stand_in

    for peer in calls.PEERS:
        monkeypatch.setitem(sys.modules, peer.module, ModuleType(peer.module))
        for entry in peer.entries.values():
            module = ModuleType(entry.module)
            setattr(module, entry.function, function(entry.function))
            monkeypatch.setitem(sys.modules, entry.module, module)
    return noted


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", ["2x40x2:16", "[30,10]x2:16"])
def test_a_peer_gets_the_same_inputs_by_the_same_names(
    name: str, shape: str, peer_modules: list[tuple[str, dict[str, Any]]]
) -> None:
    op = load_op(ROOT / "generated" / name)
    for gates in gate_kinds(op):
        arguments = draw(op, parse(shape), gates, "cpu")
        calls.peer_call(calls.FLA, name, arguments)()
        _, keywords = peer_modules.pop()
        assert all(keywords[n] is x for n, x in arguments.tokens.items())
        assert ("cu_seqlens" in keywords) is ("cu_seqlens_cpu" in keywords) is shape.startswith("[")
        assert keywords.get("lower_bound") == (BOUND if gates == "bounded" else None)
        assert bool(keywords.get("use_gate_in_kernel")) is (gates == "bounded")


def test_parameters_reach_a_peer_flat_with_their_gradient(peer_modules: list[tuple[str, dict[str, Any]]]) -> None:
    arguments = draw(load_op(ROOT / "generated" / "kda"), parse("1x20x2:16"), "bounded", "cpu")
    calls.peer_call(calls.FLA, "kda", arguments)()
    given = peer_modules[0][1]["dt_bias"]
    assert given.shape == (32,)
    assert torch.autograd.grad(given.sum(), arguments.params["dt_bias"])[0].shape == (2, 16)


def test_a_peer_that_is_there_is_told_to_keep_to_triton(peer_modules: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH", raising=False)
    assert calls.absence(calls.FLA) == ""
    assert os.environ["FLA_DISABLE_BACKEND_DISPATCH"] == "1"


def test_an_absent_peer_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    assert "flash_qla" in calls.absence(calls.FLASH_QLA)


@pytest.mark.parametrize(
    ("peer", "op", "shape", "bound", "why"),
    [
        (calls.FLASH_QLA, "gdn", "1x64x2:64", None, "only K = V = 128"),
        (calls.FLASH_QLA, "kda", "1x64x2", None, "has no kda"),
        (calls.FLA, "gla", "1x64x2/4", None, "no grouped heads"),
        (calls.FLA, "dplr", "1x64x2", BOUND, "no bounded gate"),
        (calls.FLA, "gdn", "1x64x2/4", None, ""),
        (calls.FLA, "kda", "1x64x2", BOUND, ""),
    ],
)
def test_what_a_peer_cannot_do(peer: calls.Peer, op: str, shape: str, bound: float | None, why: str) -> None:
    found = peer.unsupported(op, parse(shape), bound)
    assert why in found
    assert bool(found) is bool(why)
