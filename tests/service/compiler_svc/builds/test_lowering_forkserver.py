"""The forkserver of lowerings, which all builds share: what becomes of them when it dies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import psutil
import pytest
from google.longrunning import operations_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from tests.servers.compiler_process import CompilerProcess, run_compiler, wait_until_gone
from tests.servers.running_compiler import read_refusal

pytestmark = [pytest.mark.slow, pytest.mark.toolchain]


async def begin_compile(compiler: CompilerProcess) -> operations_pb2.Operation:
    neuron_config = {"seq_len": 16, "batch_size": 1}
    return await compiler.client.compile(
        config_json=json.dumps({"neuron_config": neuron_config}), optimization_level=pb.OPTIMIZATION_LEVEL_O1
    )


async def wait_for(compiler: CompilerProcess, name: str) -> psutil.Process:
    async with asyncio.timeout(120):
        while not (found := compiler.find(name)):  # noqa: ASYNC110 - processes announce no start
            await asyncio.sleep(0.02)
    return found[0]


async def test_lowerings_end_with_their_forkserver_and_the_next_build_has_another(home: Path) -> None:
    async with run_compiler(home) as compiler:
        operation = await begin_compile(compiler)
        lowering = await wait_for(compiler, "kiln-lowering")
        forkserver = lowering.parent()
        assert forkserver is not None
        assert forkserver.name() == "kiln-lowerings"
        forkserver.kill()
        refused = read_refusal((await compiler.client.finish(operation)).error)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "LOWERING_FAILED")
        assert "ended with the process that it was forked from" in refused.message
        await wait_until_gone(lowering)

        operation = await begin_compile(compiler)
        lowering = await wait_for(compiler, "kiln-lowering")
        another = lowering.parent()
        assert another not in (None, forkserver)
        await compiler.client.cancel(operation.name)
        assert read_refusal((await compiler.client.finish(operation)).error).reason == "COMPILE_CANCELLED"
        await wait_until_gone(lowering)
        assert another.is_running()
    await wait_until_gone(another)


async def test_a_stopped_forkserver_of_lowerings_is_replaced(home: Path) -> None:
    async with run_compiler(home, "--build-idle-timeout=8") as compiler:
        operation = await begin_compile(compiler)
        (await wait_for(compiler, "kiln-lowerings")).suspend()
        refused = read_refusal((await compiler.client.finish(operation)).error)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "LOWERING_FAILED")
        assert "ended with the process that it was forked from" in refused.message

        operation = await begin_compile(compiler)
        lowering = await wait_for(compiler, "kiln-lowering")
        await compiler.client.cancel(operation.name)
        await wait_until_gone(lowering)
