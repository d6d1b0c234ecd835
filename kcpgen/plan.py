"""What the kernels are made of: the normal form sorted into tiles, decided once and in Python.

Key-axis vectors become *bases*: distinct elementwise expressions, each formed once per chunk and shared by all that use it.
A row of scores (the read, an erase) is a base times a coefficient per token, so that e.g. a gate on the erase leaves the
dot product of the plain inputs exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from kcpgen.derivation.chunk_form import ChunkForm
from kcpgen.spec import Option, Rewrite, Spec, TokenInput
from kcpgen.tokenwise import RowSum, from_syntax, split_scalar, symbol


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row operand of the scores: coefficient * base, read after (inclusive) or before (exclusive) its token's decay."""

    name: str
    base: str
    coefficient: sympy.Expr
    exclusive: bool
    full: sympy.Expr


@dataclass(frozen=True, kw_only=True)
class PlannedRewrite:
    """One rewrite of one variant of an option, active when the option's mode (1-based variant) is `mode`."""

    option: str
    mode: int
    target: str
    value: sympy.Expr


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """bases: name -> expression (a plain input keeps its own name). erase and value are indexed by term."""

    form: ChunkForm
    decay_axis: str | None  # None: no decay
    decay_log: sympy.Expr
    bases: dict[str, sympy.Expr]
    read: Row
    erase: dict[int, Row]
    write: tuple[str, ...]
    values: tuple[sympy.Expr, ...]
    rewrites: tuple[PlannedRewrite, ...]
    early: tuple[str, ...]  # inputs that the value loop needs; the others are loaded after it
    whole_value_axis: bool  # a reduction over V: the value loop must see all of it at once

    @property
    def spec(self) -> Spec:
        return self.form.normal_form.spec

    @property
    def erasing(self) -> tuple[int, ...]:
        return self.form.normal_form.erasing

    @property
    def pure_writes(self) -> tuple[int, ...]:
        return self.form.normal_form.pure_writes

    @property
    def terms(self) -> tuple[int, ...]:
        return tuple(range(len(self.values)))

    @property
    def exclusive(self) -> bool:
        """Whether some erase reads the state before its token's decay."""
        return any(row.exclusive for row in self.erase.values())

    def inputs_on(self, axis: str) -> tuple[TokenInput, ...]:
        return tuple(i for i in self.spec.inputs if i.axis == axis)


def make_plan(form: ChunkForm) -> KernelPlan:
    """Sort a chunk form into kernel operands."""
    normal = form.normal_form
    spec = normal.spec
    decay = normal.decay
    bases: dict[str, sympy.Expr] = {}
    write = tuple(_base(bases, f"write_{j}", term.write) for j, term in enumerate(normal.terms))
    erase = {
        i: _row(bases, spec, f"erase_{i}", normal.terms[i].erase, decay is not None and not normal.terms[i].erase_reads_decayed)
        for i in normal.erasing
    }
    read = _row(bases, spec, "read", normal.read, False)
    values = tuple(term.value for term in normal.terms)
    rewrites = tuple(_plan_rewrites(spec))
    reductions = set().union(*(v.atoms(RowSum) for v in (*values, *(r.value for r in rewrites))))
    return KernelPlan(
        form=form,
        decay_axis=None if decay is None else decay.axis,
        decay_log=sympy.Integer(0) if decay is None else decay.log,
        bases=bases,
        read=read,
        erase=erase,
        write=write,
        values=values,
        rewrites=rewrites,
        early=_closure(spec, rewrites, set().union(*(_names(v) for v in values))),
        whole_value_axis=any(str(r.args[1]) == "V" for r in reductions),
    )


def _base(bases: dict[str, sympy.Expr], fallback: str, expr: sympy.Expr) -> str:
    """Name of the tile holding `expr`, shared with whoever uses the same expression."""
    for name, known in bases.items():
        if known == expr:
            return name
    name = expr.name if isinstance(expr, sympy.Symbol) else fallback
    bases[name] = expr
    return name


def _row(bases: dict[str, sympy.Expr], spec: Spec, name: str, expr: sympy.Expr, exclusive: bool) -> Row:
    coefficient, base = split_scalar(expr, spec.axes)
    return Row(
        name=name, base=_base(bases, f"{name}_base", base), coefficient=coefficient, exclusive=exclusive, full=expr
    )


def _plan_rewrites(spec: Spec) -> Iterable[PlannedRewrite]:
    for option in spec.options:
        for mode, variant in enumerate(option.variants, start=1):
            for rewrite in variant.rewrites:
                yield _plan_rewrite(spec, option, mode, rewrite)


def _plan_rewrite(spec: Spec, option: Option, mode: int, rewrite: Rewrite) -> PlannedRewrite:
    return PlannedRewrite(
        option=option.name, mode=mode, target=rewrite.target, value=from_syntax(rewrite.value, spec)
    )


def _names(expr: sympy.Expr) -> set[str]:
    return {s.name for s in expr.free_symbols}


def _closure(spec: Spec, rewrites: tuple[PlannedRewrite, ...], wanted: set[str]) -> tuple[str, ...]:
    """Inputs off the value axis that `wanted` names need, through rewrites, in spec order."""
    while True:
        more = set().union(wanted, *(_names(r.value) for r in rewrites if r.target in wanted))
        if more == wanted:
            return tuple(i.name for i in spec.inputs if i.name in wanted and i.axis != "V")
        wanted = more


__all__ = ["KernelPlan", "PlannedRewrite", "Row", "make_plan", "symbol"]
