"""The bundles of the matrix, and full runs that continue from where they stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.parity.bundles import Bundles
from tests.parity.record import RECORD_VARIABLE, ParityRecord
from tests.servers.stack import Stack


@pytest.fixture(scope="module")
def bundles(stack: Stack) -> Iterator[Bundles]:
    with closing(Bundles(stack)) as bundles:
        yield bundles


@pytest.fixture(scope="session")
def record() -> ParityRecord | None:
    """The record of a full run's results."""
    path = os.environ.get(RECORD_VARIABLE)
    return ParityRecord(Path(path)) if path else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An interrupted full run continues from where it stopped."""
    path = os.environ.get(RECORD_VARIABLE)
    if not path:
        return
    passed = ParityRecord(Path(path)).passed()
    done = [item for item in items if getattr(getattr(item, "callspec", None), "id", None) in passed]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]
