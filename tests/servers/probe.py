"""A service whose handlers do what a test tells them to, on a real server; BundleService lends its messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.bundle.v1 import bundle_pb2, bundle_pb2_grpc

from edge.server import EdgeConfig, EdgeServer
from edge.status import BUNDLE_STATUSES, StatusTable

SERVICE = "kiln.bundle.v1.BundleService"
GET = bundle_pb2.GetBundleRequest(ref="tiny")
READ = bundle_pb2.ReadBlobRequest(digest="sha256:x")
CHUNK = bundle_pb2.ReadBlobResponse(data=b"chunk")


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
#: Makes a server with a probe on it, which ends with the test.
BuildServer = Callable[..., EdgeServer]


async def answer() -> bundle_pb2.GetBundleResponse:
    return bundle_pb2.GetBundleResponse()


class Probe(bundle_pb2_grpc.BundleServiceServicer):
    """GetBundle awaits `answer`; ReadBlob sends one chunk, then awaits `answer`, then sends another one."""

    def __init__(self) -> None:
        self.answer: Callable[[], Awaitable[bundle_pb2.GetBundleResponse]] = answer
        self.entered = asyncio.Event()
        self.left = asyncio.Event()
        self.context: grpc.aio.ServicerContext[object, object] | None = None
        #: Peer of the newest call. gRPC frees a call with its end: its context must not be asked afterwards.
        self.peer = ""

    async def GetBundle(  # noqa: N802
        self, request: bundle_pb2.GetBundleRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> bundle_pb2.GetBundleResponse:
        self.context = context
        self.peer = context.peer()
        self.entered.set()
        try:
            return await self.answer()
        finally:
            self.left.set()

    async def ReadBlob(  # noqa: N802
        self, request: bundle_pb2.ReadBlobRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[bundle_pb2.ReadBlobResponse, None]:
        self.context = context
        self.peer = context.peer()
        try:
            yield CHUNK
            self.entered.set()
            await self.answer()
            yield CHUNK
        finally:
            self.left.set()

    async def hang(self) -> bundle_pb2.GetBundleResponse:
        """An answer that never comes."""
        return await asyncio.Future()


def make_server(
    probe: Probe, config: EdgeConfig | None = None, *, table: StatusTable = BUNDLE_STATUSES, **options: Any
) -> EdgeServer:
    return EdgeServer(
        config or EdgeConfig("127.0.0.1:0", drain_timeout_s=5),
        status_table=table,
        services=[SERVICE, "google.longrunning.Operations"],
        register=lambda server: bundle_pb2_grpc.add_BundleServiceServicer_to_server(probe, server),
        **options,
    )


@asynccontextmanager
async def serve(
    probe: Probe, config: EdgeConfig | None = None, *, table: StatusTable = BUNDLE_STATUSES, **options: Any
) -> AsyncIterator[grpc.aio.Channel]:
    """Runs a server with the probe on it; yields a channel to it."""
    server = make_server(probe, config, table=table, **options)
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.drain()


def stub(channel: grpc.aio.Channel) -> bundle_pb2_grpc.BundleServiceAsyncStub:
    return bundle_pb2_grpc.BundleServiceStub(channel)  # the stubs' type for asynchronous channels


async def call_method(channel: grpc.aio.Channel, method: str) -> list[object]:
    """Calls GetBundle or ReadBlob; returns all responses."""
    if method == "GetBundle":
        return [await stub(channel).GetBundle(GET)]
    call = stub(channel).ReadBlob(READ)
    try:
        return [response async for response in call]
    finally:
        call.cancel()  # gRPC does not, if it has sent the request at the very moment that the reader is cancelled


async def check_health(channel: grpc.aio.Channel, service: str = "") -> int:
    """Returns the state of a name."""
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)
