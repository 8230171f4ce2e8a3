from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.servers.running_compiler import Client, DirectedRunner, serve_compiler


@pytest.fixture
async def served(home: Path) -> AsyncIterator[tuple[Client, DirectedRunner]]:
    """A compiler whose builds wait until the test opens the gate."""
    async with serve_compiler(home) as served:
        yield served


@pytest.fixture
def client(served: tuple[Client, DirectedRunner]) -> Client:
    return served[0]


@pytest.fixture
def runner(served: tuple[Client, DirectedRunner]) -> DirectedRunner:
    return served[1]
