"""What an op's equation says about its inputs, for whoever has to make some: verification, benchmarks, tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Term:
    """One rank-1 part of the update, S <- D S + write (value + S^T erase)^T: the token inputs in each factor."""

    write: tuple[str, ...]
    value: tuple[str, ...]
    erase: tuple[str, ...]  # (): a pure write


@dataclass(frozen=True, kw_only=True)
class Description:
    """Roles and promises of token inputs.

    log_decays: inputs that are natural logarithms of a decay. bounds: what the spec promises of an input, (low, high).
    rewrites: for each option its variants (by the flag or constant that selects it, "" for the plain form) and the
    inputs which that variant replaces: with the option on, they are raw activations.
    """

    log_decays: tuple[str, ...]
    bounds: Mapping[str, tuple[float, float]]
    rewrites: Mapping[str, Mapping[str, tuple[str, ...]]]
    terms: tuple[Term, ...]
