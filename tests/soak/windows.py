"""When which failures are expected: a rank that dies while no fault kills ranks is a finding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

#: A client may learn of an end a little after the fault is over.
SLACK_S: Final = 2.0
#: No call lasts longer than this; older windows are forgotten.
MAX_CALL_S: Final = 600.0

RANKS_LOST: Final = frozenset({"RANK_DIED", "RANK_HUNG"})
#: What losses of ranks leave behind: a prompt that was under way each time may have been the cause.
SUSPECTED: Final = frozenset({"PROMPT_QUARANTINED"})
ABORTED: Final = frozenset({"REQUEST_ABORTED"})


@dataclass
class Window:
    """A time in which streams and calls of the control plane may end with the reasons of one fault."""

    streams: frozenset[str]
    calls: frozenset[str]
    begun_s: float = field(default_factory=time.monotonic)
    ended_s: float = float("inf")


class Windows:
    """All windows of a run."""

    def __init__(self) -> None:
        self._windows: list[Window] = []
        self.opened = Counter[str]()
        self._left = frozenset[str]()

    @contextmanager
    def open(self, name: str, streams: frozenset[str], calls: frozenset[str]) -> Iterator[None]:
        """Opens a window for a fault until the block ends."""
        now_s = time.monotonic()
        self._windows = [one for one in self._windows if now_s - one.ended_s < MAX_CALL_S]
        self.opened[name] += 1
        window = Window(streams, calls)
        self._windows.append(window)
        try:
            yield
        finally:
            window.ended_s = time.monotonic() + SLACK_S
            if streams & RANKS_LOST:
                self._left |= SUSPECTED

    def stream_reasons(self, begun_s: float, ended_s: float) -> frozenset[str]:
        """Reasons with which a stream of that time may have ended."""
        return self._left.union(*(one.streams for one in self._of(begun_s, ended_s)))

    def call_reasons(self, begun_s: float, ended_s: float) -> frozenset[str]:
        """Reasons with which a call of the control plane of that time may have ended."""
        return frozenset[str]().union(*(one.calls for one in self._of(begun_s, ended_s)))

    def _of(self, begun_s: float, ended_s: float) -> Iterator[Window]:
        return (one for one in self._windows if one.begun_s <= ended_s and one.ended_s >= begun_s)
