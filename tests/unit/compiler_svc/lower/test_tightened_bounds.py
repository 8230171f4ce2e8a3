"""Bounds of what a loop computes, as Inductor would intersect them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from torch.utils._sympy.value_ranges import ValueRanges

from compiler_svc.lower.inductor import tighten

BOUNDS = (
    ValueRanges.unknown(),
    ValueRanges.unknown_int(),
    ValueRanges(0, 7),
    ValueRanges(0, 7),
    ValueRanges(3, 9),
)


@pytest.mark.parametrize(("known", "bounds"), list(product(BOUNDS, repeat=2)))
def test_bounds_are_those_of_torch(known: ValueRanges[Any], bounds: ValueRanges[Any]) -> None:
    assert tighten(known, bounds) == known.tighten(bounds)
