"""Rules of the whole tree: who may import whom, no model's name in the compiler, every generated file stamped."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcpgen.emit.stamp import is_stamped, stamped_spec

ROOT = Path(__file__).resolve().parent.parent
SPECS = sorted((ROOT / "specs").glob("*.kcp"))
GENERATED = sorted((ROOT / "generated").glob("*/*.py"))
COMPILER_ONLY = ("lark", "sympy", "jinja2", "click", "ruff", "rich")

# What modules below a prefix must not import; the longest matching prefix decides.
FORBIDDEN = {
    "kcpgen.runtime": (
        *COMPILER_ONLY,
        "kcpgen.language",
        "kcpgen.derivation",
        "kcpgen.emit",
        "kcpgen.verify",
        "kcpgen.simulate",
        "kcpgen.spec",
    ),
    "kcpgen.verify": (
        *COMPILER_ONLY,
        "kcpgen.language",
        "kcpgen.derivation",
        "kcpgen.emit",
        "kcpgen.spec",
        "kcpgen.compiler",
    ),
    "kcpgen.simulate": (
        *COMPILER_ONLY,
        "kcpgen.language",
        "kcpgen.derivation",
        "kcpgen.emit",
        "kcpgen.spec",
        "kcpgen.compiler",
    ),
    "kcpgen.language": ("torch", "triton", "sympy", "jinja2", "kcpgen.derivation", "kcpgen.emit", "kcpgen.runtime"),
    "kcpgen.derivation": ("torch", "triton", "lark", "jinja2", "kcpgen.emit", "kcpgen.runtime", "kcpgen.compiler"),
    "kcpgen.emit": ("torch", "triton", "lark", "kcpgen.compiler", "kcpgen.cli", "kcpgen.verify"),
}
GENERATED_MAY_IMPORT = ("torch", "triton", "kcpgen.runtime", "__future__")
STANDARD = set(sys.stdlib_module_names)


def op_names() -> list[str]:
    return [path.stem for path in SPECS]


@pytest.mark.parametrize("name", op_names())
def test_no_ops_name_in_the_compiler(name: str) -> None:
    pattern = re.compile(rf"(?<![a-z]){name.replace('_', '[ _-]?')}(?![a-z])", re.IGNORECASE)
    files = [path for folder in ("kcpgen", "templates") for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix not in (".pyc", "")}
    assert texts
    found = {str(path.relative_to(ROOT)): pattern.findall(text) for path, text in texts.items() if pattern.search(text)}
    assert found == {}


def imports(path: Path, package: str) -> Iterator[str]:
    """Absolute names of everything a file imports, deferred imports included, relative ones resolved in `package`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def modules() -> list[Path]:
    return sorted((ROOT / "kcpgen").rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_direction_of_the_stages(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    rules = [forbidden for prefix, forbidden in FORBIDDEN.items() if within(module, prefix)]
    package = module.removesuffix(".__init__") if path.name == "__init__.py" else module.rpartition(".")[0]
    found = [name for name in imports(path, package) for rule in rules for prefix in rule if within(name, prefix)]
    assert found == []


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_code_imports_only_torch_triton_and_the_runtime(path: Path) -> None:
    own = f"generated.{path.parent.name}"
    allowed = (*GENERATED_MAY_IMPORT, own)
    names = list(imports(path, own))
    bad = [n for n in names if n.split(".")[0] not in STANDARD and not any(within(n, prefix) for prefix in allowed)]
    assert bad == []


def test_every_spec_is_generated_and_every_package_has_its_spec() -> None:
    assert {path.parent.name for path in GENERATED} == set(op_names())


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_files_say_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert is_stamped(text)
    assert stamped_spec(text) == f"specs/{path.parent.name}.kcp"
    assert text.splitlines()[1] == f"# regenerate: kcpgen build specs/{path.parent.name}.kcp"


def test_every_generated_op_runs_where_the_compiler_is_not_installed() -> None:
    script = f"""
import sys
for name in {COMPILER_ONLY!r}:
    sys.modules[name] = None
import torch, kcpgen.verify.command
from importlib import import_module
for op in {op_names()!r}:
    import_module(f"generated.{{op}}")
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


SIZES = {"H", "HV", "K", "V", "C", "LEVELS", "KP", "VP", "BK", "BV"}  # of every chunk-parallel kernel


@pytest.mark.parametrize(
    "path", sorted((ROOT / "generated").glob("*/*.py")), ids=lambda path: "/".join(path.parts[-2:])
)
def test_a_kernel_is_given_what_it_reads(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list):
            read = {name.id for line in node.body for name in ast.walk(line) if isinstance(name, ast.Name)}
            assert {argument.arg for argument in node.args.args} - read <= SIZES, node.name
