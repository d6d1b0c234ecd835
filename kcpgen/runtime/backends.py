"""Which implementation answers a call. A backend that cannot is an error with a reason, never another backend."""

from __future__ import annotations

import importlib.util
import os

import torch

BACKENDS = ("triton", "eager", "naive")
INTERPRETER = "TRITON_INTERPRET"


def choose(op: str, backend: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str:
    """The backend's name: the one asked for, or "triton" on CUDA and "eager" elsewhere.

    Raises ValueError for an unknown name, ImportError or RuntimeError when the backend is not available here, and
    TypeError for float64 tensors on Triton.
    """
    if backend is None:
        backend = "triton" if device.type == "cuda" else "eager"
    if backend not in BACKENDS:
        raise ValueError(f"{op}: `backend` is {backend!r}; allowed: None, {', '.join(map(repr, BACKENDS))}")
    if backend == "triton":
        _require_triton(op, device, dtypes)
    return backend


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels; those in Gluon it cannot."""
    return os.environ.get(INTERPRETER) == "1"


def _require_triton(op: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"{op}: `backend` 'triton' needs the triton package, which is not installed; 'eager' needs torch only"
        )
    if device.type != "cuda" and not interpreting():
        raise RuntimeError(
            f"{op}: `backend` 'triton' needs CUDA tensors, got tensors on {device}; "
            f"allowed here: 'eager', 'naive', or {INTERPRETER}=1 in the environment for Triton's interpreter"
        )
    if torch.float64 in dtypes:
        raise TypeError(
            f"{op}: `backend` 'triton' takes float16, bfloat16 and float32, got float64; "
            "allowed with it: 'eager', 'naive'"
        )
