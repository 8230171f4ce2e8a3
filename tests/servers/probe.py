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

SERVICE = "kiln.bundle.v1.BundleService"
GET = bundle_pb2.GetBundleRequest(ref="tiny")
READ = bundle_pb2.ReadBlobRequest(digest="sha256:x")
CHUNK = bundle_pb2.ReadBlobResponse(data=b"chunk")


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
Answer = Callable[[], Awaitable[bundle_pb2.GetBundleResponse]]
#: Opens a channel to an address.
Connect = Callable[[str], grpc.aio.Channel]


async def answer() -> bundle_pb2.GetBundleResponse:
    return bundle_pb2.GetBundleResponse()


async def hang() -> bundle_pb2.GetBundleResponse:
    """An answer that never comes."""
    return await asyncio.Future()


def fail_with(error: BaseException) -> Answer:
    async def fail() -> bundle_pb2.GetBundleResponse:
        raise error

    return fail


def answer_after(waiting: Callable[[], Awaitable[object]]) -> Answer:
    """An answer that comes when what the call returns has been awaited."""

    async def answer_late() -> bundle_pb2.GetBundleResponse:
        await waiting()
        return bundle_pb2.GetBundleResponse()

    return answer_late


class Probe(bundle_pb2_grpc.BundleServiceServicer):
    """GetBundle awaits `answer`; ReadBlob sends one chunk, then awaits `answer`, then sends another one.

    Attributes:
        server, address: Those that it is served by, and at.
    """

    server: EdgeServer
    address: str

    def __init__(self, answer: Answer = answer) -> None:
        self.answer = answer
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


class Flood(Probe):
    """ReadBlob sends chunks until the call ends."""

    chunk = bundle_pb2.ReadBlobResponse(data=bytes(64 << 10))

    async def ReadBlob(  # noqa: N802
        self, request: bundle_pb2.ReadBlobRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[bundle_pb2.ReadBlobResponse, None]:
        try:
            while True:
                yield self.chunk
        finally:
            self.left.set()


def make_server(probe: Probe, config: EdgeConfig | None = None, **options: Any) -> EdgeServer:
    return EdgeServer(
        config or EdgeConfig("127.0.0.1:0", drain_timeout_s=5),
        services=[SERVICE, "google.longrunning.Operations"],
        register=lambda server: bundle_pb2_grpc.add_BundleServiceServicer_to_server(probe, server),
        **options,
    )


def read_metric(probe: Probe, metric: str, *labels: str) -> float:
    (row,) = (row for row in probe.server.list_metrics() if row.name == metric)
    return sum(float(value) for key, value in row.read() if key == labels)  # type: ignore[arg-type]


def own_channel(address: str, *options: tuple[str, int]) -> grpc.aio.Channel:
    """A channel with a connection of its own."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), *options])


@asynccontextmanager
async def serve(
    probe: Probe,
    config: EdgeConfig | None = None,
    *,
    prepare: Callable[[EdgeServer], object] = lambda _: None,
    connect: Connect = own_channel,
    **options: Any,
) -> AsyncIterator[grpc.aio.Channel]:
    """Runs a server with the probe on it, of which something is asked before its start; yields a channel to it."""
    probe.server = make_server(probe, config, **options)
    prepare(probe.server)
    try:
        probe.address = f"127.0.0.1:{await probe.server.start()}"
        async with connect(probe.address) as channel:
            yield channel
    finally:
        await probe.server.drain()


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
    """Returns the state of a name; SERVICE_UNKNOWN if it is not found."""
    try:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return SERVICE_UNKNOWN
    return int(response.status)
