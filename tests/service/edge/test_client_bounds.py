"""Bounds on what clients hold of a server: connections, streams of one connection, calls of one peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from edge.config import EdgeConfig
from tests.hang_guard import HANG_S
from tests.servers.probe import (
    GET,
    SERVICE,
    SERVING,
    Probe,
    answer_after,
    check_health,
    own_channel,
    read_metric,
    serve,
    stub,
)
from tests.servers.refusals import Refusal, refused

METHOD = f"/{SERVICE}/GetBundle"


class Gate(Probe):
    """GetBundle answers once the gate is open."""

    def __init__(self) -> None:
        super().__init__(answer_after(self.wait))
        self.opened = asyncio.Event()
        self.num_running = 0

    async def wait(self) -> None:
        self.num_running += 1
        await self.opened.wait()
        self.num_running -= 1

    def count_connections(self) -> float:
        return read_metric(self, "kiln:connections")

    def count_calls(self) -> float:
        return read_metric(self, "kiln:running_calls", METHOD)


@asynccontextmanager
async def serve_gate(**options: Any) -> AsyncIterator[tuple[Gate, grpc.aio.Channel]]:
    gate = Gate()
    async with serve(gate, EdgeConfig("127.0.0.1:0", drain_timeout_s=0.1, **options)) as channel:
        try:
            yield gate, channel
        finally:
            gate.opened.set()


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


async def refuse(call: Any) -> Refusal:
    return await refused(call, "RESOURCE_EXHAUSTED", "TOO_MANY_CALLS")


async def test_calls_beyond_those_of_a_peer_are_refused_and_probes_are_not() -> None:
    async with serve_gate(max_calls_per_peer=3) as (gate, channel), own_channel(gate.address) as other:
        # All connections of a peer count together.
        running = [stub(one).GetBundle(GET) for one in (channel, other, other)]
        await wait_until(lambda: gate.num_running == 3)
        how = await refuse(stub(channel).GetBundle(GET, timeout=HANG_S))
        assert (how.metadata["client"], how.metadata["limit"]) == ("ipv4:127.0.0.1", "3")
        assert how.retry_after_s is not None
        assert await check_health(channel) == SERVING
        assert gate.count_calls() == 3
        assert read_metric(gate, "kiln:refused_calls", METHOD) == 1
        running[0].cancel()
        await wait_until(lambda: gate.count_calls() == 2)
        running[0] = stub(channel).GetBundle(GET)
        await wait_until(lambda: gate.count_calls() == 3)
        gate.opened.set()
        await asyncio.gather(*running)
        await wait_until(lambda: not gate.count_calls())
        assert not gate.server._calls._calls_of, "addresses add up"


async def test_calls_of_other_clients_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def name_by_metadata(context: Any) -> str:
        return str(dict(context.invocation_metadata())["client"])

    monkeypatch.setattr("edge.surroundings.peer_address", name_by_metadata)
    async with serve_gate(max_calls_per_peer=1) as (gate, channel):
        running = [stub(channel).GetBundle(GET, metadata=(("client", name),)) for name in ("one", "other")]
        await wait_until(lambda: gate.num_running == 2)
        how = await refuse(stub(channel).GetBundle(GET, metadata=(("client", "one"),), timeout=HANG_S))
        assert how.metadata["client"] == "one"
        gate.opened.set()
        await asyncio.gather(*running)


async def test_a_refused_request_is_not_parsed() -> None:
    async with serve_gate(max_calls_per_peer=1) as (gate, channel):
        running = stub(channel).GetBundle(GET)
        await wait_until(lambda: gate.num_running == 1)
        await refuse(channel.unary_unary(METHOD)(b"\xff", timeout=HANG_S))
        gate.opened.set()
        await running


async def test_connections_beyond_the_limit_are_closed_and_others_are_served() -> None:
    """Many idle connections take neither the server's files nor its service to those who have one."""
    async with serve_gate(max_connections=8) as (gate, channel):
        assert await check_health(channel) == SERVING
        host, _, port = gate.address.partition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        greetings = await asyncio.gather(*(reader.read(1) for reader, _ in idle), return_exceptions=True)
        assert greetings.count(b"\0") == 7, "those that were taken got the settings of HTTP/2"
        await wait_until(lambda: gate.count_connections() == 8)
        assert await check_health(channel) == SERVING
        for _, writer in idle:
            writer.transport.abort()
        await wait_until(lambda: gate.count_connections() == 1)
        async with own_channel(gate.address) as next_channel:
            assert await check_health(next_channel) == SERVING


async def test_idle_connections_are_closed_and_those_with_a_call_are_not() -> None:
    async with serve_gate(max_connection_idle_s=0.3) as (gate, channel):
        running = stub(channel).GetBundle(GET)
        await wait_until(lambda: gate.num_running == 1)
        await asyncio.gather(be_closed(gate.address), be_closed(gate.address))
        await wait_until(lambda: gate.count_connections() == 1)
        assert not running.done()
        gate.opened.set()
        await running
        # The client does not notice: its next call takes a new connection.
        await wait_until(lambda: gate.count_connections() == 0)
        await stub(channel).GetBundle(GET)


async def test_connections_that_say_nothing_are_closed_sooner() -> None:
    async with serve_gate(handshake_timeout_s=0.5) as (gate, channel):
        # Connects anew if the machine stands still meanwhile.
        await asyncio.wait_for(channel.channel_ready(), HANG_S)
        assert await check_health(channel) == SERVING
        await be_closed(gate.address)
        await wait_until(lambda: gate.count_connections() == 1)
        assert await check_health(channel) == SERVING


async def test_streams_beyond_those_of_a_connection_wait() -> None:
    async with serve_gate(max_streams_per_connection=2) as (gate, channel):
        assert await check_health(channel) == SERVING, "the client knows the server's settings"
        calls = [stub(channel).GetBundle(GET) for _ in range(5)]
        await wait_until(lambda: gate.num_running == 2)
        await asyncio.sleep(0.05)
        assert (gate.num_running, gate.count_calls()) == (2, 2)
        for call in calls:
            call.cancel()


async def test_calls_of_an_old_connection_are_cut_after_the_grace() -> None:
    async with serve_gate(max_connection_age_s=0.2, max_connection_age_grace_s=0.2) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).GetBundle(GET, timeout=HANG_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
