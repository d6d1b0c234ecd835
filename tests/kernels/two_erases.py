"""An op that nobody has published, two of whose terms erase, built from a spec."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SPEC = """\
op probe "Two erases"
token q, k, a, b : [H, K]
token v, u : [HV, V]
token g : [HV, K] log decay
token x : [HV]
state S : [HV, K, V]
S[t] = (Diag(exp(g[t])) + b[t] a[t]^T - x[t] k[t] k[t]^T) S[t-1] + x[t] k[t] v[t]^T + b[t] u[t]^T
o[t] = scale S[t]^T q[t]
"""


def built(folder: Path) -> Path:
    """Its package."""
    (folder / "probe.kcp").write_text(SPEC, encoding="utf-8")
    build = [sys.executable, "-m", "kcpgen", "build", "probe.kcp"]
    subprocess.run(build, cwd=folder, capture_output=True, check=True)
    return folder / "generated" / "probe"
