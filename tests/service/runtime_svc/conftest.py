from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.servers.runtime import Runtime, serve_runtime


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A runtime with four cores and nothing loaded."""
    async with serve_runtime(tmp_path) as runtime:
        yield runtime
