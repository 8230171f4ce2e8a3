"""Bounds on what clients hold of a server: connections, streams of one connection, calls of one peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2

from edge.config import EdgeConfig
from edge.server import EdgeServer
from tests.hang_guard import HANG_S
from tests.servers.probe import GET, SERVICE, SERVING, Probe, check_health, make_server, stub
from tests.unit.edge.test_status import detail

METHOD = f"/{SERVICE}/GetBundle"


class Gate(Probe):
    """GetBundle answers once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()
        self.num_running = 0
        self.answer = self.wait

    async def wait(self) -> bundle_pb2.GetBundleResponse:
        self.num_running += 1
        await self.opened.wait()
        self.num_running -= 1
        return bundle_pb2.GetBundleResponse()


@asynccontextmanager
async def serve_gate(options: dict[str, Any], **arguments: Any) -> AsyncIterator[tuple[Gate, EdgeServer, str]]:
    gate = Gate()
    server = make_server(gate, EdgeConfig("127.0.0.1:0", drain_timeout_s=0.1, **options), **arguments)
    port = await server.start()
    try:
        yield gate, server, f"127.0.0.1:{port}"
    finally:
        gate.opened.set()
        await server.drain()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def be_closed(address: str) -> None:
    """Opens a connection that says nothing, which the server takes, greets and closes."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(HANG_S):
        assert await reader.read(), "the settings of HTTP/2"
    writer.close()


def read(server: EdgeServer, metric: str, *labels: str) -> float:
    (row,) = (row for row in server.list_metrics() if row.name == metric)
    return sum(float(value) for key, value in row.read() if key == labels)  # type: ignore[arg-type]


def own_channel(address: str) -> grpc.aio.Channel:
    """A channel with a connection of its own."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def refuse(call: grpc.aio.UnaryUnaryCall[Any, Any]) -> tuple[Any, float]:
    """Expects a refusal with RESOURCE_EXHAUSTED; returns its ErrorInfo and the time to retry after, in seconds."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    assert status is not None
    info = detail(status, error_details_pb2.ErrorInfo)
    return info, detail(status, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() / 1e9


async def test_calls_beyond_those_of_a_peer_are_refused_and_probes_are_not() -> None:
    async with serve_gate({"max_calls_per_peer": 3}) as (gate, server, address), AsyncExitStack() as stack:
        # All connections of a peer count together.
        channels = [await stack.enter_async_context(own_channel(address)) for _ in range(3)]
        running = [stub(channel).GetBundle(GET) for channel in channels]
        await wait_until(lambda: gate.num_running == 3)
        info, retry_after_s = await refuse(stub(channels[0]).GetBundle(GET, timeout=HANG_S))
        assert (info.reason, info.metadata["client"], info.metadata["limit"]) == (
            "TOO_MANY_CALLS",
            "ipv4:127.0.0.1",
            "3",
        )
        assert retry_after_s > 0
        assert await check_health(channels[0]) == SERVING
        assert read(server, "kiln:running_calls", METHOD) == 3
        assert read(server, "kiln:refused_calls", METHOD) == 1
        running[0].cancel()
        await wait_until(lambda: read(server, "kiln:running_calls", METHOD) == 2)
        running[0] = stub(channels[0]).GetBundle(GET)
        await wait_until(lambda: read(server, "kiln:running_calls", METHOD) == 3)
        gate.opened.set()
        await asyncio.gather(*running)
        await wait_until(lambda: not read(server, "kiln:running_calls", METHOD))
        assert not server._calls._calls_of, "addresses add up"


async def test_calls_of_other_clients_are_taken() -> None:
    def name_by_metadata(context: Any) -> str:
        return str(dict(context.invocation_metadata())["client"])

    async with (
        serve_gate({"max_calls_per_peer": 1}, name_client=name_by_metadata) as (gate, _, address),
        own_channel(address) as channel,
    ):
        running = [stub(channel).GetBundle(GET, metadata=(("client", name),)) for name in ("one", "other")]
        await wait_until(lambda: gate.num_running == 2)
        info, _ = await refuse(stub(channel).GetBundle(GET, metadata=(("client", "one"),), timeout=HANG_S))
        assert info.metadata["client"] == "one"
        gate.opened.set()
        await asyncio.gather(*running)


async def test_a_refused_request_is_not_parsed() -> None:
    async with serve_gate({"max_calls_per_peer": 1}) as (gate, _, address), own_channel(address) as channel:
        running = stub(channel).GetBundle(GET)
        await wait_until(lambda: gate.num_running == 1)
        info, _ = await refuse(channel.unary_unary(METHOD)(b"\xff", timeout=HANG_S))
        assert info.reason == "TOO_MANY_CALLS"
        gate.opened.set()
        await running


async def test_connections_beyond_the_limit_are_closed_and_others_are_served() -> None:
    """Many idle connections take neither the server's files nor its service to those who have one."""
    async with serve_gate({"max_connections": 8}) as (_, server, address), own_channel(address) as channel:
        assert await check_health(channel) == SERVING
        host, _, port = address.partition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        greetings = await asyncio.gather(*(reader.read(1) for reader, _ in idle), return_exceptions=True)
        assert greetings.count(b"\0") == 7, "those that were taken got the settings of HTTP/2"
        await wait_until(lambda: read(server, "kiln:connections") == 8)
        assert await check_health(channel) == SERVING
        for _, writer in idle:
            writer.transport.abort()
        await wait_until(lambda: read(server, "kiln:connections") == 1)
        async with own_channel(address) as next_channel:
            assert await check_health(next_channel) == SERVING


async def test_idle_connections_are_closed_and_those_with_a_call_are_not() -> None:
    async with serve_gate({"max_connection_idle_s": 0.3}) as (gate, server, address), own_channel(address) as channel:
        running = stub(channel).GetBundle(GET)
        await wait_until(lambda: gate.num_running == 1)
        await asyncio.gather(be_closed(address), be_closed(address))
        await wait_until(lambda: read(server, "kiln:connections") == 1)
        assert not running.done()
        gate.opened.set()
        await running
        # The client does not notice: its next call takes a new connection.
        await wait_until(lambda: read(server, "kiln:connections") == 0)
        await stub(channel).GetBundle(GET)


async def test_connections_that_say_nothing_are_closed_sooner() -> None:
    async with serve_gate({"handshake_timeout_s": 0.5}) as (_, server, address), own_channel(address) as channel:
        # Connects anew if the machine stands still meanwhile.
        await asyncio.wait_for(channel.channel_ready(), HANG_S)
        assert await check_health(channel) == SERVING
        await be_closed(address)
        await wait_until(lambda: read(server, "kiln:connections") == 1)
        assert await check_health(channel) == SERVING


async def test_streams_beyond_those_of_a_connection_wait() -> None:
    async with (
        serve_gate({"max_streams_per_connection": 2}) as (gate, server, address),
        own_channel(address) as channel,
    ):
        assert await check_health(channel) == SERVING, "the client knows the server's settings"
        calls = [stub(channel).GetBundle(GET) for _ in range(5)]
        await wait_until(lambda: gate.num_running == 2)
        await asyncio.sleep(0.05)
        assert (gate.num_running, read(server, "kiln:running_calls", METHOD)) == (2, 2)
        for call in calls:
            call.cancel()


async def test_calls_of_an_old_connection_are_cut_after_the_grace() -> None:
    options = {"max_connection_age_s": 0.2, "max_connection_age_grace_s": 0.2}
    async with serve_gate(options) as (_, _, address), own_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).GetBundle(GET, timeout=HANG_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
