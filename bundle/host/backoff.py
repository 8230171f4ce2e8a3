"""How long a caller waits between two tries."""

from __future__ import annotations

import random
from collections.abc import Iterator


def backoff_delays(first_s: float, max_s: float) -> Iterator[float]:
    """Yields the seconds to wait before each try: they double up to `max_s`.

    Each is shortened at random by up to a quarter, so that processes do not all try at once.
    """
    delay_s = first_s
    while True:
        yield delay_s * random.uniform(0.75, 1.0)
        delay_s = min(2 * delay_s, max_s)
