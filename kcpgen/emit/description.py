"""What verification must know of an op's inputs, written into its package: verifying must not need the compiler."""

from __future__ import annotations

import sympy

from kcpgen.derivation.normal_form import NormalForm
from kcpgen.emit.render import render
from kcpgen.spec import Spec


def emit_description(normal_form: NormalForm) -> dict[str, str]:
    """`description.py`: one `Description` of the op's inputs."""
    spec = normal_form.spec
    terms = [
        {"write": _names(spec, t.write), "value": _names(spec, t.value), "erase": _names(spec, t.erase)}
        for t in normal_form.terms
    ]
    text = render(
        "description.py.jinja",
        log_decays=repr(tuple(x.name for x in spec.inputs if x.role == "log_decay")),
        bounds=_bounds(spec),
        rewrites=_rewrites(spec),
        terms=terms,
    )
    return {"description.py": text}


def _names(spec: Spec, expr: sympy.Expr) -> str:
    """A tuple display of the token inputs in an expression, in the spec's order."""
    present = {symbol.name for symbol in expr.free_symbols}
    return repr(tuple(x.name for x in spec.inputs if x.name in present))


def _bounds(spec: Spec) -> str:
    promised = [(x.name, x.bounds) for x in spec.inputs if x.bounds is not None]
    return _mapping({name: f"({_real(bounds.low)}, {_real(bounds.high)})" for name, bounds in promised})


def _rewrites(spec: Spec) -> str:
    return _mapping(
        {
            option.name: _mapping(
                {variant.when: repr(tuple(r.target for r in variant.rewrites)) for variant in option.variants}
            )
            for option in spec.options
        }
    )


def _mapping(items: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key!r}: {value}" for key, value in items.items()) + "}"


def _real(value: float) -> str:
    return f"float({str(value)!r})" if value in (float("inf"), -float("inf")) else repr(value)
