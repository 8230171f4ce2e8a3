from collections.abc import AsyncIterator

import pytest

from edge.config import EdgeConfig
from edge.server import EdgeServer
from tests.servers.probe import BuildServer, Probe, make_server


@pytest.fixture
async def build() -> AsyncIterator[BuildServer]:
    """Makes servers that end with the test, even if it fails."""
    servers: list[EdgeServer] = []

    def make(probe: Probe, config: EdgeConfig | None = None) -> EdgeServer:
        servers.append(make_server(probe, config))
        return servers[-1]

    yield make
    for server in servers:
        await server.drain()
