"""Wrong calls: each raises before anything runs, naming the argument, what came and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kcpgen.runtime.signature import Call, Signature

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 5
SIGNATURE = Signature(
    op="chunk_op",
    inputs={"q": "B T H K", "v": "B T HV V", "g": "B T HV K", "beta": "B T HV"},
    params={"A_log": "HV", "bias": "HV K", "always_read": "HV"},
    constants={"floor": 0.0, "free": float("inf")},
    flags=("negative",),
    options={
        "use_gate": {"": ("A_log", "bias"), "floor": ("A_log", "bias", "floor")},
        "use_beta": {"": (), "negative": ()},
        "use_free": {"": (), "free": ("free",)},
    },
    always=("always_read",),
)


def arguments() -> dict[str, Any]:
    return {
        "inputs": {
            "q": torch.zeros(B, T, H, K),
            "v": torch.zeros(B, T, HV, V),
            "g": torch.zeros(B, T, HV, K),
            "beta": torch.zeros(B, T, HV),
        },
        "params": {"A_log": None, "bias": None, "always_read": torch.zeros(HV)},
        "constants": {"floor": None, "free": None},
        "switches": {"use_gate": False, "use_beta": False, "use_free": False, "negative": False},
        "scale": None,
        "initial_state": None,
        "output_final_state": False,
        "cu_seqlens": None,
        "cu_seqlens_cpu": None,
        "backend": None,
    }


def check(**changes: Any) -> Call:
    """The call with some arguments changed, wherever they belong."""
    call = arguments()
    for name, value in changes.items():
        home = next((part for part in ("inputs", "params", "constants", "switches") if name in call[part]), None)
        (call[home] if home else call)[name] = value
    return SIGNATURE.check(**call)


def packed(*values: int, dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    """One row of six tokens, packed."""
    row = {name: x[:1] for name, x in arguments()["inputs"].items()}
    return {**row, "cu_seqlens": torch.tensor(values, dtype=dtype)}


GATE = {"use_gate": True, "A_log": torch.zeros(HV), "bias": torch.zeros(HV, K)}

TYPE, VALUE = TypeError, ValueError
ROW = packed(0, 6)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TYPE, "`q` is of type list; allowed: a torch.Tensor"),
    ({"beta": None}, TYPE, "`beta` is of type NoneType"),
    ({"q": torch.zeros(B, T, H, K, dtype=torch.int32)}, TYPE, "`q` is torch.int32; allowed: float16, bfloat16"),
    ({"q": torch.zeros(B, T, H, K, dtype=torch.complex64)}, TYPE, "`q` is torch.complex64"),
    ({"q": torch.zeros(B, T, H, K).to_sparse()}, TYPE, "`q` is stored as torch.sparse_coo"),
    ({"v": torch.zeros(B, T, HV, V, device="meta")}, VALUE, "`v` is on meta; allowed: cpu, where `q` is"),
    ({"q": torch.zeros(B, T, K)}, VALUE, r"`q` is of shape \[2, 6, 8\]; allowed: 4 dimensions \[B, T, H, K\]"),
    ({"beta": torch.zeros(B, T, HV, 1)}, VALUE, r"`beta` is of shape .*; allowed: 3 dimensions \[B, T, HV\]"),
    ({"v": torch.zeros(B, T + 1, HV, V)}, VALUE, r"`v` is of shape .*; allowed: .* with T = 6, as `q` has it"),
    ({"g": torch.zeros(B, T, HV, K + 1)}, VALUE, "`g` is of shape .*; allowed: .* with K = 8, as `q` has it"),
    ({"beta": torch.zeros(B, T, H)}, VALUE, "`beta` is of shape .*; allowed: .* with HV = 4, as `v` has it"),
    ({"q": torch.zeros(B, T, 3, K)}, VALUE, "`v` has HV = 4 heads; allowed: a multiple of H = 3.*`q`"),
    ({"q": torch.zeros(B, T, 0, K)}, VALUE, "`q` has H = 0 heads; allowed: at least one"),
    ({"v": torch.zeros(B, T, HV, 0)}, VALUE, "`v` has V = 0; allowed: V from 1 to 256"),
    ({"v": torch.zeros(B, T, HV, 257)}, VALUE, "`v` has V = 257; allowed: V from 1 to 256"),
    ({"scale": "1"}, TYPE, "`scale` is of type str; allowed: a Python number"),
    ({"scale": torch.ones(())}, TYPE, "`scale` is of type Tensor"),
    ({"scale": float("nan")}, VALUE, "`scale` is nan; allowed: a finite number"),
    ({"output_final_state": 1}, TYPE, "`output_final_state` is of type int; allowed: True or False"),
    ({"initial_state": torch.zeros(B, HV, V, K)}, VALUE, r"`initial_state` is .*\[N, HV, K, V\] = \[2, 4, 8, 5\]"),
    ({"initial_state": torch.zeros(1, HV, K, V)}, VALUE, "`initial_state` is of shape"),
    ({"initial_state": torch.zeros(B, HV, K, V).long()}, TYPE, "`initial_state` is torch.int64"),
    ({"cu_seqlens": [0, 6]}, TYPE, "`cu_seqlens` is of type list"),
    ({"cu_seqlens": torch.tensor([0, 6])}, VALUE, "`cu_seqlens` is given with a batch of B = 2; allowed: .*B = 1"),
    ({**ROW, "cu_seqlens": torch.tensor([0.0, 6.0])}, TYPE, "`cu_seqlens` is torch.float32; allowed: int32"),
    ({**ROW, "cu_seqlens": torch.tensor([[0, 6]])}, VALUE, r"`cu_seqlens` is of shape \[1, 2\]; allowed: \[N"),
    ({**packed(0), "cu_seqlens": torch.tensor([0])}, VALUE, r"`cu_seqlens` is of shape \[1\]"),
    (packed(1, 6), VALUE, "`cu_seqlens` starts at 1; allowed: a start at 0"),
    (packed(0, 4, 2, 6), VALUE, "`cu_seqlens` falls from 4 to 2 at sequence 1"),
    (packed(0, 5), VALUE, "`cu_seqlens` ends at 5; allowed: an end at T = 6"),
    (packed(0, 7), VALUE, "`cu_seqlens` ends at 7"),
    ({**ROW, "cu_seqlens": torch.tensor([0, 6], device="meta")}, VALUE, "`cu_seqlens` is on meta; allowed: cpu"),
    ({**ROW, "initial_state": torch.zeros(2, HV, K, V)}, VALUE, r"`initial_state` is .* = \[1, 4, 8, 5\]"),
    ({"cu_seqlens_cpu": torch.tensor([0, 6])}, VALUE, "`cu_seqlens_cpu` is given without `cu_seqlens`"),
    ({**ROW, "cu_seqlens_cpu": torch.tensor([0, 3, 6])}, VALUE, "`cu_seqlens_cpu` is different from `cu_seq"),
    ({**packed(0, 2, 6), "cu_seqlens_cpu": torch.tensor([0, 3, 6])}, VALUE, "`cu_seqlens_cpu` is different"),
    ({**ROW, "cu_seqlens_cpu": torch.tensor([0, 6], device="meta")}, VALUE, "`cu_seqlens_cpu` is on meta"),
    ({"use_gate": 1}, TYPE, "`use_gate` is of type int; allowed: True or False"),
    ({"use_gate": None}, TYPE, "`use_gate` is of type NoneType"),
    ({"negative": "yes"}, TYPE, "`negative` is of type str"),
    ({"use_gate": True}, VALUE, "`A_log` is None; allowed: a tensor, because use_gate=True reads"),
    ({"use_gate": True, "A_log": torch.zeros(HV)}, VALUE, "`bias` is None"),
    ({"A_log": torch.zeros(HV)}, VALUE, "`A_log` is given, but nothing reads it; allowed: only with use_gate"),
    ({"floor": -1.0}, VALUE, "`floor` is given, but nothing reads it; allowed: only with use_gate"),
    ({"negative": True}, VALUE, "`negative` is given, but nothing reads it; allowed: only with use_beta=True"),
    ({"always_read": None}, VALUE, "`always_read` is None; allowed: a tensor, because the equation reads it"),
    ({**GATE, "floor": "-5"}, TYPE, "`floor` is of type str; allowed: a Python number"),
    ({**GATE, "floor": True}, TYPE, "`floor` is of type bool"),
    ({**GATE, "floor": 0.5}, VALUE, "`floor` is 0.5; allowed: a number of at most 0"),
    ({**GATE, "floor": -float("inf")}, VALUE, "`floor` is -inf; allowed: a finite number"),
    ({**GATE, "A_log": torch.zeros(HV, 1)}, VALUE, r"`A_log` is of shape \[4, 1\]; allowed: \[HV\] = \[4\]"),
    ({**GATE, "bias": torch.zeros(K, HV)}, VALUE, r"`bias` is of shape \[8, 4\]; allowed: \[HV, K\] = \[4, 8\]"),
    ({**GATE, "bias": torch.zeros(HV * K + 1)}, VALUE, "`bias` is of shape"),
    ({**GATE, "A_log": torch.zeros(HV, device="meta")}, VALUE, "`A_log` is on meta"),
    ({**GATE, "A_log": 1.0}, TYPE, "`A_log` is of type float"),
    ({"backend": "cuda"}, VALUE, "`backend` is 'cuda'; allowed: None, 'triton', 'eager', 'naive'"),
    ({"backend": "Eager"}, VALUE, "`backend` is 'Eager'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_a_wrong_call_names_the_argument(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^chunk_op: {message}"):
        check(**changes)


RIGHT: list[dict[str, Any]] = [
    {},
    {"q": torch.zeros(B, T, H, K, dtype=torch.bfloat16), "v": torch.zeros(B, T, HV, V, dtype=torch.float16)},
    {"q": torch.zeros(B, T, HV, K)},
    {"scale": 1},
    {"initial_state": torch.zeros(B, HV, K, V, dtype=torch.bfloat16)},
    packed(0, 6),
    packed(0, 0, 3, 3, 6, 6, dtype=torch.int32),
    {**packed(0, 2, 6), "cu_seqlens_cpu": torch.tensor([0, 2, 6], dtype=torch.int32)},
    {**GATE},
    {**GATE, "floor": 0},
    {**GATE, "floor": -5.0, "use_beta": True, "negative": True},
    {"use_free": True, "free": 1e9},
    {**GATE, "bias": torch.zeros(HV * K)},
    {"backend": "naive"},
]


@pytest.mark.parametrize("changes", RIGHT, ids=lambda changes: ",".join(changes) or "plain")
def test_a_right_call_passes(changes: dict[str, Any]) -> None:
    call = check(**changes)
    assert call.backend == changes.get("backend", "eager")
    assert call.scale == (1.0 if "scale" in changes else K**-0.5)
    if "bias" in changes:
        assert call.params["bias"].shape == (HV, K)
    if "cu_seqlens" in changes:
        assert call.cu_seqlens == tuple(changes["cu_seqlens"].tolist())


def test_no_check_reads_a_tensor_but_offsets() -> None:
    """Shapes, dtypes and devices decide: on a GPU a call must not wait for data."""
    inputs = {name: x.to("meta") for name, x in arguments()["inputs"].items()}
    call = check(**inputs, always_read=torch.zeros(HV, device="meta"))
    assert call.backend == "eager"


def test_packed_offsets_come_from_the_host_copy_when_there_is_one() -> None:
    row = {name: x.to("meta") for name, x in packed(0, 2, 6).items()}  # reading a meta tensor would raise
    host = torch.tensor([0, 2, 6])
    assert check(**row, always_read=torch.zeros(HV, device="meta"), cu_seqlens_cpu=host).cu_seqlens == (0, 2, 6)


@pytest.mark.parametrize("interpreted", [False, True])
def test_triton_on_a_cpu_needs_the_interpreter(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    if interpreted:
        assert check(backend="triton").backend == "triton"
    else:
        with pytest.raises(
            RuntimeError, match="`backend` 'triton' needs CUDA tensors, got tensors on cpu; allowed here"
        ):
            check(backend="triton")


def test_triton_refuses_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TypeError, match="`backend` 'triton' takes float16, bfloat16 and float32, got float64"):
        check(backend="triton", g=torch.zeros(B, T, HV, K, dtype=torch.float64))


def test_triton_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[str], None] = lambda name: None  # noqa: E731
    monkeypatch.setattr("kcpgen.runtime.backends.importlib.util.find_spec", find)
    with pytest.raises(ImportError, match="needs the triton package, which is not installed"):
        check(backend="triton")


def test_no_token_needs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    empty = {name: x[:, :0] for name, x in arguments()["inputs"].items()}
    assert check(**empty, backend="triton").backend == "eager"


def test_messages_are_one_line() -> None:
    for changes, kind, _ in WRONG:
        with pytest.raises(kind) as caught:
            check(**changes)
        assert re.fullmatch(r"chunk_op: `\w+` .+", str(caught.value))
