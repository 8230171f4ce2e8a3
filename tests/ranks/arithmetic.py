"""Sampling with the arithmetic of another device, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from execution import candidates


@contextmanager
def compute_as_on(device_type: str) -> Iterator[None]:
    """Inside the block, the CPU orders and sums candidates as a device of this type does."""
    with patch.object(candidates, "has_wide_integers", lambda _: device_type == "cpu"):
        yield
