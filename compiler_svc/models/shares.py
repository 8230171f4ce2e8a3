"""How long a rank's part of a divided axis is."""

from __future__ import annotations


def share_of(length: int, tp_degree: int) -> int:
    """An axis divided among ranks: equal parts, the last ones padded where it does not come out even."""
    return -(-length // tp_degree)
