"""The per-token reference, straight from the parsed equation: a witness that knows nothing of the derivation."""

from __future__ import annotations

from collections.abc import Mapping

from kcpgen.emit import arguments
from kcpgen.emit.columns import Columns
from kcpgen.emit.documentation import equation_lines, title
from kcpgen.emit.render import render
from kcpgen.emit.syntax_tree import count_reads, functions_in, names_in
from kcpgen.language.syntax import Expr
from kcpgen.spec import Rewrite, Spec


def emit_naive(spec: Spec) -> Mapping[str, str]:
    """`naive.py`: naive_recurrent_<op>, one torch step a token."""
    update, readout = _update(spec), _readout(spec)
    functions = functions_in(_expressions(spec))
    text = render(
        "naive.py.jinja",
        op=spec.name,
        title=title(spec),
        equation=equation_lines(spec),
        inputs=arguments.input_names(spec),
        token_arguments=arguments.token_arguments(spec),
        state_arguments=list(arguments.STATE_ARGUMENTS),
        option_arguments=arguments.option_arguments(spec),
        params=[param.name for param in spec.params],
        shared=arguments.shared_names(spec),
        sizes=arguments.sizes(spec),
        value_input=arguments.value_input(spec).name,
        options=arguments.option_lines(spec, lambda rewrite: _rewrite(spec, rewrite)),
        state=spec.state,
        update=update,
        readout=readout[:-1],
        output=readout[-1],
        torch_functions=sorted(functions & {"sigmoid", "sqrt"}),
        runtime_functions=sorted(functions & {"exp", "softplus"}),
        l2norm="l2norm" in functions,
    )
    return {"naive.py": text}


def _expressions(spec: Spec) -> list[Expr]:
    rewrites = [r.value for option in spec.options for variant in option.variants for r in variant.rewrites]
    return [spec.update, spec.readout, *rewrites]


def _update(spec: Spec) -> list[str]:
    printer = Columns(shapes=spec.shapes, result=spec.state, once=count_reads(spec.update, spec.state) == 1)
    value = printer.value(spec.update)
    return [*printer.statements, f"{spec.state} = {value.text}"]


def _readout(spec: Spec) -> list[str]:
    printer = Columns(shapes=spec.shapes, result=spec.output)
    value = printer.value(spec.readout)
    return [*printer.statements, value.text]


def _rewrite(spec: Spec, rewrite: Rewrite) -> str:
    value = Columns(shapes=spec.shapes, result=rewrite.target).value(rewrite.value)
    varies = names_in([rewrite.value]) & {*arguments.input_names(spec)}
    return f"{rewrite.target} = {value.text if varies else f'({value.text}).expand_as({rewrite.target})'}"
