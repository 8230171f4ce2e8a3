"""Builds and forkservers of builds that are stopped: operations end by name, and the next build succeeds."""

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
from tests.servers.running_compiler import read_refusal, response_of

#: A build that waits for ranks computes every three seconds.
TIMEOUT_S = 8


async def begin_compile(compiler: CompilerProcess, salt: str) -> operations_pb2.Operation:
    return await compiler.client.compile(
        config_json=json.dumps({"neuron_config": {"seq_len": 16, "batch_size": 1}}),
        optimization_level=pb.OPTIMIZATION_LEVEL_O0,
        salt=salt,
    )


async def wait_for(compiler: CompilerProcess, name: str) -> psutil.Process:
    async with asyncio.timeout(60):
        while not (found := compiler.find(name)):  # noqa: ASYNC110 - processes announce no start
            await asyncio.sleep(0.02)
    return found[0]


@pytest.mark.slow
async def test_stopped_builds_and_forkservers(home: Path) -> None:
    async with run_compiler(home, f"--build-idle-timeout={TIMEOUT_S}") as compiler:
        operation = await begin_compile(compiler, "build")
        build = await wait_for(compiler, "kiln-build")
        build.suspend()
        refused = read_refusal((await compiler.client.finish(operation)).error)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "BUILD_STALLED")
        assert f"computed nothing for {TIMEOUT_S} s" in refused.message
        await wait_until_gone(build)

        # Idle, it is noticed too; a build that has begun ends with it.
        (forkserver,) = compiler.find("kiln-builds")
        forkserver.suspend()
        operation = await begin_compile(compiler, "forkserver")
        refused = read_refusal((await compiler.client.finish(operation)).error)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "BUILD_FAILED")
        assert "with the process that it was forked from" in refused.message
        await wait_until_gone(forkserver)

        assert response_of(await compiler.client.finish(await begin_compile(compiler, "again"))).version == 1
