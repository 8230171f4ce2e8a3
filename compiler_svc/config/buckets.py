"""Bucket lengths, as NxD Inference generates them."""

from __future__ import annotations

import math
from typing import Final

#: Shortest bucket that is generated, in tokens.
SHORTEST_BUCKET: Final = 128


def generate_buckets(shortest: int, longest: int) -> tuple[int, ...]:
    """Bucket lengths from `shortest` to `longest`, in tokens.

    Not quite the powers of two between the two: the last power of two is left out where `longest` is nearer to it than
    to the next one (on a logarithmic scale), and `longest` itself is always the last bucket.
    """
    if shortest == longest:
        return (longest,)
    powers = range(int(math.log2(shortest)), round(math.log2(longest)))
    return (*(2**power for power in powers), longest)


def choose_buckets(*, enabled: bool, listed: tuple[int, ...], longest: int) -> tuple[int, ...]:
    """Buckets of a submodel, in tokens.

    Args:
        enabled: Whether bucketing is on; otherwise there is one bucket, the longest.
        listed: The user's list; empty generates.
        longest: Longest length that the submodel has to take.
    """
    if not enabled:
        return (longest,)
    return listed or generate_buckets(SHORTEST_BUCKET, longest)
