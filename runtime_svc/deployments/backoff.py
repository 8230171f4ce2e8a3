"""How long to wait before something is tried again."""

from __future__ import annotations

import random
from collections.abc import Iterator


def backoff_delays(first_s: float, longest_s: float) -> Iterator[float]:
    """Seconds to wait, doubling up to the longest, each by up to a quarter shorter so that not all come at once."""
    delay_s = first_s
    while True:
        yield delay_s * random.uniform(0.75, 1.0)
        delay_s = min(2 * delay_s, longest_s)
