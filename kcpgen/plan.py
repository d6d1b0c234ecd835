"""What the kernels are made of: the normal form sorted into tiles, decided once and in Python.

Key-axis vectors become *bases*: distinct elementwise expressions, each formed once per chunk and shared by all that
use it. A row of scores (the read, an erase) is a base times a coefficient per token, so that e.g. a gate on the erase
leaves the dot product of the plain inputs exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import sympy

from kcpgen.derivation.chunk_form import ChunkForm
from kcpgen.plan_faults import check_plannable
from kcpgen.spec import Spec, TokenInput
from kcpgen.tokenwise import RowSum, from_syntax, names, reductions_of, split_scalar, symbol


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row operand of the scores: coefficient * base, read after (or, exclusive, before) its token's decay."""

    name: str
    base: str
    coefficient: sympy.Expr
    exclusive: bool
    full: sympy.Expr


@dataclass(frozen=True, kw_only=True)
class PlannedSum:
    """A sum over the key axis that the forward computes once per token and the backward reads again.

    `rewrite` is the index of the rewrite that needs it, None if an operand does. Expressions name it like a scalar
    input.
    """

    name: str
    value: sympy.Expr
    rewrite: int | None


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
    sums: tuple[PlannedSum, ...]
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

    def loaded(self, base: str) -> bool:
        """Whether a base is a plain input, the tile of which is there already."""
        return bool(self.bases[base] == symbol(base))

    def reads(self, expr: sympy.Expr) -> frozenset[str]:
        """The declared names an expression depends on, those inside planned sums included."""
        inside = {planned.name: planned.value for planned in self.sums}
        below = (self.reads(inside[name]) for name in names(expr) if name in inside)
        return frozenset(name for name in names(expr) if name not in inside).union(*below)

    @property
    def reads_state_alone(self) -> bool:
        """Whether some corrected value is nothing but what an erase reads of the state, whose rounding is then all of
        its own: the state enters the scan's correction in two 16-bit parts."""
        return any(self.values[e] == 0 for e in self.erasing)

    def passes_on(self, erase: int, term: int) -> bool:
        """Whether what a term writes enters a corrected value that is nothing else than what an erase reads. The score
        of two tokens then scales a whole value, and nothing drowns its rounding: its operands keep two parts each."""
        return bool(self.values[erase] == 0 and self.values[term] != 0)

    @property
    def erases_apart(self) -> bool:
        """Whether some erase vector writes nothing. Its gradient comes from dR alone, so nothing drowns the rounding of
        dR: that is kept in two 16-bit parts."""
        return any(row.base not in self.write for row in self.erase.values())

    @property
    def decays_rows(self) -> bool:
        """Whether a token decays as a whole, if at all. One number commutes with all that acts on keys: serial kernels
        take read and write vectors as they are, and decay rows of [C, values] tiles instead."""
        return not self.decay_axis

    @property
    def exclusive(self) -> bool:
        """Whether some erase reads the state before its token's decay."""
        return any(row.exclusive for row in self.erase.values())

    def inputs_on(self, axis: str) -> tuple[TokenInput, ...]:
        return tuple(i for i in self.spec.inputs if i.axis == axis)


def make_plan(form: ChunkForm) -> KernelPlan:
    """Sort a chunk form into kernel operands. Raises SpecError where kernels cannot be made of it."""
    normal = form.normal_form
    check_plannable(normal)
    spec = normal.spec
    decay = normal.decay
    sums = _Sums(spec=spec)
    rewrites = tuple(_plan_rewrites(spec, sums))
    bases: dict[str, sympy.Expr] = {}
    write = tuple(_base(spec, bases, f"write_{j}", sums.named(t.write, None)) for j, t in enumerate(normal.terms))
    erase = {}
    for i in normal.erasing:
        term = normal.terms[i]
        exclusive = decay is not None and not term.erase_reads_decayed
        erase[i] = _row(bases, sums, f"erase_{i}", sums.named(term.erase, None), exclusive)
    read = _row(bases, sums, "read", sums.named(normal.read, None), False)
    if decay is not None and decay.axis and names(read.coefficient) not in ((), ("scale",)):
        # A coefficient per token cannot be kept apart from decayed rows.
        read = replace(read, base=_base(spec, bases, "read_base", read.full), coefficient=sympy.Integer(1))
    values = tuple(sums.named(term.value, None) for term in normal.terms)
    decay_log = sympy.Integer(0) if decay is None else sums.named(decay.log, None)
    reductions = set().union(*(v.atoms(RowSum) for v in (*values, *(r.value for r in rewrites))))
    return KernelPlan(
        form=form,
        decay_axis=None if decay is None else decay.axis,
        decay_log=decay_log,
        bases=bases,
        read=read,
        erase=erase,
        write=write,
        values=values,
        rewrites=rewrites,
        sums=tuple(sums.found),
        whole_value_axis=any(r.args[1].name == "V" for r in reductions),
    )


@dataclass(kw_only=True)
class _Sums:
    """Gives every sum over keys a name of its own, inner ones first."""

    spec: Spec
    found: list[PlannedSum] = field(default_factory=list)

    def named(self, expr: sympy.Expr, rewrite: int | None) -> sympy.Expr:
        known = {r: self._name(r, rewrite) for r in reductions_of(expr) if r.args[1].name == "K"}
        # outermost first: an inner sum must not be replaced under the outer one that is looked up whole
        for reduction in reversed(known):
            expr = expr.xreplace({reduction: known[reduction]})
        return expr

    def _name(self, reduction: RowSum, rewrite: int | None) -> sympy.Symbol:
        value = self.named(reduction.args[0], rewrite)
        for known in self.found:
            if (known.value, known.rewrite) == (value, rewrite):
                return symbol(known.name)
        self.found.append(PlannedSum(name=f"sum_{len(self.found)}", value=value, rewrite=rewrite))
        return symbol(self.found[-1].name)


def _base(spec: Spec, bases: dict[str, sympy.Expr], fallback: str, expr: sympy.Expr) -> str:
    """Name of the tile holding `expr`, shared with whoever uses the same expression."""
    for name, known in bases.items():
        if known == expr:
            return name
    name = expr.name if expr in {symbol(i.name) for i in spec.inputs} else fallback
    bases[name] = expr
    return name


def _row(bases: dict[str, sympy.Expr], sums: _Sums, name: str, expr: sympy.Expr, exclusive: bool) -> Row:
    axes = {**sums.spec.axes, **{s.name: "" for s in sums.found}}
    coefficient, base = split_scalar(expr, axes)
    return Row(
        name=name,
        base=_base(sums.spec, bases, f"{name}_base", base),
        coefficient=coefficient,
        exclusive=exclusive,
        full=expr,
    )


def _plan_rewrites(spec: Spec, sums: _Sums) -> Iterator[PlannedRewrite]:
    index = 0
    for option in spec.options:
        for mode, variant in enumerate(option.variants, start=1):
            for rewrite in variant.rewrites:
                value = sums.named(from_syntax(rewrite.value, spec), index)
                yield PlannedRewrite(option=option.name, mode=mode, target=rewrite.target, value=value)
                index += 1
