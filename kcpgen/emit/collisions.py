"""Names of a spec that the code generated for it uses for something else.

Templates name their own variables freely and derive others from the spec's names (`k_ptr`, `dk`). Whether two of them
meet is read off the code itself: it is emitted once more with every declared name replaced by a marker, so that what
comes from the spec and what does not can be told apart.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from kcpgen.diagnostics import Faults, SpecError
from kcpgen.language.syntax import Span
from kcpgen.spec import Spec

_MARKER = re.compile(r"zz(\d+)zz", re.IGNORECASE)
_NAMING_FIELDS = ("name", "target", "when", "low_constant", "state", "output")


def check_collisions(spec: Spec, emit: Callable[[Spec], Mapping[str, str]]) -> None:
    """Raises SpecError (KCP124) for every declared name that meets a variable of the source `emit` makes."""
    declared = _declared(spec)
    markers = {name: f"zz{index}zz" for index, name in enumerate(declared)}
    marked = replace(_renamed(spec, markers), name=spec.name)
    scopes = (scope for text in emit(marked).values() for scope in _scopes(text))
    meetings = {meeting for scope in scopes for meeting in _meetings(scope, [*declared])}
    faults = Faults()
    for name in sorted({name for name, _ in meetings}):
        meets = min((identifier for met, identifier in meetings if met == name), key=len)
        note = f"a variable of that code is called `{meets}`" if meets != name else ""
        message = f"`{name}` is used by the code generated for this spec"
        faults.add("KCP124", message, declared[name], note=note, hint="choose another name")
    if faults.found:
        raise SpecError(faults.found, spec.text)


def _declared(spec: Spec) -> dict[str, Span]:
    """Every name of the spec and where to point for it; flags and equations are found by what reads them."""
    spans = {spec.state: spec.update.span, spec.output: spec.readout.span}
    spans |= {given.name: given.span for given in spec.inputs}
    spans |= {param.name: param.span for param in spec.params}
    spans |= {constant.name: constant.span for constant in spec.constants}
    spans |= {option.name: option.span for option in spec.options}
    variants = {variant.when: option.span for option in spec.options for variant in option.variants}
    return spans | {flag: variants[flag] for flag in spec.flags}


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, tuple):
        return tuple(names.get(item, item) if isinstance(item, str) else _renamed(item, names) for item in value)
    if not is_dataclass(value) or isinstance(value, Span):
        return value
    changes = {}
    for field in fields(value):
        old = getattr(value, field.name)
        changes[field.name] = names.get(old, old) if field.name in _NAMING_FIELDS else _renamed(old, names)
    return replace(value, **changes)  # type: ignore[type-var]


def _scopes(text: str) -> Iterator[set[str]]:
    """The identifiers of each function of a module together with those of the module itself."""
    module = ast.parse(text)
    shared = {name for node in module.body for name in _bound(node)}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield shared | {name for inner in ast.walk(node) for name in _identifiers(inner)}


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    else:
        yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))


def _identifiers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.FunctionDef):
        yield node.name


def _meetings(scope: set[str], declared: list[str]) -> Iterator[tuple[str, str]]:
    """Declared names, each with the identifier at which it meets something else in this scope."""
    taken = {identifier for identifier in scope if not _MARKER.search(identifier)}
    for identifier in sorted(scope - taken, key=lambda marked: (len(_spelled(marked, declared)), marked)):
        spelled = _spelled(identifier, declared)
        if spelled in taken:
            for marker in _MARKER.finditer(identifier):
                yield declared[int(marker.group(1))], spelled
        taken.add(spelled)


def _spelled(identifier: str, declared: list[str]) -> str:
    """The identifier as it is without markers, upper case where the marker is."""

    def name(marker: re.Match[str]) -> str:
        plain = declared[int(marker.group(1))]
        return plain.upper() if marker.group().isupper() else plain

    return _MARKER.sub(name, identifier)
