"""Which rewrites belong to which option: a rewrite or a `when` belongs to the option above it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kcpgen.diagnostics import Faults
from kcpgen.language import names
from kcpgen.language import statements as st
from kcpgen.language.declarations import Declarations
from kcpgen.language.rewrites import RewriteChecker
from kcpgen.language.syntax import Span
from kcpgen.spec import Option, Variant


@dataclass(frozen=True, kw_only=True)
class _Variant:
    when: str
    span: Span
    rewrites: list[st.Rewrite]


@dataclass(frozen=True, kw_only=True)
class _Option:
    name: st.Word
    variants: list[_Variant] = field(default_factory=list)


def options(statements: Sequence[st.Statement], declared: Declarations, faults: Faults) -> tuple[Option, ...]:
    """The options of a file, checked."""
    grouped = _grouped(statements, declared, faults)
    _check_empty(grouped, faults)
    _check_overlap(grouped, faults)
    checker = RewriteChecker(declared, faults)
    return tuple(_option(option, checker) for option in grouped)


def _option(option: _Option, checker: RewriteChecker) -> Option:
    variants = []
    for variant in option.variants:
        rewrites = (checker.checked(rewrite, variant.when) for rewrite in variant.rewrites)
        variants.append(Variant(when=variant.when, rewrites=tuple(filter(None, rewrites))))
    return Option(name=option.name.text, variants=tuple(variants), span=option.name.span)


def _grouped(statements: Sequence[st.Statement], declared: Declarations, faults: Faults) -> list[_Option]:
    found: list[_Option] = []
    current: _Option | None = None
    for statement in statements:
        match statement:
            case st.Option(name=name, rewrites=rewrites):
                current = _Option(name=name, variants=[_Variant(when="", span=name.span, rewrites=list(rewrites))])
                found.append(current)
            case st.When(condition=condition, rewrites=rewrites) if current is not None:
                _check_condition(condition, current, declared, faults)
                variant = _Variant(when=condition.text, span=condition.span, rewrites=list(rewrites))
                current.variants.append(variant)
            case st.Rewrites(rewrites=rewrites) if current is not None:
                current.variants[-1].rewrites.extend(rewrites)
            case st.When() | st.Rewrites():
                hint = "put `option use_something_in_kernel:` above it"
                faults.add("KCP115", "no option above this line", statement.span, hint=hint)
            case _:
                current = None
    return found


def _check_condition(condition: st.Word, option: _Option, declared: Declarations, faults: Faults) -> None:
    known = {*declared.flags, *(constant.name for constant in declared.constants)}
    if condition.text not in known:
        hint = names.did_you_mean(condition.text, known) or f"declare it, `flag {condition.text}`"
        message = f"`{condition.text}` is neither a flag nor a constant"
        faults.add("KCP116", message, condition.span, hint=hint)
    elif condition.text in {variant.when for variant in option.variants}:
        faults.add("KCP116", f"`when {condition.text}` stands twice in one option", condition.span)


def _check_empty(grouped: list[_Option], faults: Faults) -> None:
    for option in grouped:
        for variant in option.variants:
            if not variant.rewrites:
                message = "nothing happens when this is given"
                faults.add("KCP115", message, variant.span, hint="add a rewrite such as `q <- l2norm(q)`")


def _check_overlap(grouped: list[_Option], faults: Faults) -> None:
    """Two options on one target have no order, two rewrites in one variant no winner."""
    owner: dict[str, str] = {}
    for option in grouped:
        for variant in option.variants:
            seen: set[str] = set()
            for target in (rewrite.target for rewrite in variant.rewrites):
                if target.text in seen or owner.setdefault(target.text, option.name.text) != option.name.text:
                    hint = "write one rewrite, or make one a `when` variant of the other's option"
                    faults.add("KCP113", f"`{target.text}` is rewritten twice", target.span, hint=hint)
                seen.add(target.text)
