"""A histogram that costs its owner little: one bisection and two additions a value, no lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by the bucket that they fall into. One thread writes and reads it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Starts empty; `bounds` are the buckets' inclusive upper bounds, ascending. Larger values count too."""
        self.bounds = tuple(bounds)
        #: How many values fell into each bucket; the last one has no bound.
        self.counts = [0] * (len(self.bounds) + 1)
        #: Sum of all values.
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
