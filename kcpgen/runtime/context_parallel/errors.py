"""What goes wrong between ranks. Every error says which rank, and where two ranks disagree, on which field."""

from __future__ import annotations


class ContextParallelError(RuntimeError):
    """A rank failed, disagrees with another or does not answer. All ranks of the group raise one."""


class RankFailedError(ContextParallelError):
    """Another rank raised; its own error is in its own traceback."""


class RankMismatchError(ContextParallelError):
    """Ranks came to one exchange with different arguments."""


class RankTimeoutError(ContextParallelError):
    """A rank did not come to an exchange in time."""
