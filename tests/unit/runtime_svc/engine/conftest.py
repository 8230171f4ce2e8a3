"""Engines of these tests call steps ahead, as they do by default; one by one in the slow ring, but for some files."""

from __future__ import annotations

import pytest

from tests.ranks.engines import shards, start_engine

__all__ = ["shards", "start_engine"]


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["async", "one_by_one"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
