"""What the parser makes of each statement, before names and shapes are checked."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from kcpgen.language.syntax import Expr, Span


@dataclass(frozen=True, kw_only=True)
class Word:
    """A name as declared or mentioned outside an expression, Greek letters already spelled out."""

    text: str
    span: Span


@dataclass(frozen=True, kw_only=True)
class Promise:
    """`in [low, high]`; a bound is a number or the name of a constant."""

    low: Fraction | Word
    high: Fraction | Word
    span: Span


@dataclass(frozen=True, kw_only=True)
class Op:
    name: Word
    title: str
    title_span: Span
    span: Span


@dataclass(frozen=True, kw_only=True)
class Token:
    names: tuple[Word, ...]
    shape: tuple[Word, ...]
    shape_span: Span
    log_decay: bool
    promise: Promise | None
    span: Span


@dataclass(frozen=True, kw_only=True)
class Param:
    names: tuple[Word, ...]
    shape: tuple[Word, ...]
    shape_span: Span
    span: Span


@dataclass(frozen=True, kw_only=True)
class Constant:
    names: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, kw_only=True)
class Flag:
    names: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, kw_only=True)
class State:
    name: Word
    shape: tuple[Word, ...]
    shape_span: Span
    span: Span


@dataclass(frozen=True, kw_only=True)
class Equation:
    """`target[t] = value`: the update of the state or the readout."""

    target: Word
    value: Expr
    span: Span


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    target: Word
    value: Expr
    promise: Promise | None
    span: Span


@dataclass(frozen=True, kw_only=True)
class Rewrites:
    rewrites: tuple[Rewrite, ...]
    span: Span


@dataclass(frozen=True, kw_only=True)
class When:
    condition: Word
    rewrites: tuple[Rewrite, ...]
    span: Span


@dataclass(frozen=True, kw_only=True)
class Option:
    name: Word
    rewrites: tuple[Rewrite, ...]
    span: Span


Statement: TypeAlias = Op | Token | Param | Constant | Flag | State | Equation | Rewrites | When | Option
