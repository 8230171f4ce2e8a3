"""Compiles: their request, their progress, their end, and what cancelling one does."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
from google.protobuf.empty_pb2 import Empty
from kiln.compiler.v1 import compiler_pb2
from kiln.config.v1.config_pb2 import InferenceConfig, NeuronConfig
from kiln_client import AsyncCompiler, Compiler, compile_request, errors, plan_request

from tests.hang_guard import HANG_S
from tests.servers import responses as samples
from tests.servers.command import python_environment
from tests.servers.scripted_server import HANG, ScriptedServer, refusal

REQUEST = compile_request("tiny", "models/tiny", {})


def test_nothing_given_is_the_servers_default() -> None:
    assert compiler_pb2.CompileRequest(name="tiny", model="models/tiny", target={}, config_json="{}") == REQUEST


def test_everything_given() -> None:
    request = compile_request(
        "tiny",
        "/models/tiny",
        {"neuron_config": {"seq_len": 8}},
        target="cpu",
        isa="native",
        optimization_level=2,
        request_id="r",
        skip_cache_lookup=True,
        salt="s",
    )
    assert json.loads(request.config_json) == {"neuron_config": {"seq_len": 8}}
    assert (request.target.kind, request.target.isa) == (compiler_pb2.Target.KIND_CPU, "native")
    assert request.optimization_level == compiler_pb2.OPTIMIZATION_LEVEL_O2
    assert (request.request_id, request.skip_cache_lookup, request.salt) == ("r", True, "s")


def test_configuration_as_a_message() -> None:
    config = InferenceConfig(neuron_config=NeuronConfig(seq_len=8))
    request = compile_request("tiny", "models/tiny", config)
    assert request.WhichOneof("config_source") == "config"
    assert request.config == config


@pytest.mark.parametrize("option", [{"optimization_level": 3}, {"target": "gpu"}])
def test_options_outside_their_enum(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="accepted: "):
        compile_request("tiny", "models/tiny", {}, **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [partial(compile_request, "tiny"), plan_request])
def test_options_that_do_not_exist(make: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="'optimisation_level'; did you mean 'optimization_level'"):
        make("models/tiny", {}, optimisation_level=1)


async def test_progress_is_reported_in_order(compiling: ScriptedServer) -> None:
    stages = ["QUEUED", "TRACE", "LOWER", "DONE"]
    compiling.script("WatchCompile", [*map(samples.watch_progress, stages), samples.watch_result()])
    seen: list[str] = []
    async with AsyncCompiler(compiling.address) as compiler:
        await compiler.compile(
            REQUEST,
            on_start=seen.append,
            on_progress=lambda progress: seen.append(compiler_pb2.CompileStage.Name(progress.stage)),
        )
    assert seen == ["operations/7", *(f"COMPILE_STAGE_{stage}" for stage in stages)]


async def test_failed_compile_raises_its_status(compiling: ScriptedServer) -> None:
    failure = refusal("INTERNAL", "LOWERING_FAILED", "g++ failed", tag="token_generation_256")
    compiling.script("WatchCompile", [compiler_pb2.WatchCompileResponse(error=failure)])
    async with AsyncCompiler(compiling.address) as compiler:
        with pytest.raises(errors.Internal, match="g\\+\\+ failed") as caught:
            await compiler.compile(REQUEST)
    assert caught.value.metadata == {"tag": "token_generation_256", "operation": "operations/7"}


async def test_watch_without_an_end_is_an_error(compiling: ScriptedServer) -> None:
    compiling.script("WatchCompile", [samples.watch_progress("TRACE")])
    async with AsyncCompiler(compiling.address) as compiler:
        with pytest.raises(errors.StreamIncomplete, match="no result"):
            await compiler.compile(REQUEST)


@pytest.mark.parametrize("answer", [Empty(), refusal("NOT_FOUND", "OPERATION_NOT_FOUND")])
async def test_cancelling_the_call_cancels_the_operation(compiling: ScriptedServer, answer: object) -> None:
    compiling.script("WatchCompile", [samples.watch_progress("LOWER"), HANG])
    compiling.script("CancelOperation", answer)
    lowering = asyncio.Event()
    async with AsyncCompiler(compiling.address) as compiler:
        task = asyncio.create_task(compiler.compile(REQUEST, on_progress=lambda _: lowering.set()))
        await lowering.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [request.name for request in compiling.requests["CancelOperation"]] == ["operations/7"]
        assert await asyncio.to_thread(compiling.cancelled["WatchCompile"].wait, HANG_S)


def test_interrupting_a_blocking_compile_cancels_the_operation(compiling: ScriptedServer) -> None:
    compiling.script("WatchCompile", [samples.watch_progress("LOWER"), HANG])
    program = (
        "from kiln_client import Compiler, compile_request\n"
        f"compiler = Compiler({compiling.address!r})\n"
        "show = lambda progress: print('lowering', flush=True)\n"
        "compiler.compile(compile_request('tiny', 'models/tiny', {}), on_progress=show)\n"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=python_environment(), stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "lowering\n"
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=HANG_S)
    assert "KeyboardInterrupt" in complaint
    assert [request.name for request in compiling.requests["CancelOperation"]] == ["operations/7"]


def test_blocking_call_from_a_callback_is_refused_rather_than_hung(compiling: ScriptedServer) -> None:
    compiling.script("WatchCompile", [samples.watch_progress("LOWER"), samples.watch_result()])
    with Compiler(compiling.address) as compiler, pytest.raises(RuntimeError, match="callback"):
        compiler.compile(REQUEST, on_progress=lambda _: compiler.cancel_operation("operations/7"))


def test_blocking_clients_share_threads(server: ScriptedServer) -> None:
    server.script("GetOperation", samples.OPERATION)
    names: list[str] = []
    with Compiler(server.address) as compiler:

        def call() -> None:
            names.extend(compiler.get_operation("operations/7").name for _ in range(20))

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
    assert names == ["operations/7"] * 160
    assert sum(thread.name == "kiln-client" for thread in threading.enumerate()) == 1
