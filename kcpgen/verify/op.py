"""A generated package as verification sees it: its functions, its signature and the description of its inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from kcpgen.runtime.description import Description
from kcpgen.runtime.signature import Signature

if TYPE_CHECKING:  # verification of eager code needs no Triton
    from kcpgen.runtime.tuned_table import Form

Recurrence = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op. `naive` is the per-token reference, `chunk` the function users call."""

    directory: Path
    signature: Signature
    description: Description
    chunk: Recurrence
    naive: Recurrence

    @property
    def name(self) -> str:
        return self.signature.op.removeprefix("chunk_")

    @property
    def form(self) -> Form:
        """What the choice of tiles depends on; its kernels are imported, which takes Triton."""
        found: Form = import_module(f"{self.chunk.__module__.rpartition('.')[0]}.autograd").KERNELS.form
        return found

    @property
    def has_halves(self) -> bool:
        """Whether heads that forget can run both halves of a sequence side by side; likewise."""
        kernels = import_module(f"{self.chunk.__module__.rpartition('.')[0]}.autograd").KERNELS
        return kernels.upright and kernels.forgetting is not None

    def axis(self, name: str) -> str:
        """ "", "K" or "V" of a token input or parameter."""
        letters = {**self.signature.inputs, **self.signature.params}[name].split()
        return letters[-1] if letters[-1] in ("K", "V") else ""

    def is_scalar(self, name: str) -> bool:
        return name in self.signature.inputs and self.axis(name) == ""

    def is_key(self, name: str) -> bool:
        """A vector over the key axis that is read, written or erased, not a decay."""
        return name in self.signature.inputs and self.axis(name) == "K" and name not in self.description.log_decays

    def params_read(self, keywords: Mapping[str, bool | float]) -> tuple[str, ...]:
        """The parameters that a call with these keywords needs."""
        reads = set(self.signature.always)
        for option, variants in self.signature.options.items():
            if keywords.get(option):
                active = [when for when in variants if not when or when in keywords]
                reads |= set(variants[active[-1]])
        return tuple(name for name in self.signature.params if name in reads)

    def rewritten(self, keywords: Mapping[str, bool | float]) -> frozenset[str]:
        """Inputs that an active option replaces: with it they are raw activations, of any size and sign."""
        active = [variants for option, variants in self.description.rewrites.items() if keywords.get(option)]
        return frozenset(name for variants in active for targets in variants.values() for name in targets)


def load_op(directory: Path) -> Op:
    """Import the package in `directory` under a name of its own. Raises FileNotFoundError if there is none."""
    op = directory.resolve().name
    package = _import_package(directory.resolve())
    interface, description = (import_module(f"{package.__name__}.{name}") for name in ("interface", "description"))
    return Op(
        directory=directory,
        signature=interface.SIGNATURE,
        description=description.DESCRIPTION,
        chunk=getattr(package, f"chunk_{op}"),
        naive=getattr(package, f"naive_recurrent_{op}"),
    )


def _import_package(directory: Path) -> ModuleType:
    source = directory / "__init__.py"
    if not source.is_file():
        raise FileNotFoundError(f"no generated package in {directory}")
    name = f"kcpgen_verified_{directory.name}"
    found = util.spec_from_file_location(name, source, submodule_search_locations=[str(directory)])
    assert found is not None
    assert found.loader is not None
    package = util.module_from_spec(found)
    sys.modules[name] = package
    found.loader.exec_module(package)
    return package
