"""Streams whose clients do not read end, and hold nothing on the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2

from edge.config import EdgeConfig
from edge.server import EdgeServer
from tests.hang_guard import HANG_S
from tests.servers import probe
from tests.servers.probe import READ, SERVICE, Probe, make_server, serve, stub
from tests.unit.edge.test_status import detail

METHOD = f"/{SERVICE}/ReadBlob"
STALL_TIMEOUT_S = 0.3
CHUNK = bundle_pb2.ReadBlobResponse(data=bytes(64 << 10))
#: A small window that does not grow, as that of a client that means harm.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535))


class Flood(Probe):
    """ReadBlob sends chunks until the call ends."""

    async def ReadBlob(  # noqa: N802
        self, request: bundle_pb2.ReadBlobRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[bundle_pb2.ReadBlobResponse, None]:
        try:
            while True:
                yield CHUNK
        finally:
            self.left.set()


@pytest.fixture
def config() -> EdgeConfig:
    return EdgeConfig("127.0.0.1:0", drain_timeout_s=0.1, stall_timeout_s=STALL_TIMEOUT_S)


@asynccontextmanager
async def serve_flood() -> AsyncIterator[tuple[Flood, EdgeServer, grpc.aio.Channel]]:
    flood = Flood()
    server = make_server(flood, EdgeConfig("127.0.0.1:0", drain_timeout_s=0.1, stall_timeout_s=STALL_TIMEOUT_S))
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=SMALL_WINDOW) as channel:
            yield flood, server, channel
    finally:
        await server.drain()


def count(server: EdgeServer, metric: str, *labels: str) -> float:
    (row,) = (row for row in server.list_metrics() if row.name == metric)
    return sum(float(value) for key, value in row.read() if key == labels)  # type: ignore[arg-type]


async def test_client_that_never_reads_is_left(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_flood() as (flood, server, channel):
        call = stub(channel).ReadBlob(READ)
        async with asyncio.timeout(HANG_S):
            await flood.left.wait()
            while not count(server, "kiln:calls", METHOD, "ABORTED"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert count(server, "kiln:stalled_calls", METHOD) == 1
        # The handler has ended although its status waits behind chunks. A client that reads after all gets both.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED
        status = rpc_status.from_call(caught.value)
        assert status is not None
        assert detail(status, error_details_pb2.ErrorInfo).reason == "CLIENT_STALLED"
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_client_that_reads_slowly_is_served() -> None:
    async with serve_flood() as (_, server, channel):
        call = stub(channel).ReadBlob(READ)
        started_s = time.monotonic()
        while time.monotonic() - started_s < 3 * STALL_TIMEOUT_S:
            assert await call.read() == CHUNK
            await asyncio.sleep(STALL_TIMEOUT_S / 8)
        call.cancel()
        assert not count(server, "kiln:stalled_calls", METHOD)


async def test_time_in_which_the_server_did_not_run_is_not_the_clients() -> None:
    """The process of server and client stands still: the client reads as soon as it runs again, and is served."""
    async with serve_flood() as (_, server, channel):
        call = stub(channel).ReadBlob(READ)
        for _ in range(3):
            assert await call.read() == CHUNK
            await asyncio.sleep(STALL_TIMEOUT_S / 8)
            time.sleep(3 * STALL_TIMEOUT_S)  # noqa: ASYNC251
        for _ in range(100):
            assert await call.read() == CHUNK
        call.cancel()
        assert not count(server, "kiln:stalled_calls", METHOD)


async def test_a_handler_may_take_longer_than_its_client(config: EdgeConfig) -> None:
    """Only writes are watched: the time between two responses is the handler's."""
    slow = Probe()

    async def answer_late() -> bundle_pb2.GetBundleResponse:
        await asyncio.sleep(2.5 * STALL_TIMEOUT_S)
        return bundle_pb2.GetBundleResponse()

    slow.answer = answer_late
    async with serve(slow, config) as channel:
        assert [response async for response in stub(channel).ReadBlob(READ)] == [probe.CHUNK, probe.CHUNK]


async def test_a_timeout_of_the_handler_is_no_stalled_client(config: EdgeConfig) -> None:
    hasty = Probe()

    async def time_out() -> bundle_pb2.GetBundleResponse:
        raise TimeoutError

    hasty.answer = time_out
    async with serve(hasty, config) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub(channel).ReadBlob(READ):
                pass
        assert caught.value.code() is grpc.StatusCode.INTERNAL
