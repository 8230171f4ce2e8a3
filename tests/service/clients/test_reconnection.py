"""Waits that continue after lost connections, and waits that give up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from kiln.compiler.v1 import compiler_pb2
from kiln_client import AsyncCompiler, Compiler, Timeouts, compile_request, errors
from kiln_client.compiler import Reconnection

from tests.hang_guard import HANG_S
from tests.servers import responses as samples
from tests.servers.scripted_server import HANG, ScriptedServer, refusal

REQUEST = compile_request("tiny", "models/tiny", {})
DRAINING = refusal("UNAVAILABLE", "SHUTTING_DOWN")
IMPATIENT = Timeouts(reconnect_s=0.0)


@pytest.fixture
def restarts(compiling: ScriptedServer) -> Iterator[list[ScriptedServer]]:
    """The servers that took the place of the first one, at its address."""
    started: list[ScriptedServer] = []
    yield started
    for server in started:
        server.stop()


async def test_restarted_compiler_is_found_again(compiling: ScriptedServer, restarts: list[ScriptedServer]) -> None:
    compiling.script("WatchCompile", [samples.watch_progress("TRACE"), HANG])
    stages: list[str] = []
    lost: list[errors.Unavailable] = []

    def restart() -> None:
        compiling.stop()
        restarts.append(ScriptedServer(address=compiling.address))
        restarts[0].script("WatchCompile", [samples.watch_progress("LOWER"), samples.watch_result()])

    def progressed(progress: compiler_pb2.CompileMetadata) -> None:
        stages.append(compiler_pb2.CompileStage.Name(progress.stage))
        if len(stages) == 1:
            threading.Thread(target=restart).start()

    async with AsyncCompiler(compiling.address) as compiler:
        response = await compiler.compile(REQUEST, on_progress=progressed, on_lost=lost.append, timeout_s=30)
    assert response.version == 3
    assert stages == ["COMPILE_STAGE_TRACE", "COMPILE_STAGE_LOWER"]
    assert lost
    assert {error.code for error in lost} == {"UNAVAILABLE"}
    assert [request.operation for request in restarts[0].requests["WatchCompile"]] == ["operations/7"]
    assert restarts[0].requests["Compile"] == []


async def test_shard_weights_is_waited_for_likewise(compiling: ScriptedServer) -> None:
    compiling.script("WatchCompile", [samples.watch_progress("SHARD"), DRAINING], [samples.watch_result()])
    lost: list[errors.Unavailable] = []
    async with AsyncCompiler(compiling.address) as compiler:
        response = await compiler.shard_weights("pirate", "models/pirate", "tiny:v1", on_lost=lost.append)
    assert response.version == 3
    assert [error.reason for error in lost] == ["SHUTTING_DOWN"]


def test_blocking_wait_goes_on_too(compiling: ScriptedServer) -> None:
    compiling.script("WatchCompile", [DRAINING], [samples.watch_result()])
    with Compiler(compiling.address) as compiler:
        assert compiler.wait_compile("operations/7").version == 3


async def test_operation_that_ended_unavailable_is_not_waited_for(compiling: ScriptedServer) -> None:
    end = compiler_pb2.WatchCompileResponse(error=refusal("UNAVAILABLE", "COMPILER_RESTARTED"))
    compiling.script("WatchCompile", [end])
    async with AsyncCompiler(compiling.address) as compiler:
        with pytest.raises(errors.Unavailable) as caught:
            await compiler.compile(REQUEST)
    assert caught.value.reason == "COMPILER_RESTARTED"
    assert len(compiling.requests["WatchCompile"]) == 1


async def test_forgotten_operation_is_not_waited_for(compiling: ScriptedServer) -> None:
    compiling.script("WatchCompile", [DRAINING], [refusal("NOT_FOUND", "OPERATION_NOT_FOUND")])
    async with AsyncCompiler(compiling.address) as compiler:
        with pytest.raises(errors.NotFound) as caught:
            await compiler.compile(REQUEST)
    assert caught.value.metadata["operation"] == "operations/7"


@pytest.mark.parametrize("method", ["compile", "shard_weights"])
async def test_compiler_out_of_reach_names_the_operation_that_goes_on(compiling: ScriptedServer, method: str) -> None:
    compiling.script("WatchCompile", [samples.watch_progress("TRACE"), DRAINING])
    arguments = (REQUEST,) if method == "compile" else ("pirate", "models/pirate", "tiny:v1")
    async with AsyncCompiler(compiling.address, timeouts=IMPATIENT) as compiler:
        with pytest.raises(errors.Unavailable) as caught:
            await getattr(compiler, method)(*arguments)
    assert caught.value.metadata["operation"] == "operations/7"
    assert compiling.requests["CancelOperation"] == []


async def test_deadline_ends_the_wait_between_connections(compiling: ScriptedServer) -> None:
    compiling.script("WatchCompile", [refusal("UNAVAILABLE", "SHUTTING_DOWN", retry_after_s=60)])
    async with AsyncCompiler(compiling.address) as compiler:
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await asyncio.wait_for(compiler.compile(REQUEST, timeout_s=0.5), HANG_S)
    assert caught.value.metadata["operation"] == "operations/7"


async def test_cancelling_between_connections_cancels_the_operation(compiling: ScriptedServer) -> None:
    compiling.script("WatchCompile", [refusal("UNAVAILABLE", "SHUTTING_DOWN", retry_after_s=60)])
    lost = asyncio.Event()
    async with AsyncCompiler(compiling.address) as compiler:
        task = asyncio.create_task(compiler.compile(REQUEST, on_lost=lambda _: lost.set()))
        await lost.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [request.name for request in compiling.requests["CancelOperation"]] == ["operations/7"]


def test_delays_grow_until_the_server_answers() -> None:
    reconnection = Reconnection(patience_s=1000, timeout_s=1000)
    lost = errors.Unavailable("lost")
    delays = [reconnection.next_delay_s(lost) or 0.0 for _ in range(10)]
    assert 0.1 <= delays[0] <= 0.2
    assert 2.5 <= delays[-1] <= 5.0
    reconnection.reached()
    assert 0.1 <= (reconnection.next_delay_s(lost) or 0.0) <= 0.2


def test_delay_is_what_the_server_asks_for_within_the_deadline() -> None:
    draining = errors.Unavailable("draining", retry_after_s=30)
    assert Reconnection(1000, timeout_s=1000).next_delay_s(draining) == 30
    assert (Reconnection(1000, timeout_s=5).next_delay_s(draining) or 0.0) <= 5
    assert Reconnection(patience_s=0.0, timeout_s=1000).next_delay_s(draining) is None, "patience ends"
