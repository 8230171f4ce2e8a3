"""Decides when to open a lost connection again, and when to give up."""

from __future__ import annotations

import random
import time

from kiln_client.errors import KilnError

_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 5.0


class Reconnection:
    """The reconnection attempts to one server during one wait.

    Delays double while the server stays unreachable. Each is varied at random, so that the clients of a restarted
    server do not all reconnect at once.
    """

    def __init__(self, patience_s: float, timeout_s: float) -> None:
        """Starts the clock.

        Args:
            patience_s: Seconds for which the server may stay unreachable.
            timeout_s: Seconds until the deadline of the whole wait.
        """
        self._patience_s = patience_s
        self._deadline = time.monotonic() + timeout_s
        self._reached_at = time.monotonic()
        self._delay_s = _FIRST_DELAY_S

    def remaining_s(self) -> float:
        """Returns the seconds until the deadline. Never 0, which callers would read as no deadline."""
        return max(self._deadline - time.monotonic(), 0.001)

    def reached(self) -> None:
        """Records that the server has answered."""
        self._reached_at = time.monotonic()
        self._delay_s = _FIRST_DELAY_S

    def next_delay_s(self, error: KilnError) -> float | None:
        """Returns the seconds to wait before the next attempt, at most the remaining time; None to give up.

        Args:
            error: Why the connection was lost. The delay is at least its `retry_after_s`.
        """
        if time.monotonic() - self._reached_at >= self._patience_s:
            return None
        delay_s = max(self._delay_s * random.uniform(0.5, 1.0), error.retry_after_s or 0.0)
        self._delay_s = min(self._delay_s * 2, _MAX_DELAY_S)
        return min(delay_s, self.remaining_s())
