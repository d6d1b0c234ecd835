"""The compiler, from a spec's path to a package of generated source: one line per stage.

Every stage takes the value the one before it made and returns a frozen one of its own: the function on the right is the
stage, the type on the left what it promises. Nothing is written to disk here (see `kcpgen.emit.package`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kcpgen.derivation.chunk_form import ChunkForm, derive_chunk_form
from kcpgen.derivation.normal_form import NormalForm, derive_normal_form
from kcpgen.emit.collisions import check_collisions
from kcpgen.emit.description import emit_description
from kcpgen.emit.format import format_sources
from kcpgen.emit.package import Package
from kcpgen.emit.stamp import stamp
from kcpgen.emit.tidy import tidy
from kcpgen.emit.torch import emit_eager, emit_init, emit_interface, emit_naive
from kcpgen.emit.triton_kernels import emit_triton
from kcpgen.language import load
from kcpgen.plan import KernelPlan, make_plan
from kcpgen.spec import Spec


def compile_spec(path: Path, output: Path) -> Package:
    """The package that `output/<op>/` should hold. Raises SpecError with every fault of the stage that finds one."""
    spec: Spec = replace(load(path), path=stamped_path(path, output))
    sources: Mapping[str, str] = emit(spec)
    check_collisions(spec, emit)
    return package(spec, sources, output)


def emit(spec: Spec) -> Mapping[str, str]:
    """The text of every generated file, neither tidied nor stamped yet."""
    normal_form: NormalForm = derive_normal_form(spec)
    chunk_form: ChunkForm = derive_chunk_form(normal_form)
    plan: KernelPlan = make_plan(chunk_form)
    return {
        **emit_naive(spec),  # straight from the parsed equation: a witness independent of the derivation
        **emit_eager(chunk_form),
        **emit_triton(plan),
        **emit_interface(chunk_form),
        **emit_description(normal_form),
        **emit_init(spec),
    }


def package(spec: Spec, sources: Mapping[str, str], output: Path) -> Package:
    """Tidy, stamp and format: the last arrow, from emitted text to the bytes that are committed."""
    destination = output.resolve().name
    stamped = {
        name: stamp(name, tidy(text), spec_path=spec.path, spec_text=spec.text, output=destination)
        for name, text in sources.items()
    }
    return Package(name=spec.name, spec_path=spec.path, files=format_sources(stamped))


def stamped_path(path: Path, output: Path) -> str:
    """The spec's path as generated files name it: from the directory that holds `output`, or the bare file name.

    It depends on where spec and output lie to each other, not on the machine or the directory kcpgen was started in.
    """
    relative = os.path.relpath(path.resolve(), output.resolve().parent)
    return path.name if relative.startswith("..") else Path(relative).as_posix()
