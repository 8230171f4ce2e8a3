"""What the compiler does in the background goes on after an error that no code expects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bundle.store.layout import Layout
from compiler_svc.bundles.collection import Collection
from edge.access.key_source import KeyUrl
from edge.server import EdgeServer
from tests.bundles.samples import publish_sample
from tests.hang_guard import HANG_S
from tests.servers.background import Broken, break_task
from tests.servers.key_issuer import Issuer
from tests.servers.metrics import scrape
from tests.servers.running_compiler import serve_compiler


@pytest.fixture
async def server(home: Path, monkeypatch: pytest.MonkeyPatch, issuer: Issuer) -> AsyncIterator[EdgeServer]:
    monkeypatch.setattr("edge.supervision.FIRST_RESTART_S", 0.01)
    monkeypatch.setattr("compiler_svc.server.Collection", partial(Collection, interval_s=0.05))
    refreshing = partial(KeyUrl, refresh_interval_s=0.05, min_fetch_interval_s=0.01)
    monkeypatch.setattr("edge.access.key_source.KeyUrl", refreshing)
    async with serve_compiler(home, f"--auth-jwks={issuer.url}", "--metrics-address=127.0.0.1:0") as (client, _):
        assert client.server is not None
        yield client.server


async def test_every_task_is_broken_below(server: EdgeServer) -> None:
    assert server.supervisor.tasks == {"collection", "keys"}


async def test_collection_goes_on(server: EdgeServer, home: Path) -> None:
    with capture_logs() as logs:
        await break_task(server.supervisor, "collection")
    assert [type(log["exc_info"]) for log in logs if log["event"] == "background task ended"] == [Broken]
    store = Layout(home / "store")
    digest = publish_sample(store)
    async with asyncio.timeout(HANG_S):
        while store.has(digest):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    samples = await scrape(server.metrics_port)
    assert samples["kiln:background_failures_total{task=collection}"] == 1
    assert samples["kiln:background_failures_total{task=keys}"] == 0


async def test_keys_are_fetched_on(server: EdgeServer, issuer: Issuer) -> None:
    await break_task(server.supervisor, "keys")
    num_fetches = len(issuer.requests)
    async with asyncio.timeout(HANG_S):
        while len(issuer.requests) < num_fetches + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
