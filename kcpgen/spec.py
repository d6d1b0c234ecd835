"""A checked spec: what the language stage promises to everything after it.

Made by `kcpgen.language.check`; every name is declared, every shape fits, nothing reads the future.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kcpgen.language.syntax import Expr, Shape, Span

HeadGroup = Literal["H", "HV"]
Role = Literal["data", "log_decay"]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A promise of the spec about every element of an input, e.g. `in [-5, 0]`.

    `low_constant` names the constant whose value is the lower bound at run time (`in [lower_bound, 0]`); `low` is then
    -inf.
    """

    low: float
    high: float
    low_constant: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenInput:
    """One tensor with a value per token: [B, T, heads] or [B, T, heads, axis].

    `axis` is "" for a scalar per head, else the dimension's name ("K" or "V").
    A `log_decay` is a natural logarithm; without `bounds` nothing but g <= 0 may be assumed of it.
    """

    name: str
    heads: HeadGroup
    axis: str
    role: Role
    bounds: Bounds | None
    span: Span


@dataclass(frozen=True, kw_only=True)
class Param:
    """A learned tensor shared by all tokens: [HV] (axis "") or [HV, axis]. fp32, gets a gradient."""

    name: str
    axis: str
    span: Span


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A Python float the caller may pass as a keyword (no gradient), e.g. `lower_bound`; None when not given."""

    name: str
    span: Span


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """`target <- value`, a token-local replacement of one input before the recurrence sees it."""

    target: str
    value: Expr
    bounds: Bounds | None
    span: Span


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way an option acts. `when` names the flag or constant that selects it ("" for the option's plain form)."""

    when: str
    rewrites: tuple[Rewrite, ...]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A boolean keyword of the generated op. Its active variant is the last one whose `when` is given."""

    name: str
    variants: tuple[Variant, ...]
    span: Span


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A linear recurrence on a matrix state, as the paper writes it.

    `update` is the value of S[t] as an expression of S[t-1] and inputs; `readout` the value of o[t].
    `title` is the op's name where the file gives none.
    `flags` are boolean keywords that only select variants (e.g. `allow_neg_eigval`).
    """

    name: str
    title: str
    path: str
    text: str
    inputs: tuple[TokenInput, ...]
    params: tuple[Param, ...]
    constants: tuple[Constant, ...]
    flags: tuple[str, ...]
    options: tuple[Option, ...]
    state: str
    output: str
    update: Expr
    readout: Expr

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every name an expression may mention, token and head axes left out."""
        shapes: dict[str, Shape] = {self.state: ("K", "V"), "scale": ("1", "1")}
        tensors: tuple[TokenInput | Param, ...] = (*self.inputs, *self.params)
        for declared in tensors:
            shapes[declared.name] = (declared.axis or "1", "1")
        for constant in self.constants:
            shapes[constant.name] = ("1", "1")
        return shapes

    @property
    def axes(self) -> Mapping[str, str]:
        """Name -> axis ("", "K" or "V") of everything token-local."""
        return {name: "" if rows == "1" else rows for name, (rows, _) in self.shapes.items() if name != self.state}
