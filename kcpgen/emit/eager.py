"""The chunked form in plain torch, printed from the derived equations; differentiable by autograd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import sympy

from kcpgen.derivation.chunk_form import ChunkForm, Equation, Factor
from kcpgen.derivation.normal_form import NormalForm
from kcpgen.emit import arguments, rows
from kcpgen.emit.code import ATOM
from kcpgen.emit.documentation import equation_lines, title
from kcpgen.emit.render import render
from kcpgen.spec import Rewrite, Spec
from kcpgen.tokenwise import axis_of, from_syntax, names

# Scores with one decay per channel take C * K numbers a token while autograd holds them.
CHUNK_SIZE = {"K": 16, "": 64}


@dataclass(frozen=True, kw_only=True)
class Operand:
    """What the chunked form needs of every token: a quantity of the normal form, under the name its code gives it."""

    name: str
    axis: str
    value: sympy.Expr


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The solved equations in two groups: those of a chunk by itself, and those that wait for its entering state."""

    form: ChunkForm

    @cached_property
    def waiting(self) -> tuple[Equation, ...]:
        known: set[Factor] = {Factor(name="S")}
        found = []
        for derived in self.form.solved:
            if known & _factors(derived):
                known.add(derived.target)
                found.append(derived)
        return tuple(found)

    @cached_property
    def independent(self) -> tuple[Equation, ...]:
        return tuple(derived for derived in self.form.solved if derived not in self.waiting)

    @cached_property
    def operands(self) -> tuple[Factor, ...]:
        """Everything of a chunk that the waiting equations read, in the order they read it."""
        own = {Factor(name="S"), *(derived.target for derived in self.waiting)}
        return tuple(factor for factor in self._needed(self.waiting) if factor not in own)

    @cached_property
    def given(self) -> tuple[Factor, ...]:
        """Block quantities that no equation defines: they are formed from the tokens."""
        defined = {derived.target for derived in self.form.solved} | {Factor(name="S")}
        return tuple(factor for factor in self._needed(self.form.solved) if factor not in defined)

    def _needed(self, derived: tuple[Equation, ...]) -> tuple[Factor, ...]:
        decays = self.form.normal_form.decay is not None
        found = [_plain(f) for equation in derived for term in equation.terms for f in term.factors]
        return tuple(dict.fromkeys(factor for factor in found if decays or factor.name != "decay_out"))


def emit_eager(form: ChunkForm) -> Mapping[str, str]:
    """`eager.py`: eager_chunk_<op>, chunk by chunk in torch."""
    normal, schedule = form.normal_form, Schedule(form=form)
    spec = normal.spec
    operands = list(_operands(normal))
    functions = _functions(spec, operands)
    text = render(
        "eager.py.jinja",
        op=spec.name,
        title=title(spec),
        equation=equation_lines(spec),
        inputs=arguments.input_names(spec),
        token_arguments=arguments.token_arguments(spec),
        state_arguments=list(arguments.STATE_ARGUMENTS),
        option_arguments=arguments.option_arguments(spec),
        params=[param.name for param in spec.params],
        chunk_size=CHUNK_SIZE[normal.decay.axis if normal.decay else ""],
        sizes=arguments.sizes(spec),
        value_input=arguments.value_input(spec).name,
        options=arguments.option_lines(spec, lambda rewrite: _rewrite(spec, rewrite)),
        operands=[{"name": operand.name, "value": _spread(spec, operand)} for operand in operands],
        operand_names=[operand.name for operand in operands],
        decays=normal.decay is not None,
        exclusive=any(_exclusive(normal, i) for i in normal.erasing),
        preparation=list(_preparation(normal, schedule)),
        independent=[rows.equation(derived, decays=normal.decay is not None) for derived in schedule.independent],
        waiting=[rows.equation(derived, decays=normal.decay is not None) for derived in schedule.waiting],
        step_operands=[rows.variable(factor) for factor in schedule.operands],
        torch_functions=sorted(functions & {"sigmoid", "sqrt"}),
        runtime_functions=sorted(functions & {"exp", "softplus"} | ({"exp"} if normal.decay else set())),
    )
    return {"eager.py": text}


def _plain(factor: Factor) -> Factor:
    return Factor(name=factor.name, index=factor.index)


