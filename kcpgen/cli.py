"""The command line. Every command imports what it needs when it runs: `kcpgen --version` must not wait for torch."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kcpgen import __version__
from kcpgen.cost.device import DEVICES
from kcpgen.cost.sizes import Sizes, parse_sizes

if TYPE_CHECKING:
    from kcpgen.emit.package import Package

T = TypeVar("T")
SPEC = click.Path(path_type=Path)


def _sizes(text: str) -> Sizes:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kcpgen")
def main() -> None:
    """Compile the equation of a linear recurrence on a matrix state into a trainable op.

    A spec (.kcp) states the recurrence as a paper does. `build` generates the op's package: a per-token reference, an
    eager chunked version, Triton kernels for forward and backward, and the autograd function around them.
    """


@main.command()
@click.argument("specs", nargs=-1, required=True, type=SPEC, metavar="SPEC...")
@click.option(
    "-o", "--output", type=SPEC, default=Path("generated"), show_default=True, help="Directory of the packages."
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 with a diff when the files are not as generated.")
def build(specs: tuple[Path, ...], output: Path, check: bool) -> None:
    """Generate the package OUTPUT/<op>/ of every SPEC, all of them or, if any spec is wrong, none."""
    packages = _each(specs, lambda path: _compile(path, output))
    _reject_twins(packages)
    _warn_of_name(output)
    if check:
        _check(specs, packages, output)
    else:
        _write(packages, output)


@main.command()
@click.argument("spec", type=SPEC)
@click.option("--latex", "form", flag_value="latex", help="As LaTeX.")
@click.option("--json", "form", flag_value="json", help="As JSON.")
def derive(spec: Path, form: str | None) -> None:
    """Show how SPEC becomes its chunkwise form, with the proof that the two agree; exits with 1 if they do not."""
    ((text, proved),) = _each((spec,), lambda path: _derivation(path, form or "text"))
    click.echo(text, nl=False)
    sys.exit(0 if proved else 1)


@main.command()
@click.argument("spec", type=SPEC)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default=None, help="Default: cuda if there is one.")
@click.option("--quick", is_flag=True, help="A few small cases of each kind.")
@click.option(
    "--json", "json_path", type=SPEC, default=None, metavar="FILE", help="Write the figures to FILE ('-': stdout)."
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes sharing the device.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only cases with TEXT in their label; may be repeated.")
def verify(
    spec: Path, device: str | None, quick: bool, json_path: Path | None, jobs: int, only: tuple[str, ...]
) -> None:
    """Compare the op of SPEC with its per-token float64 reference: every output and every gradient.

    On a CPU the Triton kernels run where TRITON_INTERPRET=1 asks for it. Exits with 1 when a bound is missed.
    """
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kcpgen-verify-") as scratch:
        output = Path(scratch, "generated")
        (package,) = _each((spec,), lambda path: _compile(path, output))
        _write((package,), output, quiet=True)
        from kcpgen.verify.command import run

        sys.exit(run(output / package.name, device=device, quick=quick, json_path=json_path, jobs=jobs, only=only))


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate(arguments: tuple[str, ...]) -> None:
    """Run the op of SPEC on simulated ranks, compare with one device, say where a fault lies; --help for options.

    Exits with 1 when ranks differ from one device, or both from the per-token float64 reference.
    """
    import tempfile

    from kcpgen.simulate.arguments import parser

    options = parser("kcpgen simulate", "Context parallelism on one device: every rank's own code, run in turn.")
    options.add_argument("spec", type=Path, metavar="SPEC")
    chosen = vars(options.parse_args(arguments))
    with tempfile.TemporaryDirectory(prefix="kcpgen-simulate-") as scratch:
        output = Path(scratch, "generated")
        (package,) = _each((chosen.pop("spec"),), lambda path: _compile(path, output))
        _write((package,), output, quiet=True)
        from kcpgen.simulate.command import Request, run

        sys.exit(run(output / package.name, Request(**chosen)))


@main.command()
@click.argument("spec", type=SPEC)
@click.option("--device", type=click.Choice(sorted(DEVICES)), default="h200", show_default=True)
@click.option(
    "--shape", type=_sizes, required=True, metavar="BxTxHxKxV", help="H/HV for grouped heads: 1x8192x16/32x128x128."
)
@click.option("--strong-decay", is_flag=True, help="As if channels decayed by more within a chunk than fp32 holds.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def plan(spec: Path, device: str, shape: Sizes, strong_decay: bool, as_json: bool) -> None:
    """Show the kernels of SPEC at one shape: what each moves, computes and keeps, the floor, and the time predicted."""
    (text,) = _each((spec,), lambda path: _estimate(path, device, shape, strong_decay, as_json))
    click.echo(text, nl=False)


def _estimate(path: Path, device: str, sizes: Sizes, by_levels: bool, as_json: bool) -> str:
    from kcpgen.cost import report
    from kcpgen.cost.estimate import estimate
    from kcpgen.derivation.chunk_form import derive_chunk_form
    from kcpgen.derivation.normal_form import derive_normal_form
    from kcpgen.language import load
    from kcpgen.plan import make_plan

    found = estimate(
        make_plan(derive_chunk_form(derive_normal_form(load(path)))), DEVICES[device], sizes, by_levels=by_levels
    )
    return report.to_json(found) if as_json else report.to_text(found)


def _compile(path: Path, output: Path) -> Package:
    from kcpgen.compiler import compile_spec

    return compile_spec(path, output)


def _derivation(path: Path, form: str) -> tuple[str, bool]:
    from kcpgen.derivation import show
    from kcpgen.derivation.chunk_form import derive_chunk_form
    from kcpgen.derivation.normal_form import derive_normal_form
    from kcpgen.derivation.proof import prove
    from kcpgen.language import load

    chunk_form = derive_chunk_form(derive_normal_form(load(path)))
    proof = prove(chunk_form)
    write = {"text": show.to_text, "latex": show.to_latex, "json": show.to_json}[form]
    return write(chunk_form, proof), proof.holds


def _each(specs: tuple[Path, ...], action: Callable[[Path], T]) -> tuple[T, ...]:
    """`action` on every spec; if any is wrong, all diagnostics go to stderr and the command ends with 1."""
    from kcpgen.diagnostics import SpecError

    results, faults = [], []
    for path in specs:
        try:
            results.append(action(path))
        except SpecError as error:
            faults.append(str(error))
    if faults:
        click.echo("\n".join(faults), err=True, nl=False)
        sys.exit(1)
    return tuple(results)


def _reject_twins(packages: tuple[Package, ...]) -> None:
    first: dict[str, str] = {}
    for package in packages:
        if package.name in first:
            _fail(
                f"{first[package.name]} and {package.spec_path} both define {package.name} and would share a directory"
            )
        first[package.name] = package.spec_path


def _warn_of_name(output: Path) -> None:
    """`-o my-ops` is allowed: the directory may be meant for sys.path, from which the ops inside can be imported."""
    if output.name and not (output.name.isidentifier() and not iskeyword(output.name)):
        click.echo(
            f"warning: {output.name!r} is no name of a Python package: `import` finds the ops in it only with "
            f"{output} itself on sys.path; choose a name such as -o {re.sub(r'[^0-9A-Za-z_]', '_', output.name)}",
            err=True,
        )


def _write(packages: tuple[Package, ...], output: Path, quiet: bool = False) -> None:
    from kcpgen.emit.package import ForeignFilesError, write

    for package in packages:
        try:
            changed = write(package, output)
        except ForeignFilesError as error:
            _fail(str(error))
        except OSError as error:
            _fail(f"cannot write {output / package.name}: {error.strerror}")
        if not quiet:
            done = f"{len(package.files)} files, {package.lines} lines" if changed else "unchanged"
            click.echo(f"{package.spec_path} -> {output / package.name}: {done}")


def _check(specs: tuple[Path, ...], packages: tuple[Package, ...], output: Path) -> None:
    from kcpgen.emit.package import differences, orphans
    from kcpgen.emit.stamp import build_command

    stale = []
    for path, package in zip(specs, packages, strict=True):
        found = differences(package, output)
        for difference in found:
            click.echo(f"{difference.path}: {difference.kind}\n{difference.diff}", nl=bool(difference.diff))
        stale += [path] if found else []
    gone = orphans(output)
    for directory, spec in gone:
        removal = shlex.join(["rm", "-r", str(directory)])
        click.echo(f"{directory}: generated from {spec}, which is gone; remove it with: {removal}")
    if stale:
        click.echo(f"not as generated; fix with: {build_command(map(str, stale), str(output))}")
    if stale or gone:
        sys.exit(1)
    click.echo(f"{output}: {len(packages)} package{'s' * (len(packages) != 1)} as generated")


def _fail(message: str) -> None:
    click.echo(f"error: {message}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main(prog_name="kcpgen")
