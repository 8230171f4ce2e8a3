"""A compiler on a real server over loopback, with a real database and store, whose builds a test directs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Container, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2_grpc
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.compiler.v1 import compiler_pb2_grpc

from bundle.layout import Layout
from compiler_svc.builds.job import BuildJob, BuildResult
from compiler_svc.compiles.build_runner import OnProgress
from compiler_svc.planning.pool import PlanningPool, make_fetch_forkserver, make_forkserver
from compiler_svc.records import ExecutableResult, Progress, Stage
from compiler_svc.server import open_server
from compiler_svc.settings import parse_settings
from edge.server import EdgeServer
from tests.bundles.samples import publish_sample

#: For the compilers of all tests of this process, because it takes most of a second to load.
PLANS = make_forkserver()
FETCHES = make_fetch_forkserver()

BUILDING = "one of two is compiled"
EXECUTABLE = ExecutableResult(
    tag="token_generation_16",
    submodel="token_generation",
    bucket=(16,),
    cached=False,
    duration_s=1.5,
    size_bytes=100,
)


@dataclass
class DirectedRunner:
    """Publishes the sample bundle instead of building one. The test decides whether and when."""

    store: Path
    jobs: list[BuildJob] = field(default_factory=list)
    cancelled: int = 0
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    bundle_version: str = "1"
    discarded: list[str] = field(default_factory=list)
    retained: Container[str] = ()

    def discard(self, build_id: str) -> None:
        self.discarded.append(build_id)

    def retain(self, build_ids: Container[str]) -> None:
        self.retained = build_ids

    async def run(self, job: BuildJob, on_progress: OnProgress) -> BuildResult:
        self.jobs.append(job)
        await on_progress(Progress(stage=Stage.LOWER, executables_total=2, message="compiling"))
        await on_progress(
            Progress(stage=Stage.LOWER, executables_total=2, executables_done=1, eta_s=2.0, message=BUILDING)
        )
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        digest = publish_sample(Layout(self.store), version=self.bundle_version)
        return BuildResult(bundle_digest=digest, executables=(EXECUTABLE,), new_executables={})


class Client:
    """Stubs of everything that the compiler serves."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        #: Port of the compiler's metrics; None if it serves none, or if the test knows only its channel.
        self.metrics_port: int | None = None
        #: The compiler's server; None if the test knows only its channel.
        self.server: EdgeServer | None = None
        self.compiler: Any = compiler_pb2_grpc.CompilerServiceStub(channel)
        self.operations: Any = operations_pb2_grpc.OperationsStub(channel)
        self.bundles: Any = bundle_pb2_grpc.BundleServiceStub(channel)

    async def compile(self, *, metadata: Sequence[tuple[str, str]] = (), **fields: Any) -> operations_pb2.Operation:
        defaults = {
            "name": "tiny",
            "model": "tiny",
            "config_json": "{}",
            "optimization_level": pb.OPTIMIZATION_LEVEL_O1,
        }
        if "config" in fields:
            del defaults["config_json"]
        request = pb.CompileRequest(**(defaults | fields))
        operation: operations_pb2.Operation = await self.compiler.Compile(request, metadata=metadata)
        return operation

    async def finish(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        """Waits until an operation is done."""
        request = operations_pb2.WaitOperationRequest(name=operation.name)
        done: operations_pb2.Operation = await self.operations.WaitOperation(request, timeout=120)
        assert done.done
        return done

    async def get(self, name: str) -> operations_pb2.Operation:
        operation: operations_pb2.Operation = await self.operations.GetOperation(
            operations_pb2.GetOperationRequest(name=name)
        )
        return operation

    async def cancel(self, name: str) -> None:
        await self.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=name))

    async def reach(self, operation: operations_pb2.Operation, message: str) -> pb.CompileMetadata:
        """Waits until an operation says `message`."""
        request = pb.WatchCompileRequest(operation=operation.name)
        async with aclosing(self._progress(request)) as events:
            async for progress in events:
                if progress.message == message:
                    return progress
        raise AssertionError(f"{operation.name} ended before it said {message!r}")

    async def _progress(self, request: pb.WatchCompileRequest) -> AsyncGenerator[pb.CompileMetadata, None]:
        watching = self.compiler.WatchCompile(request, timeout=30)
        try:
            async for event in watching:
                yield event.progress
        finally:
            watching.cancel()

    async def reach_build(self, *operations: operations_pb2.Operation) -> None:
        """Waits until the builds of operations are under way, as `DirectedRunner` does them."""
        for operation in operations:
            await self.reach(operation, BUILDING)

    async def watch(self, name: str) -> list[pb.WatchCompileResponse]:
        return [event async for event in self.compiler.WatchCompile(pb.WatchCompileRequest(operation=name))]


def response_of(operation: operations_pb2.Operation) -> pb.CompileResponse:
    assert operation.WhichOneof("result") == "response", operation.error
    response = pb.CompileResponse()
    assert operation.response.Unpack(response)
    return response


def metadata_of(operation: operations_pb2.Operation) -> pb.CompileMetadata:
    metadata = pb.CompileMetadata()
    assert operation.metadata.Unpack(metadata)
    return metadata


@dataclass(frozen=True)
class Refusal:
    """An error as a client sees it."""

    code: grpc.StatusCode
    reason: str
    metadata: dict[str, str]
    #: Field → description.
    fields: dict[str, str]
    retry_after_s: float | None
    message: str


def read_refusal(status: status_pb2.Status) -> Refusal:
    info = unpack(status, error_details_pb2.ErrorInfo)
    assert info is not None
    assert info.domain == "kiln"
    retry = unpack(status, error_details_pb2.RetryInfo)
    bad = unpack(status, error_details_pb2.BadRequest)
    return Refusal(
        code=next(code for code in grpc.StatusCode if code.value[0] == status.code),
        reason=info.reason,
        metadata=dict(info.metadata),
        fields={} if bad is None else {one.field: one.description for one in bad.field_violations},
        retry_after_s=None if retry is None else retry.retry_delay.ToTimedelta().total_seconds(),
        message=status.message,
    )


def unpack(status: status_pb2.Status, kind: type[Message]) -> Any:
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            return message
    return None


async def refusal(call: Any) -> Refusal:
    """Awaits a call, or reads a stream, that must fail; returns how."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)
        return read_refusal(status or status_pb2.Status())
    raise AssertionError("the call succeeded")


@asynccontextmanager
async def serve_compiler(
    home: Path,
    *options: str,
    runner: DirectedRunner | None = None,
    planning: PlanningPool | None = None,
    fetches: PlanningPool | None = None,
) -> AsyncIterator[tuple[Client, DirectedRunner]]:
    """Runs a compiler with state below `home` and checkpoints below `home/models`."""
    arguments = ["--address", "127.0.0.1:0", "--store", f"{home}/store", "--cache", f"{home}/cache"]
    settings = parse_settings([*arguments, "--model-root", f"{home}/models", "--drain-timeout", "1", *options])
    directed = runner or DirectedRunner(settings.store)
    planning = planning or PlanningPool(PLANS)
    fetches = fetches or PlanningPool(FETCHES, process_name="kiln-fetch")
    async with open_server(settings, lambda _: directed, planning, fetches) as server:
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            client = Client(channel)
            client.metrics_port, client.server = server.metrics_port, server
            yield client, directed
        await server.drain()
