"""A backward on Triton inside torch's checkpoints, both kinds, in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """
import torch
from torch.utils.checkpoint import checkpoint
from kcpgen.verify.op import load_op
from tests.conftest import ROOT

chunk = load_op(ROOT / "generated" / "gdn").chunk
draw = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 33, 1, 16, generator=draw) for _ in range(3))
g, beta = -torch.rand(1, 33, 1, generator=draw), torch.rand(1, 33, 1, generator=draw)
inputs = [x.requires_grad_() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, g, beta)]


def call(*tensors):
    return chunk(*tensors, backend="triton")[0]


def gradients(o):
    for x in inputs:
        x.grad = None
    o.square().sum().backward()
    return [x.grad for x in inputs]


plain = gradients(call(*inputs))
found = gradients(checkpoint(call, *inputs, use_reentrant={reentrant}))
assert all(map(torch.equal, found, plain))
"""


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_call_has_the_same_gradients(reentrant: bool) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    script = SCRIPT.replace("{reentrant}", str(reentrant))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
