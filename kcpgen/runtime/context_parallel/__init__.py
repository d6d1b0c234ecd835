"""Context parallelism: one packed row of tokens spread over the ranks of a group, exact to rounding.

`build_cp_context` says what a rank holds; a generated op takes the result as `cp_context`.
"""

from kcpgen.runtime.context_parallel.context import CPContext, build_cp_context
from kcpgen.runtime.context_parallel.errors import (
    ContextParallelError,
    RankFailedError,
    RankMismatchError,
    RankTimeoutError,
)

__all__ = [
    "CPContext",
    "ContextParallelError",
    "RankFailedError",
    "RankMismatchError",
    "RankTimeoutError",
    "build_cp_context",
]
