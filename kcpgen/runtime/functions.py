"""Elementwise functions and settings that generated torch code shares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

# The smallest log-decays worth telling apart: exp of them is already 0. Clamping there keeps -inf out of differences.
LOG_ZERO = {torch.float32: -120.0, torch.float64: -750.0}
# Largest exponents whose exponential stays finite when multiplied by any activation that occurs.
LOG_HUGE = {torch.float32: 60.0, torch.float64: 600.0}


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32; absent tensors don't count."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def exp(x: Tensor) -> Tensor:
    """e^x, saturating far above every real gate, so that a closed gate is a large number times 0, not inf times 0."""
    return torch.exp(x.clamp(max=LOG_HUGE[x.dtype]))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) to full precision; torch's own switches to x at 20, an error of 2e-9."""
    return torch.logaddexp(x, torch.zeros_like(x))


def log_decay(x: Tensor) -> Tensor:
    """A natural-log decay whose sums and differences are finite: -inf becomes a number whose exponential is 0."""
    return x.clamp(min=LOG_ZERO[x.dtype])


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of tensors with autocast off: what it computes in is decided by its inputs alone."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        active = [kind for kind in sorted(kinds) if torch.amp.is_autocast_available(kind)]
        return _with_autocast_off(active, lambda: function(*args, **kwargs))

    return wrapped


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will have a backward of a function of these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Leave a function out of what torch.compile captures.

    As torch.compiler.disable, but without its import of the compiler, which takes as long as that of torch.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **kwargs)

    return wrapped


def _with_autocast_off(kinds: list[str], call: Callable[[], R]) -> R:
    if not kinds:
        return call()
    with torch.autocast(kinds[0], enabled=False):
        return _with_autocast_off(kinds[1:], call)
