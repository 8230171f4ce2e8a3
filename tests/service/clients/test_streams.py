"""A stream that no caller reads any more is cancelled, and the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from kiln.runtime.v1.generation_pb2 import GenerateResponse
from kiln_client import AsyncRuntime, AsyncStream, Runtime, Stream, errors

from tests.hang_guard import HANG_S, until
from tests.servers import responses as samples
from tests.servers.scripted_server import HANG, ScriptedServer, refusal

Leave = Callable[[AsyncRuntime, ScriptedServer], "asyncio.Future[None]"]


async def left_by_break(runtime: AsyncRuntime, server: ScriptedServer) -> None:
    async for _ in runtime.generate("demo", "x"):
        break


async def left_by_exception(runtime: AsyncRuntime, server: ScriptedServer) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async for _ in runtime.generate("demo", "x"):
            1 / 0  # noqa: B018


async def left_by_context(runtime: AsyncRuntime, server: ScriptedServer) -> None:
    async with runtime.generate("demo", "x") as events:
        await anext(events)


async def left_by_aclosing(runtime: AsyncRuntime, server: ScriptedServer) -> None:
    async with contextlib.aclosing(runtime.generate("demo", "x")) as events:
        await anext(events)


async def left_by_deletion(runtime: AsyncRuntime, server: ScriptedServer) -> None:
    events = runtime.generate("demo", "x")
    await anext(events)
    del events


async def left_by_collector(runtime: AsyncRuntime, server: ScriptedServer) -> None:
    events = runtime.generate("demo", "x")
    await anext(events)
    cycle: list[object] = [events]
    cycle.append(cycle)
    del events, cycle
    await asyncio.to_thread(gc.collect)  # the collector may run in any thread


async def left_by_cancelled_reader(runtime: AsyncRuntime, server: ScriptedServer) -> None:
    task = asyncio.create_task(runtime.complete("demo", "x"))
    await until(lambda: server.requests["Generate"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def left_by_timeout(runtime: AsyncRuntime, server: ScriptedServer) -> None:
    async def expire(limit: asyncio.Timeout) -> None:
        await until(lambda: server.requests["Generate"])
        limit.reschedule(asyncio.get_running_loop().time())

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            expiring = asyncio.create_task(expire(limit))
            await runtime.complete("demo", "x")
    await expiring


@pytest.mark.parametrize(
    "leave",
    [
        left_by_break,
        left_by_exception,
        left_by_context,
        left_by_aclosing,
        left_by_deletion,
        left_by_collector,
        left_by_cancelled_reader,
        left_by_timeout,
    ],
)
async def test_server_sees_that_nobody_reads(server: ScriptedServer, leave: Leave) -> None:
    server.script("Generate", [samples.accepted(), HANG])
    async with AsyncRuntime(server.address) as runtime:
        await leave(runtime, server)
        # While the channel is still open: it is the stream that ended, not the connection.
        assert await asyncio.to_thread(server.cancelled["Generate"].wait, HANG_S)


async def test_server_sees_a_reader_that_is_cancelled_as_its_request_is_sent(server: ScriptedServer) -> None:
    server.script("Generate", [samples.accepted(), HANG])
    async with AsyncRuntime(server.address) as runtime:
        events = runtime.generate("demo", "x")
        # gRPC calls this before it wakes the reader, which then waits neither for the request nor for a response.
        events._call._preparation.add_done_callback(lambda _: reader.cancel())
        reader = asyncio.create_task(anext(events))
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await asyncio.to_thread(server.cancelled["Generate"].wait, HANG_S)
        await events.aclose()


async def test_abort_ends_another_tasks_iteration(server: ScriptedServer) -> None:
    server.script("Generate", [samples.accepted(), HANG])
    async with AsyncRuntime(server.address) as runtime:
        events, received = runtime.generate("demo", "x"), asyncio.Queue[GenerateResponse]()

        async def read() -> None:
            async for event in events:
                received.put_nowait(event)

        reader = asyncio.create_task(read())
        await received.get()
        events.abort()
        await reader
        assert received.empty()
        assert not reader.cancelled()
        assert [event async for event in events] == []


async def test_whole_stream_arrives_before_its_error(server: ScriptedServer) -> None:
    deltas = [samples.delta(number, "x", number) for number in range(1, 200)]
    server.script("Generate", [samples.accepted(), *deltas, refusal("UNAVAILABLE", "RANK_DIED", "rank 0 died")])
    received: list[GenerateResponse] = []

    async def read(events: AsyncStream[GenerateResponse]) -> None:
        async for event in events:
            received.append(event)  # noqa: PERF401 - what came before the error is the point

    async with AsyncRuntime(server.address) as runtime:
        with pytest.raises(errors.Unavailable) as caught:
            await read(runtime.generate("demo", "x"))
    assert caught.value.reason == "RANK_DIED"
    assert len(received) == 200


@pytest.mark.parametrize("method", ["complete", "get_deployment"])
async def test_closing_the_client_is_no_cancellation_of_its_callers(server: ScriptedServer, method: str) -> None:
    server.script("Generate", [samples.accepted(), HANG])
    server.script("GetDeployment", HANG)
    runtime = AsyncRuntime(server.address)
    arguments = ("demo", "x") if method == "complete" else ("demo",)
    caller = asyncio.create_task(getattr(runtime, method)(*arguments))
    await until(lambda: any(server.requests.values()))
    await runtime.close()
    with pytest.raises(errors.ClientClosed):
        await caller


def test_closing_a_blocking_client_ends_the_calls_of_other_threads(server: ScriptedServer) -> None:
    server.script("GetDeployment", HANG)
    runtime = Runtime(server.address)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(runtime.get_deployment, "demo")
        time.sleep(0.2)
        runtime.close()
        assert isinstance(call.exception(HANG_S), errors.ClientClosed)


def test_stream_without_an_event_loop_is_refused(server: ScriptedServer) -> None:
    with pytest.raises(RuntimeError, match="event loop"):
        AsyncRuntime(server.address).generate("demo", "x")


async def test_finished_stream_stays_finished(server: ScriptedServer) -> None:
    server.script("Generate", samples.generation())
    async with AsyncRuntime(server.address) as runtime:
        events: AsyncStream[GenerateResponse] = runtime.generate("demo", "x")
        assert len([event async for event in events]) == 4
        assert [event async for event in events] == []
        await events.aclose()
        assert not server.cancelled["Generate"].is_set()


def blocking_break(runtime: Runtime) -> None:
    for _ in runtime.generate("demo", "x"):
        break


def blocking_context(runtime: Runtime) -> None:
    with runtime.generate("demo", "x") as events:
        next(events)


def blocking_close(runtime: Runtime) -> None:
    events = runtime.generate("demo", "x")
    next(events)
    events.close()
    assert list(events) == []


@pytest.mark.parametrize("leave", [blocking_break, blocking_context, blocking_close])
def test_server_sees_that_nobody_reads_a_blocking_stream(
    server: ScriptedServer, leave: Callable[[Runtime], None]
) -> None:
    server.script("Generate", [samples.accepted(), HANG])
    with Runtime(server.address) as runtime:
        leave(runtime)
        assert server.cancelled["Generate"].wait(HANG_S)


def test_blocking_stream_is_an_iterator(server: ScriptedServer) -> None:
    server.script("Generate", samples.generation())
    with Runtime(server.address) as runtime:
        events: Stream[GenerateResponse] = runtime.generate("demo", "x")
        assert [event.WhichOneof("event") for event in events] == ["accepted", "delta", "delta", "finished"]
