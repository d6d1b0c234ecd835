"""What the derivation accepts and the kernels cannot do, each as one diagnostic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import sympy

from kcpgen.derivation.normal_form import NormalForm
from kcpgen.diagnostics import Diagnostic, SpecError
from kcpgen.language.syntax import Expr, operands
from kcpgen.spec import Spec, TokenInput
from kcpgen.tokenwise import NotLocal, RowSum, evaluate, from_syntax

PLAN_CODES = {
    "KCP301": "a sum over the value axis outside of what is written",
    "KCP302": "values that only groups of heads have",
}


def check_plannable(form: NormalForm) -> None:
    """Raises SpecError with everything that kernels cannot be planned for."""
    spec = form.spec
    found = [*_equation(form), *_rewrites(spec), *_heads(spec)]
    if found:
        raise SpecError(found, spec.text)


def _equation(form: NormalForm) -> Iterator[Diagnostic]:
    """Kernels finish what the key axis needs first, then walk the value axis block by block."""
    on_keys = [form.read, *(vector for term in form.terms for vector in (term.write, term.erase))]
    sums = [s for expr in on_keys for s in _over_values(expr)]
    sums += [s for term in form.terms for s in _inside_key_sums(term.value)]
    for total in dict.fromkeys(sums):
        yield _value_sum(form.spec, total, [form.spec.update, form.spec.readout])


def _rewrites(spec: Spec) -> Iterator[Diagnostic]:
    for rewrite in (r for option in spec.options for variant in option.variants for r in variant.rewrites):
        value = from_syntax(rewrite.value, spec)
        found = _inside_key_sums(value) if spec.axes[rewrite.target] == "V" else _over_values(value)
        yield from (_value_sum(spec, total, [rewrite.value]) for total in dict.fromkeys(found))


def _over_values(expr: sympy.Expr) -> list[RowSum]:
    return sorted((s for s in expr.atoms(RowSum) if s.args[1].name == "V"), key=sympy.default_sort_key)


def _inside_key_sums(expr: sympy.Expr) -> list[RowSum]:
    outer = sorted((s for s in expr.atoms(RowSum) if s.args[1].name == "K"), key=sympy.default_sort_key)
    return [inner for total in outer for inner in _over_values(total)]


def _value_sum(spec: Spec, total: RowSum, roots: list[Expr]) -> Diagnostic:
    around = [node for root in roots for node in _nodes(root) if total in _reductions(node, spec)]
    return Diagnostic(
        code="KCP301",
        message="a sum over the value axis can only scale what is written",
        span=min(around, key=lambda node: sum(1 for _ in _nodes(node)), default=roots[0]).span,
        label="the key axis would have to wait for this",
        notes=("keys, gates and scores are computed before values are read, block by block",),
        hints=("pass the sum as a token input of its own",),
    )


def _nodes(expr: Expr) -> Iterator[Expr]:
    yield expr
    for operand in operands(expr):
        yield from _nodes(operand)


def _reductions(node: Expr, spec: Spec) -> Iterable[RowSum]:
    try:
        return frozenset(evaluate(node, spec).value.atoms(RowSum))
    except NotLocal:
        return frozenset()


def _heads(spec: Spec) -> Iterator[Diagnostic]:
    grouped: list[TokenInput] = [i for i in spec.inputs if i.axis == "V" and i.heads == "H"]
    apart = [i for i in spec.inputs if i.heads == "HV"]
    if grouped and apart and not any(i.axis == "V" for i in apart):
        yield Diagnostic(
            code="KCP302",
            message="no value vector has a head per state",
            span=grouped[0].span,
            label=f"`{grouped[0].name}` is shared by the HV / H heads of a group",
            hints=(f"declare `{grouped[0].name}` as [HV, V]",),
        )
