"""A bound on text that is worked on or waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from runtime_svc.errors import QueueFull

#: Bound on the text, in characters; a token id counts as one.
CAPACITY_CHARS: Final = 16 << 20
# Every call counts at least this much, so that the number of calls is bounded too.
MIN_CALL_CHARS: Final = 4096
RETRY_AFTER_S: Final = 1.0


class Backlog:
    """The text of the calls that have not ended. An empty backlog takes any call, even one beyond the bound."""

    def __init__(self, capacity_chars: int = CAPACITY_CHARS) -> None:
        """Starts empty."""
        self._capacity_chars = capacity_chars
        self._pending_chars = 0
        self.num_pending = 0

    def take(self, num_chars: int) -> Callable[[], None]:
        """Takes a call that works on that much text; returns what to call once it has ended.

        Raises:
            QueueFull: The text of the pending calls and of this one exceeds the bound.
        """
        cost = max(num_chars, MIN_CALL_CHARS)
        if self.num_pending and self._pending_chars + cost > self._capacity_chars:
            raise QueueFull(self.num_pending, RETRY_AFTER_S)
        self._pending_chars += cost
        self.num_pending += 1

        def release() -> None:
            self._pending_chars -= cost
            self.num_pending -= 1

        return release
