"""Streams whose clients do not read end, and hold nothing on the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from edge.config import EdgeConfig
from tests.hang_guard import HANG_S
from tests.servers.probe import (
    CHUNK,
    READ,
    SERVICE,
    Flood,
    Probe,
    answer_after,
    fail_with,
    own_channel,
    read_metric,
    serve,
    stub,
)
from tests.servers.refusals import refused

METHOD = f"/{SERVICE}/ReadBlob"
STALL_TIMEOUT_S = 0.3
CONFIG = EdgeConfig("127.0.0.1:0", drain_timeout_s=0.1, stall_timeout_s=STALL_TIMEOUT_S)


@asynccontextmanager
async def serve_flood() -> AsyncIterator[tuple[Flood, grpc.aio.Channel]]:
    """To a client of a small window that does not grow, as that of one that means harm."""
    flood = Flood()
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535))
    async with serve(flood, CONFIG, connect=lambda address: own_channel(address, *options)) as channel:
        yield flood, channel


async def test_client_that_never_reads_is_left(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_flood() as (flood, channel):
        call = stub(channel).ReadBlob(READ)
        async with asyncio.timeout(HANG_S):
            await flood.left.wait()
            while not read_metric(flood, "kiln:calls", METHOD, "ABORTED"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert read_metric(flood, "kiln:stalled_calls", METHOD) == 1
        # The handler has ended although its status waits behind chunks. A client that reads after all gets both.
        await refused(call, "ABORTED", "CLIENT_STALLED")
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_client_that_reads_slowly_is_served() -> None:
    async with serve_flood() as (flood, channel):
        call = stub(channel).ReadBlob(READ)
        started_s = time.monotonic()
        while time.monotonic() - started_s < 3 * STALL_TIMEOUT_S:
            assert await call.read() == flood.chunk
            await asyncio.sleep(STALL_TIMEOUT_S / 8)
        call.cancel()
        assert not read_metric(flood, "kiln:stalled_calls", METHOD)


async def test_time_in_which_the_server_did_not_run_is_not_the_clients() -> None:
    """The process of server and client stands still: the client reads as soon as it runs again, and is served."""
    async with serve_flood() as (flood, channel):
        call = stub(channel).ReadBlob(READ)
        for _ in range(3):
            assert await call.read() == flood.chunk
            await asyncio.sleep(STALL_TIMEOUT_S / 8)
            time.sleep(3 * STALL_TIMEOUT_S)  # noqa: ASYNC251
        for _ in range(100):
            assert await call.read() == flood.chunk
        call.cancel()
        assert not read_metric(flood, "kiln:stalled_calls", METHOD)


async def test_a_handler_may_take_longer_than_its_client() -> None:
    """Only writes are watched: the time between two responses is the handler's."""
    async with serve(Probe(answer_after(lambda: asyncio.sleep(2.5 * STALL_TIMEOUT_S))), CONFIG) as channel:
        assert [response async for response in stub(channel).ReadBlob(READ)] == [CHUNK, CHUNK]


async def test_a_timeout_of_the_handler_is_no_stalled_client() -> None:
    async with serve(Probe(fail_with(TimeoutError())), CONFIG) as channel:
        await refused(stub(channel).ReadBlob(READ), "INTERNAL", "INTERNAL")
