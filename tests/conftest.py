"""What every test shares: one thread a process (tests run side by side), and the repository's specs."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPECS = sorted((ROOT / "specs").glob("*.kcp"))


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture(params=SPECS, ids=lambda path: path.stem)
def spec_path(request: pytest.FixtureRequest) -> Path:
    """Every spec of the repository in turn."""
    return request.param


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
