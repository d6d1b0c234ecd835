"""What every kernel of an op takes on a GPU that need not be there: registers, spills, shared memory.

Triton compiles for any target, and its ptxas says what came out. The op's own host code decides what is compiled: it
runs on CPU tensors with launches left out, so that tiles, dtypes and specialisations are those of a real call.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kcpgen.runtime import hopper
from kcpgen.runtime.tuned import looked_up_by, on_device, shipped
from kcpgen.verify.cases import Case
from kcpgen.verify.compare import evaluate
from kcpgen.verify.inputs import make_inputs
from kcpgen.verify.op import Op, load_op

SM90 = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024  # bytes a block may use on sm_90
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """One compiled kernel: registers and bytes of stack per thread (a stack means spills), bytes shared per block."""

    kernel: str
    warps: int
    registers: int
    stack: int
    shared: int

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_LIMIT


def resources(op: Op, case: Case) -> list[Resources]:
    """Every kernel that a forward and backward of this case would launch, in the order of their first launch."""
    return launched(op, lambda: evaluate(op.chunk, make_inputs(op, case, "cpu"), case, backend="triton"))


def launched(
    op: Op, call: Callable[[], object], names: Collection[str] = (), portable: bool = False
) -> list[Resources]:
    """Likewise of any call of `op` on CPU tensors, with portable serial kernels and then with those in roles.

    names: the kernels to compile, () for all. portable: without those in roles.
    """
    import_module(
        f"{op.chunk.__module__.rpartition('.')[0]}.autograd"
    )  # kernels are defined before the variable is set
    compiled: list[Any] = []
    both = hopper.known_release() and not portable
    for roles in (False, True) if both else (False,):  # what is the same in both is compiled once
        with hopper.forced(roles), _compiling_only(compiled, names):
            call()
    distinct = {id(kernel): kernel for kernel in compiled}
    return [_read(kernel) for kernel in distinct.values()]


@contextmanager
def _compiling_only(compiled: list[Any], names: Collection[str] = ()) -> Iterator[None]:
    """Inside, launches compile for sm_90 and do nothing else; of kernels with these names, or of all."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        if names and self.__name__ not in names:
            return None
        compiled.append(run(self, *args, grid=grid, warmup=True, **keywords))
        return compiled[-1]

    # The variable makes the op accept CPU tensors. The op reads it when called, Triton when kernels are defined.
    asked = os.environ.get("TRITON_INTERPRET")
    driver.set_active(_Absent())
    JITFunction.run = compile_only
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active = None
        os.environ.pop("TRITON_INTERPRET")
        if asked is not None:
            os.environ["TRITON_INTERPRET"] = asked


class _Absent:
    """A driver of a device that is not there: enough to compile for it."""

    def get_current_target(self) -> GPUTarget:
        return SM90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _read(kernel: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return Resources(
        kernel=kernel.metadata.name,
        warps=kernel.metadata.num_warps,
        registers=found["REG"],
        stack=found["STACK"] + found["LOCAL"],
        shared=kernel.metadata.shared,
    )


CASES = tuple(
    Case(
        label=f"K=V={size} {dtype}",
        backend="triton",
        dtype=dtype,
        tokens=1024,
        key_width=size,
        value_width=size,
        segments=segments,
    )
    for size, dtype, segments in (
        (64, "bfloat16", 1),
        (128, "bfloat16", 4),  # with the kernels that sequences in segments take
        (256, "bfloat16", 1),
        (64, "float32", 1),
    )
)


def main() -> int:
    """Print a table for each package; 1 if a kernel does not fit."""
    parser = argparse.ArgumentParser(prog="python -m kcpgen.verify.resources", description=__doc__)
    parser.add_argument("generated", type=Path, nargs="+", metavar="DIR", help="packages, e.g. generated/my_op")
    try:
        ops = [load_op(directory) for directory in parser.parse_args().generated]
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    fits = [_tell(op) for op in ops]
    return 0 if all(fits) else 1


def tuned_cases(op: Op) -> Iterator[tuple[str, Case]]:
    """The devices for which something else was tuned than what is chosen for any, and calls that take it."""
    for device, entries in shipped().items():
        for structure in entries:
            if structure.form == op.form:
                keys, values, bits = structure.key_width, structure.value_width, structure.scratch_bits
                yield (
                    device,
                    Case(
                        label=f"K={keys} V={values} {bits} bits, {device}",
                        backend="triton",
                        dtype="bfloat16" if bits == 16 else "float32",
                        tokens=1024,
                        key_width=keys,
                        value_width=values,
                        segments=4,
                    ),
                )


def _tell(op: Op) -> bool:
    """Print an op's table in one piece, since several processes may share the terminal; whether everything fits."""
    found = [(case.label, kernel) for case in CASES for kernel in resources(op, case)]
    for device, case in tuned_cases(op):
        with looked_up_by(on_device(device)):
            found += [(case.label, kernel) for kernel in resources(op, case)]
    rows = [f"{op.name + ', sm_90':<36}{'kernel':>24}{'warps':>8}{'registers':>11}{'stack':>8}{'shared':>9}"]
    for label, kernel in found:
        numbers = f"{kernel.warps:>8}{kernel.registers:>11}{kernel.stack:>8}{kernel.shared:>9}"
        rows.append(f"{label:<36}{kernel.kernel:>24}{numbers}" + ("  TOO LARGE" if not kernel.fits else ""))
    print("\n".join(rows) + "\n", flush=True)
    return all(kernel.fits for _, kernel in found)


if __name__ == "__main__":
    sys.exit(main())
