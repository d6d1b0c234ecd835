"""The arguments of a generated op, and what its documentation says of them: shared by every torch-side file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kcpgen.emit.syntax_tree import names_in
from kcpgen.spec import Option, Param, Rewrite, Spec, TokenInput, Variant

STATE_ARGUMENTS = (
    "scale: float | None = None",
    "initial_state: Tensor | None = None",
    "output_final_state: bool = False",
)
Writer = Callable[[Rewrite], str]


def input_names(spec: Spec) -> list[str]:
    return [declared.name for declared in spec.inputs]


def value_input(spec: Spec) -> TokenInput:
    """The input whose dtype the output takes: the first on the value axis, one per value head if there is any."""
    inputs = sorted(spec.inputs, key=lambda declared: declared.heads != "HV")
    return _first(inputs, lambda declared: declared.axis == "V")


def _first(inputs: Iterable[TokenInput], accepts: Callable[[TokenInput], bool]) -> TokenInput:
    found = next((declared for declared in inputs if accepts(declared)), None)
    if found is None:
        raise ValueError("no token input has the axis that the state needs")
    return found


def sizes(spec: Spec) -> list[str]:
    """Statements that bind B, T, HV, K and V."""
    per_value_head = next((i for i in spec.inputs if i.heads == "HV"), spec.inputs[0])
    key, value = _first(spec.inputs, lambda i: i.axis == "K"), value_input(spec)
    return [f"B, T, HV = {per_value_head.name}.shape[:3]", f"K, V = {key.name}.shape[-1], {value.name}.shape[-1]"]


def token_arguments(spec: Spec) -> list[str]:
    return [f"{name}: Tensor" for name in input_names(spec)]


def option_arguments(spec: Spec) -> list[str]:
    """Keyword-only arguments: options and flags, parameters, constants."""
    return [
        *(f"{name}: bool = False" for name in switches(spec)),
        *(f"{param.name}: Tensor | None = None" for param in spec.params),
        *(f"{constant.name}: float | None = None" for constant in spec.constants),
    ]


def switches(spec: Spec) -> list[str]:
    return [*(option.name for option in spec.options), *spec.flags]


def keywords(spec: Spec) -> list[str]:
    """Names of every keyword-only argument, in the order of `option_arguments`."""
    return [*switches(spec), *(param.name for param in spec.params), *(constant.name for constant in spec.constants)]


def shared_names(spec: Spec) -> list[str]:
    """What the equation reads that does not change from token to token."""
    candidates = ["scale", *(param.name for param in spec.params), *(constant.name for constant in spec.constants)]
    read = names_in([spec.update, spec.readout])
    return [name for name in candidates if name in read]


def axes(declared: TokenInput | Param) -> str:
    """The axes of a tensor as the runtime's checks write them, e.g. "B T HV K"."""
    leading = f"B T {declared.heads}" if isinstance(declared, TokenInput) else "HV"
    return f"{leading} {declared.axis}".strip()


def variant_reads(spec: Spec, variant: Variant) -> list[str]:
    """Parameters and constants that a variant needs to be given."""
    read = names_in(rewrite.value for rewrite in variant.rewrites)
    given = [*(param.name for param in spec.params), *(constant.name for constant in spec.constants)]
    return [name for name in given if name in read or name == variant.when]


def option_lines(spec: Spec, write: Writer) -> list[str]:
    """Statements that replace inputs as the options given ask for; `write` prints one rewrite."""
    return [line for option in spec.options for line in _option_lines(spec, option, write)]


def _option_lines(spec: Spec, option: Option, write: Writer) -> Iterator[str]:
    yield f"if {option.name}:"
    if len(option.variants) == 1 and not option.variants[0].when:
        yield from _indented(map(write, option.variants[0].rewrites))
        return
    keyword = "if"
    for variant in reversed(option.variants):  # the last variant selected is the active one
        test = f"{keyword} {_selected(spec, variant.when)}:" if variant.when else "else:"
        yield from _indented([test, *_indented(map(write, variant.rewrites))])
        if not variant.when:
            break
        keyword = "elif"


def _selected(spec: Spec, when: str) -> str:
    return when if when in spec.flags else f"{when} is not None"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)
