"""Kernels have no second derivative, and say so instead of giving a wrong one."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from generated.delta_rule import chunk_delta_rule
x = {n: torch.rand(1, 5, 1, 4, requires_grad=True) for n in "qkv"}
o, _ = chunk_delta_rule(**x, beta=torch.rand(1, 5, 1), backend="triton")
try:
    torch.autograd.grad(o.sum(), x["q"], create_graph=True)
except RuntimeError as error:
    print(error)
"""


def test_a_second_derivative_is_refused() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    assert "no gradients of gradients on Triton; backend='eager' has them" in ran.stdout
