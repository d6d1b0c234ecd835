"""One all-gather of rank summaries: begun when the summary is there, waited for when it is needed, then checked.

In a CUDA graph nothing is: headers are of one call, and a graph is replayed. They are zero there, so that a rank which
replays one while another makes a call is found by that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from kcpgen.runtime import streams
from kcpgen.runtime.context_parallel.deferred import Slot, check_deferred, defer, slot_for
from kcpgen.runtime.context_parallel.errors import ContextParallelError
from kcpgen.runtime.context_parallel.payload import HEADER, Format, check_headers, gradients, header, write
from kcpgen.runtime.context_parallel.transport import Pending

if TYPE_CHECKING:
    from kcpgen.runtime.context_parallel.context import CPContext


class Exchange:
    """`payload` is this rank's to fill inside `summarising`; `wait` then returns those of all ranks, [W, n].

    captured: whether it becomes part of a CUDA graph.
    """

    def __init__(
        self, op: str, cp: CPContext, form: Format, like: Tensor, *, backward: bool, differentiable: bool
    ) -> None:
        self.captured = streams.capturing()
        if not self.captured:  # a question to the device would end that
            check_deferred(wait=False)
        self.form = form
        self._cp = cp
        self._backward = backward
        self._differentiable = differentiable
        self._call = cp.transport.next_call()
        sizes = _sizes(op, form, cp.world_size, str(like.dtype), backward)
        cp.transport.agree(sizes, self._about(), cp.timeout)
        self.payload = like.new_empty(form.numbers)
        self._slot: Slot | None = None
        self._pending: Pending | None = None
        self._gathered: Tensor | None = None
        self._left = False

    def _about(self) -> dict[str, str | int]:
        return {
            "direction": "backward" if self._backward else "forward",
            **self._cp.about,
            "attempt": self._cp.transport.attempt,
            "gradients": gradients(self._differentiable),
        }

    @contextmanager
    def summarising(self) -> Iterator[None]:
        """Send what the body wrote; if it raises, send that instead, so that the other ranks raise rather than wait."""
        try:
            yield
        except BaseException as error:
            self._cp.transport.report(error, ahead=0)
            self._send(failed=True)
            raise
        self._send(failed=False)

    def _send(self, *, failed: bool) -> None:
        cp = self._cp
        if self.payload.is_cuda and self.captured:
            self.payload[:HEADER].zero_()  # and no copy from the host, whose memory a replay would read again
            self._pending = cp.transport.all_gather(self.payload, cp.timeout)
            return
        numbers = header(
            call=self._call,
            attempt=cp.transport.attempt,
            backward=self._backward,
            differentiable=self._differentiable,
            fingerprints=cp.fingerprints,
            failed=failed,
        )
        if self.payload.is_cuda:
            self._slot = slot_for(self.payload.device, self.payload.dtype, cp.world_size)
        write(numbers, self.payload[:HEADER], None if self._slot is None else self._slot.sent)
        self._pending = cp.transport.all_gather(self.payload, cp.timeout)

    def wait(self) -> Tensor:
        """Where it is called first the stream, or the host, waits; all that follows finds the payloads there."""
        if self._gathered is None:
            self._gathered = self._received()
        return self._gathered

    def leave(self) -> None:
        """Nothing more of what comes is needed: the current stream goes on, and headers are checked as ever.

        Not in a CUDA graph: all of its streams have to meet again before its end, which nobody here knows of.
        """
        if self._gathered is not None:
            return
        if not self.payload.is_cuda or self.captured:
            self.wait()
            return
        self._left = True
        with streams.apart(self.payload.device):
            self.wait()

    def _received(self) -> Tensor:
        assert self._pending is not None
        gathered = self._pending.wait()
        if not gathered.is_cuda:
            self._check(gathered[:, :HEADER])
        elif not self.captured:
            assert self._slot is not None
            held = (self.payload, gathered) if self._left else ()
            defer(gathered[:, :HEADER], self._slot, self._cp.rank, self._cp.transport, held)
            if self._cp.check == "now":
                check_deferred(wait=True, owner=self._cp.transport)
        return gathered

    def _check(self, headers: Tensor) -> None:
        try:
            check_headers(headers, self._cp.rank)
        except ContextParallelError:
            self._cp.transport.raise_reported()  # a rank that failed, in its own words
            raise


@lru_cache(maxsize=64)
def _sizes(op: str, form: Format, ranks: int, dtype: str, backward: bool) -> Mapping[str, str | int]:
    return {
        "op": op,
        "direction": "backward" if backward else "forward",
        "ranks": ranks,
        "heads": form.heads,
        "keys": form.keys,
        "values": form.values,
        "transition": form.kind,
        "dtype": dtype,
        "numbers": form.numbers,
    }
