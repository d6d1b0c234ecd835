from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kcpgen.cli import main

MY_SPEC = """\
# A gated outer-product memory.
op my "My recurrence"

token q, k : [H, K]
token v    : [HV, V]
token g    : [HV] log decay

state S : [HV, K, V]

S[t] = exp(g[t]) S[t-1] + k[t] v[t]^T
o[t] = scale S[t]^T q[t]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with one spec, my.kcp, as working directory."""
    (tmp_path / "my.kcp").write_text(MY_SPEC, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def kcpgen() -> Callable[..., Result]:
    """Runs the command line in this process; a traceback fails the test."""

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(main, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
