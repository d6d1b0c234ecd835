"""A generated op in use: forward, backward, and how far both are from the per-token float64 reference.

Exits with 1 where an error is over its bound.

python examples/demo.py          (after: kcpgen build specs/kda.kcp)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid, normalize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from generated.kda import chunk_kda, naive_recurrent_kda

device, dtype, T = ("cuda", torch.bfloat16, 2048) if torch.cuda.is_available() else ("cpu", torch.float32, 256)
B, H, K, V = 1, 4, 64, 64

torch.manual_seed(0)
q, k = (normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(2))
inputs = {
    "q": q.to(dtype),
    "k": k.to(dtype),
    "v": torch.randn(B, T, H, V).to(dtype),
    "g": logsigmoid(torch.randn(B, T, H, K)),  # natural log of the decay: fp32, at most 0
    "beta": torch.sigmoid(torch.randn(B, T, H)),
    "initial_state": torch.randn(B, H, K, V),
}
inputs = {name: x.to(device).requires_grad_() for name, x in inputs.items()}
exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}


def run(op, arguments):
    """Outputs and gradients of one training step's worth of op."""
    o, final_state = op(**arguments, output_final_state=True)
    (o.double().square().mean() + final_state.double().square().mean()).backward()
    return {"o": o, "final_state": final_state, **{f"d{name}": x.grad for name, x in arguments.items()}}


def bound(name):
    """What `kcpgen verify` allows: gradients of decays and gates sum over a head, so they may be a little worse."""
    if dtype == torch.float32:
        return 1e-4
    return 8e-3 if name in ("dg", "dbeta") else 5e-3


found, expected = run(chunk_kda, inputs), run(naive_recurrent_kda, exact)
print(f"chunk_kda on {device}, {str(dtype).removeprefix('torch.')}, B={B} T={T} H={H} K={K} V={V}")
print(f"{'tensor':<16}{'relative error':>16}{'bound':>10}")
missed = []
for name, x in found.items():
    error = (x.detach().double() - expected[name].detach()).norm() / expected[name].detach().norm()
    print(f"{name:<16}{error.item():>16.1e}{bound(name):>10.0e}")
    if not error.item() <= bound(name):
        missed.append(name)
if missed:
    sys.exit(f"too far from the reference: {', '.join(missed)}")
