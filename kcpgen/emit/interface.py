"""The public function of a generated op: checks, then the backend. And the package's `__init__`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kcpgen.derivation.chunk_form import ChunkForm
from kcpgen.emit import arguments
from kcpgen.emit.documentation import equation_lines, input_documentation, option_documentation, title
from kcpgen.emit.render import render
from kcpgen.spec import Spec


def emit_interface(form: ChunkForm) -> Mapping[str, str]:
    """`interface.py`: chunk_<op>."""
    spec = form.normal_form.spec
    text = render(
        "interface.py.jinja",
        op=spec.name,
        title=title(spec),
        equation=equation_lines(spec),
        inputs=arguments.input_names(spec),
        token_arguments=arguments.token_arguments(spec),
        state_arguments=list(arguments.STATE_ARGUMENTS),
        option_arguments=arguments.option_arguments(spec),
        input_documentation=input_documentation(spec),
        option_documentation=option_documentation(spec),
        input_axes=repr({declared.name: arguments.axes(declared) for declared in spec.inputs}),
        param_axes=repr({param.name: arguments.axes(param) for param in spec.params}),
        constants=_constants(spec),
        flags=repr(spec.flags),
        options=_options(spec),
        always=repr(tuple(name for name in arguments.shared_names(spec) if name != "scale")),
        input_values=_values(arguments.input_names(spec)),
        param_values=_values(param.name for param in spec.params),
        constant_values=_values(constant.name for constant in spec.constants),
        switch_values=_values(arguments.switches(spec)),
        params=[param.name for param in spec.params],
        plain=[*arguments.switches(spec), *(constant.name for constant in spec.constants)],
        value_input=arguments.value_input(spec).name,
        transition=form.transition,
    )
    return {"interface.py": text}


def emit_init(spec: Spec) -> Mapping[str, str]:
    """`__init__.py` of the package: its public names."""
    text = render("__init__.py.jinja", op=spec.name, title=title(spec))
    return {"__init__.py": text}


def _values(names: Iterable[str]) -> str:
    """Source of a dictionary from each name to the variable of that name."""
    return f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"


def _constants(spec: Spec) -> str:
    """Each constant with the largest value that keeps the promises it bounds from below, as source."""
    highest = {constant.name: math.inf for constant in spec.constants}
    for option in spec.options:
        for rewrite in (rewrite for variant in option.variants for rewrite in variant.rewrites):
            if rewrite.bounds is not None and rewrite.bounds.low_constant:
                name = rewrite.bounds.low_constant
                highest[name] = min(highest[name], rewrite.bounds.high)
    limits = {name: "float('inf')" if value == math.inf else repr(value) for name, value in highest.items()}
    return f"{{{', '.join(f'{name!r}: {limit}' for name, limit in limits.items())}}}"


def _options(spec: Spec) -> dict[str, str]:
    """Option -> source of the dictionary from each variant to what it reads."""
    return {
        option.name: repr({variant.when: tuple(arguments.variant_reads(spec, variant)) for variant in option.variants})
        for option in spec.options
    }
