"""Calls whose serial kernels are those in roles, emulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kcpgen.runtime import hopper
from kcpgen.runtime.launch import Tiles
from kcpgen.verify.op import load_op
from tests.kernels import gluon_by_chunks
from tests.kernels.gluon_in_roles import launcher

SERIAL = ("scan", "reverse")


def left_to_scans(package: Path) -> bool:
    """Whether scans in roles make scores, or solve for corrected values, and `prepare` leaves that to them."""
    return "prepared.for_roles" in (package / "scan_hopper.py").read_text(encoding="utf-8")


@contextmanager
def in_roles(
    package: Path, sources: Mapping[str, Path] | None = None, *, gradients: bool = False
) -> Iterator[list[str]]:
    """Serial kernels of an op are emulated, from these files or else the generated ones; which of them are launched.

    gradients: whether those for Hopper are asked too.
    """
    name = load_op(package).chunk.__module__.rpartition(".")[0]
    settled, launched = hopper.settled, []

    def asked(tiles: Tiles, device: torch.device) -> Tiles:
        portable = settled(tiles, device)
        return replace(
            portable,
            prepare=replace(portable.prepare, in_flight=left_to_scans(package)),
            scan=replace(portable.scan, roles=True),
            reverse=replace(portable.reverse, roles=True),
            gradients=replace(portable.gradients, in_flight=gradients),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "settled", asked)
        if left_to_scans(package):
            prepare = gluon_by_chunks.launcher(package / "prepare_hopper.py")
            patch.setattr(import_module(f"{name}.prepare_hopper"), "prepare_kernel", prepare)
        for stem in [stem for stem in (*SERIAL, "summary") if (package / f"{stem}_hopper.py").exists()]:
            emulated = launcher((sources or {}).get(stem, package / f"{stem}_hopper.py"))

            class Launched:
                def __getitem__(self, grid: tuple[int], stem: str = stem, emulated: Any = emulated) -> Any:
                    launched.append(stem)
                    return emulated[grid]

            kernel = "transition_kernel" if stem == "summary" else f"{stem}_kernel"
            patch.setattr(import_module(f"{name}.{stem}_hopper"), kernel, Launched())
        yield launched
