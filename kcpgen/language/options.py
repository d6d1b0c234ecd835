"""Options: which rewrites belong to which keyword, and what a rewrite may do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kcpgen.diagnostics import Diagnostic
from kcpgen.language import names
from kcpgen.language import statements as st
from kcpgen.language.declarations import Declarations
from kcpgen.language.promises import bounds
from kcpgen.language.reads import check_reads, reads
from kcpgen.language.shapes import ShapeChecker, shown
from kcpgen.language.syntax import Span
from kcpgen.spec import Option, Rewrite, TokenInput, Variant

Report = Callable[[Diagnostic], None]


@dataclass
class _OpenVariant:
    when: str
    span: Span
    rewrites: list[st.Rewrite] = field(default_factory=list)


@dataclass
class _OpenOption:
    name: st.Word
    variants: list[_OpenVariant]


def options(statements: Sequence[st.Statement], declared: Declarations, report: Report) -> tuple[Option, ...]:
    """The options of a file, checked; a rewrite and a `when` belong to the option above them."""
    grouped = _grouped(statements, declared, report)
    _check_overlap(grouped, report)
    checker = _RewriteChecker(declared, report)
    return tuple(
        Option(
            name=option.name.text,
            variants=tuple(
                Variant(when=v.when, rewrites=tuple(filter(None, (checker.checked(r, v.when) for r in v.rewrites))))
                for v in option.variants
            ),
            span=option.name.span,
        )
        for option in grouped
    )


def _grouped(statements: Sequence[st.Statement], declared: Declarations, report: Report) -> list[_OpenOption]:
    found: list[_OpenOption] = []
    current: _OpenOption | None = None
    for statement in statements:
        match statement:
            case st.Option():
                plain = _OpenVariant(when="", span=statement.name.span, rewrites=list(statement.rewrites))
                current = _OpenOption(name=statement.name, variants=[plain])
                found.append(current)
            case st.When() if current is not None:
                _check_condition(statement.condition, current, declared, report)
                variant = _OpenVariant(when=statement.condition.text, span=statement.span, rewrites=list(statement.rewrites))
                current.variants.append(variant)
            case st.Rewrites() if current is not None:
                current.variants[-1].rewrites.extend(statement.rewrites)
            case st.When() | st.Rewrites():
                hint = "add `option use_something_in_kernel:` above it"
                _fault(report, "KCP115", "no option above this line", statement.span, hints=(hint,))
            case _:
                current = None
    for option in found:
        for variant in option.variants:
            if not variant.rewrites:
                _fault(report, "KCP115", "this does nothing", variant.span, hints=("add a rewrite, `q <- l2norm(q)`",))
    return found


def _check_condition(condition: st.Word, option: _OpenOption, declared: Declarations, report: Report) -> None:
    known = {*declared.flags, *(constant.name for constant in declared.constants)}
    if condition.text not in known:
        hints = names.did_you_mean(condition.text, known) or (f"declare it, `flag {condition.text}`",)
        _fault(report, "KCP116", f"`{condition.text}` is neither a flag nor a constant", condition.span, hints=hints)
    elif condition.text in {variant.when for variant in option.variants}:
        _fault(report, "KCP116", f"`when {condition.text}` stands twice in one option", condition.span)


def _check_overlap(grouped: list[_OpenOption], report: Report) -> None:
    """Two options on one target have no order, two rewrites in one variant no winner."""
    owner: dict[str, str] = {}
    for option in grouped:
        for variant in option.variants:
            seen: set[str] = set()
            for rewrite in variant.rewrites:
                target = rewrite.target.text
                if target in seen or owner.setdefault(target, option.name.text) != option.name.text:
                    hints = ("write one rewrite, or a `when` variant of the option above",)
                    message = f"`{target}` is rewritten twice"
                    _fault(report, "KCP113", message, rewrite.target.span, hints=hints)
                seen.add(target)


class _RewriteChecker:
    def __init__(self, declared: Declarations, report: Report) -> None:
        self.declared = declared
        self.report = report
        self.inputs = {declared_input.name: declared_input for declared_input in declared.inputs}
        self.constants = frozenset(constant.name for constant in declared.constants)

    def checked(self, rewrite: st.Rewrite, when: str) -> Rewrite | None:
        target = self.inputs.get(rewrite.target.text)
        if target is None:
            self._unknown_target(rewrite.target)
            return None
        check_reads(rewrite.value, self.declared, "rewrite", self.report)
        self._check_values(rewrite, target, when)
        self._check_shape(rewrite, target)
        return Rewrite(
            target=target.name, value=rewrite.value, bounds=self._bounds(rewrite, target, when), span=rewrite.span
        )

    def _unknown_target(self, target: st.Word) -> None:
        hints = names.did_you_mean(target.text, self.inputs)
        _fault(self.report, "KCP112", f"`{target.text}` is no token input", target.span, hints=hints)

    def _check_values(self, rewrite: st.Rewrite, target: TokenInput, when: str) -> None:
        for name in reads(rewrite.value):
            if name.name in self.inputs and name.name != target.name:
                note = "a rewrite reads its target, parameters and the constant its `when` tests"
                message = f"the rewrite of `{target.name}` reads `{name.name}`"
                _fault(self.report, "KCP114", message, name.span, notes=(note,))
            elif name.name in self.constants and name.name != when:
                note = f"`{name.name}` may be None here; only `when {name.name}:` makes sure it was given"
                _fault(self.report, "KCP117", f"constant `{name.name}` is not tested", name.span, notes=(note,))
            elif target.heads == "H" and name.name in {param.name for param in self.declared.params}:
                note = f"`{target.name}` has H heads, parameters have HV, a multiple of it"
                message = f"the rewrite of `{target.name}` needs `{name.name}` per H head"
                _fault(self.report, "KCP114", message, name.span, notes=(note,))

    def _check_shape(self, rewrite: st.Rewrite, target: TokenInput) -> None:
        shape = ShapeChecker(self.declared.shapes, self.report).shape(rewrite.value)
        expected = (target.axis or "1", "1")
        if shape is not None and shape != expected:
            message = f"`{target.name}` is {shown(expected)}, its rewrite {shown(shape)}"
            _fault(self.report, "KCP121", message, rewrite.value.span)

    def _bounds(self, rewrite: st.Rewrite, target: TokenInput, when: str):  # type: ignore[no-untyped-def]
        if rewrite.promise is None:
            return None
        if target.role != "log_decay":
            message = "only a log decay has a promised range"
            _fault(self.report, "KCP123", message, rewrite.promise.span)
            return None
        return bounds(rewrite.promise, self.constants & {when}, self.report)


def _fault(
    report: Report, code: str, message: str, span: Span, notes: tuple[str, ...] = (), hints: tuple[str, ...] = ()
) -> None:
    report(Diagnostic(code=code, message=message, span=span, notes=notes, hints=hints))
