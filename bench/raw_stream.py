"""A worker: a bare grpc.aio server that streams the messages that the front streams, as fast as it can or at a pace."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import grpc
from kiln.runtime.v1 import generation_pb2, generation_pb2_grpc

from bench.worker import Worker, serve
from edge.loopback import channel_options


def message(sequence_number: int) -> generation_pb2.GenerateResponse:
    """An event like that of one token."""
    token = generation_pb2.Token(id=1772, text="token1772")
    delta = generation_pb2.TokenDelta(text="token1772", tokens=[token])
    return generation_pb2.GenerateResponse(sequence_number=sequence_number, delta=delta)


class _Servicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, tokens: int, interval_s: float) -> None:
        self.tokens = tokens
        self.interval_s = interval_s
        self.cpu_s = 0.0

    async def Generate(  # noqa: N802 - the API's name
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        del request, context
        start = time.process_time()
        for number in range(self.tokens):
            yield message(number)
            if self.interval_s > 0:
                await asyncio.sleep(self.interval_s)
        self.cpu_s += time.process_time() - start


def measure(tokens: int, interval_s: float = 0.0) -> float:
    """Seconds of this process's processor time per message, over one stream to a client in another process.

    The server sleeps `interval_s` between two messages; waking up costs more than a write. With 0, it writes each
    message as soon as the one before is written.
    """
    return asyncio.run(_measure(tokens, interval_s))


def drain(address: str) -> int:
    """Reads the stream of the server at an address; returns the number of its messages."""
    return asyncio.run(_drain(address))


async def _measure(tokens: int, interval_s: float) -> float:
    servicer = _Servicer(tokens, interval_s)
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with Worker("bench.raw_stream") as client:
        await asyncio.to_thread(client.call, "drain", address=f"127.0.0.1:{port}")
    await server.stop(None)
    return servicer.cpu_s / tokens


async def _drain(address: str) -> int:
    async with grpc.aio.insecure_channel(address, options=channel_options(address)) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return len([event async for event in stub.Generate(generation_pb2.GenerateRequest())])


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    serve({"measure": measure, "drain": drain})