def _factors(derived: Equation) -> set[Factor]:
    return {_plain(factor) for term in derived.terms for factor in term.factors}


def _exclusive(normal: NormalForm, i: int) -> bool:
    """Whether an erase reads a state that still has its token's decay before it."""
    return normal.decay is not None and not normal.terms[i].erase_reads_decayed


def _operands(normal: NormalForm) -> Iterator[Operand]:
    yield Operand(name="read", axis="K", value=normal.read)
    if normal.decay is not None:
        yield Operand(name="log_decay", axis=normal.decay.axis, value=normal.decay.log)
    for j, term in enumerate(normal.terms):
        yield Operand(name=f"write_{j}", axis="K", value=term.write)
        if term.value != 0:
            yield Operand(name=f"V_{j}", axis="V", value=term.value)
        if term.erase != 0:
            yield Operand(name=f"erase_{j}", axis="K", value=term.erase)


def _spread(spec: Spec, operand: Operand) -> str:
    """The operand at its full shape, which an expression of narrower names does not have by itself."""
    value = rows.expression(operand.value)
    if axis_of(operand.value, spec.axes) == operand.axis and {*names(operand.value)} & {*arguments.input_names(spec)}:
        return value.text
    return f"{value.at(ATOM)}.expand(B, T, HV, {operand.axis or 1})"


def _preparation(normal: NormalForm, schedule: Schedule) -> Iterator[str]:
    """Statements that form the given block quantities from the operands."""
    given = schedule.given
    for factor in given:
        if factor.name in ("q_in", "a_in", "w_out", "decay_out"):
            yield _decayed(normal, factor)
    for factor in _scores(normal, given):
        yield f"{rows.variable(factor)} = {_score(normal, factor)}"
    if normal.erasing:
        yield f"{_blocks(normal, 'T')} = runtime.inverse({_blocks(normal, 'L')})"


def _scores(normal: NormalForm, given: tuple[Factor, ...]) -> list[Factor]:
    """Every A and L that is needed; the inverse needs all L among erasing terms."""
    named = [factor for factor in given if factor.name in ("A", "L")]
    solved = [Factor(name="L", index=(i, e)) for i in normal.erasing for e in normal.erasing]
    return sorted({*named, *solved}, key=lambda factor: (factor.name, factor.index))


def _score(normal: NormalForm, factor: Factor) -> str:
    write = f"write_{factor.index[-1]}"
    decayed = normal.decay is not None
    if factor.name == "A":
        return f"runtime.scores(read, {write}{', D' if decayed else ''})"
    i = factor.index[0]
    sums = f", {'E' if _exclusive(normal, i) else 'D'}" if decayed else ""
    return f"runtime.scores(erase_{i}, {write}{sums}).tril(-1)"


def _decayed(normal: NormalForm, factor: Factor) -> str:
    i = factor.index[0] if factor.index else 0
    source, decay = {
        "q_in": ("read", "exp(G)"),
        "a_in": (f"erase_{i}", "exp(X)" if _exclusive(normal, i) else "exp(G)"),
        "w_out": (f"write_{i}", "exp(R)"),
        "decay_out": ("", "exp(G[..., -1:, :]).mT"),
    }[factor.name]
    value = " * ".join(filter(None, [decay if normal.decay else "", source]))
    return f"{rows.variable(factor)} = {value}"


def _blocks(normal: NormalForm, name: str) -> str:
    lines = [", ".join(f"{name}_{i}_{e}" for e in normal.erasing) for i in normal.erasing]
    return f"[{', '.join(f'[{line}]' for line in lines)}]"


def _rewrite(spec: Spec, rewrite: Rewrite) -> str:
    value = from_syntax(rewrite.value, spec)
    code = rows.expression(value)
    varies = {*names(value)} & {*arguments.input_names(spec)}
    return f"{rewrite.target} = {code.text if varies else f'({code.text}).expand_as({rewrite.target})'}"


def _functions(spec: Spec, operands: list[Operand]) -> frozenset[str]:
    rewrites = [r.value for option in spec.options for variant in option.variants for r in variant.rewrites]
    values = [*(operand.value for operand in operands), *(from_syntax(value, spec) for value in rewrites)]
    return frozenset().union(*map(rows.functions_in, values))
