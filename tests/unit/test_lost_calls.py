"""Calls to a compiler that is killed: a closed channel is told from an interrupted test, which ends."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest
from google.longrunning import operations_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from tests.servers.running_compiler import Client
from tests.system.kills.compiler_actions import ChannelClosed, Outcome, call, telling_closed_channel

#: No server listens there.
ADDRESS = "127.0.0.1:9"


async def test_a_call_whose_channel_is_closed_loses_its_compiler() -> None:
    channel = grpc.aio.insecure_channel(ADDRESS)
    client = Client(channel)
    waiting = asyncio.create_task(call(client.compiler.PlanCompile(pb.PlanCompileRequest(), wait_for_ready=True)))
    await asyncio.sleep(0)
    await channel.close()
    assert await waiting == Outcome("INTERRUPTED")
    with pytest.raises(ChannelClosed), telling_closed_channel():
        await client.operations.WaitOperation(operations_pb2.WaitOperationRequest())


def test_an_interrupt_ends_a_test_in_the_middle_of_a_call() -> None:
    async def wait() -> Outcome:
        loop = asyncio.get_running_loop()
        loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
        return await call(loop.create_future())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(wait())
