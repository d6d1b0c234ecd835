"""A state that may be another rank's, and still on its way."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Awaited:
    """`fetch()` waits for it, on the stream that is current then or on the host: once, where it is first asked for."""

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch = fetch
        self._found: Tensor | None = None

    def get(self) -> Tensor:
        if self._found is None:
            self._found = self._fetch()
        return self._found


def arrived(state: Tensor | Awaited | None) -> Tensor | None:
    return state.get() if isinstance(state, Awaited) else state
