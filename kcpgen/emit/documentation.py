"""Text for the docstrings of generated files: the inputs, the options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import wrap

from kcpgen.emit import arguments
from kcpgen.language.format import equations, format_expr
from kcpgen.spec import Bounds, Option, Param, Rewrite, Spec, TokenInput, Variant

WIDTH = 112  # of a line that a template indents by two levels


def title(spec: Spec) -> str:
    return spec.title or spec.name


def equation_lines(spec: Spec) -> list[str]:
    """Update and readout, as a spec writes them."""
    return _wrapped(equations(spec))


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False)]


def input_documentation(spec: Spec) -> list[str]:
    return [f"{declared.name}: {_shape(declared)}{_role(declared)}." for declared in spec.inputs]


def _shape(declared: TokenInput | Param) -> str:
    return f"[{', '.join(arguments.axes(declared).split())}]"


def _role(declared: TokenInput) -> str:
    if declared.role == "log_decay":
        return (
            f", natural-log decay{_promise(declared.bounds)}" if declared.bounds else ", natural-log decay, at most 0"
        )
    return _promise(declared.bounds)


def _promise(bounds: Bounds | None) -> str:
    if bounds is None:
        return ""
    return f", promised to lie in [{bounds.low_constant or format(bounds.low, 'g')}, {bounds.high:g}]"


def option_documentation(spec: Spec) -> list[str]:
    """One line an option, a flag, a parameter and a constant."""
    lines = [line for option in spec.options for line in _option(option)]
    lines += [f"{flag}: only selects, see above." for flag in spec.flags]
    lines += [f"{param.name}: {_shape(param)}, a parameter; gets a gradient." for param in spec.params]
    return _wrapped([*lines, *(f"{constant.name}: a number; no gradient." for constant in spec.constants)])


def _option(option: Option) -> Iterator[str]:
    for variant in option.variants:
        condition = f" with {variant.when}" if variant.when else ""
        yield f"{option.name}{condition}: {_rewrites(variant)}."


def _rewrites(variant: Variant) -> str:
    return ", ".join(_rewrite(rewrite) for rewrite in variant.rewrites)


def _rewrite(rewrite: Rewrite) -> str:
    return f"{rewrite.target} <- {format_expr(rewrite.value)}"
