"""Ops nobody has published come out right by the same code: kernels included, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

READ = "o[t] = scale S[t]^T q[t]"
FORMS = {
    "two erases and two writes": (
        "token q, k, a, b : [H, K]\ntoken v, u : [HV, V]\ntoken g : [HV, K] log decay\ntoken x : [HV]",
        "S[t] = (Diag(exp(g[t])) + b[t] a[t]^T - x[t] k[t] k[t]^T) S[t-1] + x[t] k[t] v[t]^T + b[t] u[t]^T",
        READ,
    ),
    "an erase before the decay": (
        "token q, k : [H, K]\ntoken v : [HV, V]\ntoken g : [HV, K] log decay\ntoken x : [HV]",
        "S[t] = Diag(exp(g[t])) S[t-1] + x[t] k[t] (v[t] - S[t-1]^T k[t])^T",
        READ,
    ),
    "no decay, two writes": (
        "token q, k, p : [H, K]\ntoken v, w : [HV, V]",
        "S[t] = S[t-1] + k[t] v[t]^T + p[t] w[t]^T",
        READ,
    ),
    "keys per value head, gates per head": (
        "token q, k : [HV, K]\ntoken v : [HV, V]\ntoken g : [H] log decay\ntoken x : [H]",
        "S[t] = exp(g[t]) (I - x[t] k[t] k[t]^T) S[t-1] + x[t] k[t] v[t]^T",
        READ,
    ),
    "parameters in the update": (
        "token q, k, p : [H, K]\ntoken v, z : [HV, V]\ntoken g : [HV] log decay\ntoken x, y : [HV]\n"
        "param m : [HV]\nparam n : [HV, K]\nparam r : [HV, V]",
        "S[t] = exp(g[t]) S[t-1] + sigmoid(m) ((k[t] + x[t] p[t]) ⊙ n) (sigmoid(z[t]) ⊙ v[t] / (1 + y[t]) + r)^T",
        READ,
    ),
    "norms and reductions": (
        "token q, k : [H, K]\ntoken v : [HV, V]\ntoken g : [HV, K] log decay\ntoken x : [HV]",
        "S[t] = (I - x[t] l2norm(k[t]) l2norm(k[t])^T) Diag(exp(g[t])) S[t-1]"
        " + x[t] l2norm(k[t]) (v[t] / sqrt(1 + sum(v[t] ⊙ v[t])))^T",
        READ,
    ),
    "a decay per head times one per channel": (
        "token q, k : [H, K]\ntoken v : [HV, V]\ntoken g : [HV, K] log decay\ntoken f : [HV] log decay\ntoken x : [HV]",
        "S[t] = exp(f[t]) (I - x[t] k[t] k[t]^T) Diag(exp(g[t])) S[t-1] + x[t] k[t] v[t]^T",
        READ,
    ),
    "a product of two reflections": (
        "token q, k, p : [H, K]\ntoken v : [HV, V]\ntoken g : [HV] log decay\ntoken x, y : [HV]",
        "S[t] = (I - x[t] k[t] k[t]^T) (I - y[t] p[t] p[t]^T) exp(g[t]) S[t-1] + k[t] v[t]^T",
        READ,
    ),
    "a mixed readout": (
        "token q, k, p : [H, K]\ntoken v : [HV, V]\ntoken g : [HV] log decay\ntoken x : [HV]",
        "S[t] = exp(2 g[t]) S[t-1] + k[t] v[t]^T",
        "o[t] = scale S[t]^T (q[t] ⊙ sigmoid(p[t]) + x[t] k[t])",
    ),
    "a promised gate": (
        "token q, k : [H, K]\ntoken v : [HV, V]\ntoken g : [HV, K] log decay in [-5, 0]\ntoken x : [HV]",
        "S[t] = (I - x[t] k[t] k[t]^T) Diag(exp(g[t])) S[t-1] + x[t] k[t] v[t]^T",
        READ,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_verifies(form: str, tmp_path: Path) -> None:
    tokens, update, readout = FORMS[form]
    text = f'op probe "{form}"\n{tokens}\nstate S : [HV, K, V]\n{update}\n{readout}\n'
    (tmp_path / "probe.kcp").write_text(text, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "kcpgen", "verify", "probe.kcp", "--quick", "--device", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
