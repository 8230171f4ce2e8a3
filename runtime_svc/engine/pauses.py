"""Requests that stand still because their clients do not read: they end if others want what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from edge.errors import ClientStalled
from runtime_svc.engine.request import Finish, FinishReason, Request
from runtime_svc.engine.streams import OutputStream

#: The largest share of its time that a request may be paused while others want what it holds: a client has to read at
#: a twentieth of the model's pace, so that no client can hold a slot for hours with one token in every timeout.
MAX_PAUSED_SHARE: Final = 0.95
#: Looks at the paused requests in one timeout.
LOOKS: Final = 10


@dataclass(slots=True)
class _Pause:
    """A pause that lasts, and when the newest look saw the client read; times are by the event loop's clock."""

    stream: OutputStream
    began_s: float
    silent_since_s: float
    num_taken: int

    def note_reads(self, now_s: float) -> None:
        """Looks whether the client has read; a stream above its capacity stays full when one event is taken."""
        if self.stream.num_taken != self.num_taken:
            self.silent_since_s, self.num_taken = now_s, self.stream.num_taken


class PausedRequests:
    """The requests that are paused now, and since when."""

    def __init__(
        self, timeout_s: float, *, is_contended: Callable[[Request], bool], end: Callable[[Request, Finish], object]
    ) -> None:
        """Starts empty; a request may be paused for `timeout_s` while others want what it holds.

        `is_contended` tells whether other calls that wait for room do, or operations that wait for requests.
        """
        self._timeout_s = timeout_s
        self._is_contended = is_contended
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._pauses: dict[Request, _Pause] = {}
        self._look_handle: asyncio.TimerHandle | None = None

    def pause(self, request: Request, stream: OutputStream) -> None:
        """Pauses a request because its stream is full; harmless when repeated."""
        if request.is_paused:
            return
        request.is_paused = True
        now_s = self._loop.time()
        self._pauses[request] = _Pause(stream, began_s=now_s, silent_since_s=now_s, num_taken=stream.num_taken)
        if self._look_handle is None:
            self._look_handle = self._loop.call_later(self._timeout_s / LOOKS, self._look)

    def resume(self, request: Request) -> None:
        """Ends the pause of a request that is paused."""
        request.is_paused = False
        request.paused_s += self._loop.time() - self._pauses.pop(request).began_s

    def _look(self) -> None:
        self._look_handle = None
        now_s = self._loop.time()
        for request, pause in list(self._pauses.items()):
            pause.note_reads(now_s)
            waited_s = self._find_overrun(request, pause, now_s)
            if waited_s is not None and self._is_contended(request):
                self._end(request, Finish(FinishReason.ABORTED, error=ClientStalled(waited_s)))
        if self._pauses:
            self._look_handle = self._loop.call_later(self._timeout_s / LOOKS, self._look)

    def _find_overrun(self, request: Request, pause: _Pause, now_s: float) -> float | None:
        """Returns how long a client has read nothing, or its request stood still, if that is too long; else None."""
        silent_s = now_s - pause.silent_since_s
        if silent_s >= self._timeout_s:
            return silent_s
        paused_s, started_s = request.paused_s + now_s - pause.began_s, request.timeline.started_s
        assert started_s is not None, "a request is paused behind its first token"
        is_too_long = paused_s >= self._timeout_s and paused_s >= MAX_PAUSED_SHARE * (now_s - started_s)
        return paused_s if is_too_long else None
