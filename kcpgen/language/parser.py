"""Text of a spec -> statements. Every statement is parsed on its own, so that all of them report their faults together."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token, Tree, UnexpectedToken
from lark.lexer import Lexer

from kcpgen.diagnostics import Diagnostic, SpecError
from kcpgen.language import statements as st
from kcpgen.language.expressions import ExpressionBuilder, leaf
from kcpgen.language.lexer import Lexed, lex, span_of
from kcpgen.language.limits import nesting_fault, size_fault
from kcpgen.language.syntax import Span
from kcpgen.language.syntax_errors import explain


def parse_statements(text: str, path: str) -> tuple[list[st.Statement], Lexed]:
    """All statements of a file in order. Raises SpecError with every syntax error."""
    lexed = lex(text, path)
    diagnostics = list(lexed.diagnostics)
    builder = StatementBuilder(path, diagnostics)
    statements = [statement for tokens in lexed.statements if (statement := _parse(tokens, path, builder)) is not None]
    if diagnostics:
        raise SpecError(diagnostics, text)
    return statements, lexed


def _parse(tokens: tuple[Token, ...], path: str, builder: StatementBuilder) -> st.Statement | None:
    fault = size_fault(tokens, path) or nesting_fault(tokens, path)
    if fault is not None:
        builder.diagnostics.append(fault)
        return None
    try:
        tree = _grammar().parse(tokens)  # type: ignore[arg-type]
    except UnexpectedToken as error:
        builder.diagnostics.append(explain(error, tokens, path))
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
    """Parse tree of a statement -> statement; faults that leave the tree readable go to `diagnostics`."""

    def __init__(self, path: str, diagnostics: list[Diagnostic]) -> None:
        self.path = path
        self.diagnostics = diagnostics
        self.expressions = ExpressionBuilder(path, diagnostics.append)

    def statement(self, tree: Tree[Token]) -> st.Statement:
        (inner,) = tree.children
        assert isinstance(inner, Tree)
        made: st.Statement = getattr(self, f"_{inner.data}")(inner)
        return made

    def _op(self, tree: Tree[Token]) -> st.Op:
        name, *title = tokens(tree)[1:]
        shown = title[0] if title else name
        return st.Op(
            name=self._word(name),
            title=str(title[0])[1:-1] if title else "",
            title_span=self._span(shown),
            span=self._span(tree),
        )

    def _token(self, tree: Tree[Token]) -> st.Token:
        return st.Token(
            names=self._words(tree, "names"),
            shape=self._words(tree, "shape"),
            shape_span=self._span(child(tree, "shape")),
            log_decay=has(tree, "role"),
            promise=self._promise(tree),
            span=self._span(tree),
        )

    def _param(self, tree: Tree[Token]) -> st.Param:
        return st.Param(
            names=self._words(tree, "names"),
            shape=self._words(tree, "shape"),
            shape_span=self._span(child(tree, "shape")),
            span=self._span(tree),
        )

    def _constant(self, tree: Tree[Token]) -> st.Constant:
        return st.Constant(names=self._words(tree, "names"), span=self._span(tree))

    def _flag(self, tree: Tree[Token]) -> st.Flag:
        return st.Flag(names=self._words(tree, "names"), span=self._span(tree))

    def _state(self, tree: Tree[Token]) -> st.State:
        return st.State(
            name=self._word(tokens(tree)[1]),
            shape=self._words(tree, "shape"),
            shape_span=self._span(child(tree, "shape")),
            span=self._span(tree),
        )

    def _equation(self, tree: Tree[Token]) -> st.Equation:
        self._check_target(tree)
        value = self.expressions.build(child(tree, "expression"))
        return st.Equation(target=self._word(tokens(tree)[0]), value=value, span=self._span(tree))

    def _option(self, tree: Tree[Token]) -> st.Option:
        return st.Option(name=self._word(tokens(tree)[1]), rewrites=self._inline(tree), span=self._span(tree))

    def _when(self, tree: Tree[Token]) -> st.When:
        return st.When(condition=self._word(tokens(tree)[1]), rewrites=self._inline(tree), span=self._span(tree))

    def _rewrites(self, tree: Tree[Token]) -> st.Rewrites:
        rewrites = tuple(self._rewrite(node) for node in tree.children if isinstance(node, Tree))
        return st.Rewrites(rewrites=rewrites, span=self._span(tree))

    def _rewrite(self, tree: Tree[Token]) -> st.Rewrite:
        self._check_target(tree)
        return st.Rewrite(
            target=self._word(tokens(tree)[0]),
            value=self.expressions.build(child(tree, "expression")),
            promise=self._promise(tree),
            span=self._span(tree),
        )

    def _inline(self, tree: Tree[Token]) -> tuple[st.Rewrite, ...]:
        return self._rewrites(child(tree, "rewrites")).rewrites if has(tree, "rewrites") else ()

    def _check_target(self, tree: Tree[Token]) -> None:
        if has(tree, "index") and self.expressions.offset(child(tree, "index")) != 0:
            span = self._span(child(tree, "index"))
            message = "an equation defines its target at token t"
            self.diagnostics.append(Diagnostic(code="KCP013", message=message, span=span, hints=("write `[t]`",)))

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

    def _words(self, tree: Tree[Token], rule: str) -> tuple[st.Word, ...]:
        return tuple(self._word(token) for token in tokens(child(tree, rule)) if token.type == "NAME")

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
