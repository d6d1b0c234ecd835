"""Text of a spec -> statements. Each is parsed on its own, so that all of them report their faults together."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token, Tree, UnexpectedToken
from lark.lexer import Lexer

from kcpgen.diagnostics import Faults, SpecError
from kcpgen.language import statements as st
from kcpgen.language import syntax_errors
from kcpgen.language.expressions import ExpressionBuilder, leaf
from kcpgen.language.lexer import balanced, lex, span_of
from kcpgen.language.limits import MAX_FAULTS, check_depth, fits
from kcpgen.language.syntax import Expr, Span


def parse_statements(text: str, path: str) -> list[st.Statement]:
    """All statements of a file in order. Raises SpecError with every syntax error."""
    faults = Faults()
    builder = StatementBuilder(path, faults)
    statements = []
    for group in lex(text):
        if balanced(group, path, faults) and fits(group, path, faults):
            statements.append(_parse(group, path, builder, faults))
        if len(faults.found) >= MAX_FAULTS:
            break
    if faults.found:
        raise SpecError(faults.found, text)
    return [statement for statement in statements if statement is not None]


def _parse(group: list[Token], path: str, builder: StatementBuilder, faults: Faults) -> st.Statement | None:
    try:
        tree = _grammar().parse(group)
    except UnexpectedToken as error:
        syntax_errors.report(error, group, path, faults)
        return None
    return builder.statement(tree)


class _Tokens(Lexer):
    """Hands the tokens of one statement, lexed already, to the parser."""

    def __init__(self, lexer_conf: Any) -> None:
        pass

    def lex(self, data: Any) -> Iterator[Token]:  # type: ignore[override]
        yield from data


@cache
def _grammar() -> Lark:
    grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    return Lark(grammar, start="statement", parser="lalr", lexer=_Tokens)


class StatementBuilder:
    """Parse tree of a statement -> statement; faults that leave the tree readable go to `faults`."""

    def __init__(self, path: str, faults: Faults) -> None:
        self.path = path
        self.faults = faults
        self.expressions = ExpressionBuilder(path, faults)

    def statement(self, tree: Tree[Token]) -> st.Statement:
        (inner,) = tree.children
        assert isinstance(inner, Tree)
        made: st.Statement = getattr(self, f"_{inner.data}")(inner)
        return made

    def _op(self, tree: Tree[Token]) -> st.Op:
        title = tokens(tree)[1:]
        name = self._name(tree)
        return st.Op(
            name=name,
            title=str(title[0])[1:-1] if title else "",
            title_span=self._span(title[0]) if title else name.span,
            span=self._span(tree),
        )

    def _token(self, tree: Tree[Token]) -> st.Token:
        return st.Token(
            names=self._names(tree),
            shape=self._shape(tree),
            shape_span=self._span(child(tree, "shape")),
            log_decay=has(tree, "role"),
            promise=self._promise(tree),
            span=self._span(tree),
        )

    def _param(self, tree: Tree[Token]) -> st.Param:
        return st.Param(
            names=self._names(tree),
            shape=self._shape(tree),
            shape_span=self._span(child(tree, "shape")),
            span=self._span(tree),
        )

    def _constant(self, tree: Tree[Token]) -> st.Constant:
        return st.Constant(names=self._names(tree), span=self._span(tree))

    def _flag(self, tree: Tree[Token]) -> st.Flag:
        return st.Flag(names=self._names(tree), span=self._span(tree))

    def _state(self, tree: Tree[Token]) -> st.State:
        return st.State(
            name=self._name(tree),
            shape=self._shape(tree),
            shape_span=self._span(child(tree, "shape")),
            span=self._span(tree),
        )

    def _equation(self, tree: Tree[Token]) -> st.Equation:
        self._check_target(tree)
        return st.Equation(target=self._word(tokens(tree)[0]), value=self._value(tree), span=self._span(tree))

    def _option(self, tree: Tree[Token]) -> st.Option:
        return st.Option(name=self._name(tree), rewrites=self._inline(tree), span=self._span(tree))

    def _when(self, tree: Tree[Token]) -> st.When:
        return st.When(condition=self._word(tokens(tree)[1]), rewrites=self._inline(tree), span=self._span(tree))

    def _rewrites(self, tree: Tree[Token]) -> st.Rewrites:
        rewrites = tuple(self._rewrite(node) for node in tree.children if isinstance(node, Tree))
        return st.Rewrites(rewrites=rewrites, span=self._span(tree))

    def _rewrite(self, tree: Tree[Token]) -> st.Rewrite:
        self._check_target(tree)
        return st.Rewrite(
            target=self._word(tokens(tree)[0]),
            value=self._value(tree),
            promise=self._promise(tree),
            span=self._span(tree),
        )

    def _value(self, tree: Tree[Token]) -> Expr:
        value = self.expressions.build(child(tree, "expression"))
        check_depth(value, self.faults)
        return value

    def _inline(self, tree: Tree[Token]) -> tuple[st.Rewrite, ...]:
        return self._rewrites(child(tree, "rewrites")).rewrites if has(tree, "rewrites") else ()

    def _check_target(self, tree: Tree[Token]) -> None:
        if has(tree, "index") and self.expressions.offset(child(tree, "index")) != 0:
            span = self._span(child(tree, "index"))
            self.faults.add("KCP013", "an equation defines its target at token t", span, hint="write `[t]`")

    def _promise(self, tree: Tree[Token]) -> st.Promise | None:
        if not has(tree, "promise"):
            return None
        promise = child(tree, "promise")
        low, high = (self._bound(node) for node in promise.children if isinstance(node, Tree))
        return st.Promise(low=low, high=high, span=self._span(promise))

    def _bound(self, tree: Tree[Token]) -> Fraction | st.Word:
        *sign, last = tokens(tree)
        if last.type == "NAME":
            return self._word(last)
        value = self.expressions.number(last)
        return -value if sign else value

    def _name(self, tree: Tree[Token]) -> st.Word:
        return self._word(leaf(child(tree, "name"), 0))

    def _names(self, tree: Tree[Token]) -> tuple[st.Word, ...]:
        names = child(tree, "names").children
        return tuple(self._word(leaf(name, 0)) for name in names if isinstance(name, Tree))

    def _shape(self, tree: Tree[Token]) -> tuple[st.Word, ...]:
        return tuple(self._word(token) for token in tokens(child(tree, "shape")) if token.type == "NAME")

    def _word(self, token: Token) -> st.Word:
        return st.Word(text=str(token), span=self._span(token))

    def _span(self, tree: Tree[Token] | Token) -> Span:
        return span_of(leaf(tree, 0), leaf(tree, -1), self.path)


def tokens(tree: Tree[Token]) -> list[Token]:
    """The tokens directly below `tree`."""
    return [node for node in tree.children if isinstance(node, Token)]


def has(tree: Tree[Token], rule: str) -> bool:
    return any(isinstance(node, Tree) and node.data == rule for node in tree.children)


def child(tree: Tree[Token], rule: str) -> Tree[Token]:
    return next(node for node in tree.children if isinstance(node, Tree) and node.data == rule)
