from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.servers.adapters import BASE, HOUSE
from tests.servers.runtime import Runtime, serve_runtime


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A runtime with four cores and nothing loaded."""
    async with serve_runtime(tmp_path) as runtime:
        yield runtime


@pytest.fixture
async def based(served: Runtime) -> Runtime:
    """A runtime with a deployment of two slots, whose bundle has an adapter."""
    await served.deploy(adapters=HOUSE, **BASE)
    return served
