"""When to open a lost connection again, and when to give up."""

from __future__ import annotations

import random
import time

from kiln_client.errors import KilnError

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 5.0


class Reconnection:
    """Patience with one server over one wait.

    Delays double while the server stays out of reach, and vary, so that the clients of a restarted server do not all
    come back at once.
    """

    def __init__(self, patience_s: float, timeout_s: float) -> None:
        """Starts the clock.

        Args:
            patience_s: How long the server may stay out of reach.
            timeout_s: How long everything may take.
        """
        self._patience_s = patience_s
        self._deadline = time.monotonic() + timeout_s
        self._reached_at = time.monotonic()
        self._delay_s = _FIRST_DELAY_S

    def remaining_s(self) -> float:
        """Gives the seconds until the deadline; never 0, which callers would take for none."""
        return max(self._deadline - time.monotonic(), 0.001)

    def reached(self) -> None:
        """Notes that the server has answered."""
        self._reached_at = time.monotonic()
        self._delay_s = _FIRST_DELAY_S

    def next_delay_s(self, error: KilnError) -> float | None:
        """Gives the seconds to wait before the next try, no more than are left; None when patience is at its end.

        Args:
            error: Why the connection was lost; what it asks for in `retry_after_s` is kept to.
        """
        if time.monotonic() - self._reached_at >= self._patience_s:
            return None
        delay_s = max(self._delay_s * random.uniform(0.5, 1.0), error.retry_after_s or 0.0)
        self._delay_s = min(self._delay_s * 2, _LONGEST_DELAY_S)
        return min(delay_s, self.remaining_s())
