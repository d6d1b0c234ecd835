"""Templates lay out, Python decides: one strict door from a context of plain values to generated text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined, meta

Value: TypeAlias = "str | int | bool | Sequence[Value] | Mapping[str, Value]"

PACKAGE = Path(__file__).resolve().parent.parent


def templates_directory() -> Path:
    """Where the templates lie: inside the installed package, or beside it in a source tree."""
    for directory in (PACKAGE / "templates", PACKAGE.parent / "templates"):
        if directory.is_dir():
            return directory
    raise FileNotFoundError(f"no templates directory in {PACKAGE} or beside it")


@cache
def environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(templates_directory()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def template_source(name: str) -> str:
    """Text of one template, e.g. for stamping its hash into what it generates."""
    return (templates_directory() / name).read_text(encoding="utf-8")


@cache
def template_names(name: str) -> frozenset[str]:
    """Every name that a template, or one that it includes or extends, takes from its context."""
    tree = environment().parse(template_source(name), name)
    names = frozenset(meta.find_undeclared_variables(tree))
    for used in meta.find_referenced_templates(tree):
        if used is None:
            raise ValueError(f"{name}: a template may only refer to others by a literal name")
        names |= template_names(used)
    return names


def render(template_name: str, **context: Value) -> str:
    """Render a template whose names are exactly those of the context: a missing or an idle one raises TypeError."""
    wanted, given = template_names(template_name), frozenset(context)
    if wanted != given:
        missing, idle = sorted(wanted - given), sorted(given - wanted)
        raise TypeError(f"{template_name}: missing from the context: {missing}; never used: {idle}")
    _reject_objects(template_name, context)
    return environment().get_template(template_name).render(**context)


def _reject_objects(where: str, value: object) -> None:
    """Only text, integers and nested lists or mappings of them: a template must not ask an object questions."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _reject_objects(f"{where}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _reject_objects(f"{where}[]", item)
    elif not isinstance(value, (str, int)):
        raise TypeError(f"{where}: a template context holds strings, ints and lists, not {type(value).__name__}")
