"""A compiler on a real server over loopback, with a real database and store, whose builds a test directs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Container, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc
from kiln.bundle.v1 import bundle_pb2_grpc
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.compiler.v1 import compiler_pb2_grpc

from bundle.store.layout import Layout
from compiler_svc.builds.job import BuildJob, BuildResult
from compiler_svc.compiles.build_runner import OnProgress
from compiler_svc.planning.pool import PlanningPool, make_fetch_forkserver, make_forkserver
from compiler_svc.records import ExecutableResult, Progress, Stage
from compiler_svc.server import open_server
from compiler_svc.settings import parse_settings
from edge.server import EdgeServer
from tests.bundles.samples import publish_sample
from tests.servers.refusals import Refusal, expect, read_refusal

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
        request = pb.CompileRequest(**({"name": "tiny"} | complete(**fields)))
        operation: operations_pb2.Operation = await self.compiler.Compile(request, metadata=metadata)
        return operation

    async def build(self, **fields: Any) -> pb.CompileResponse:
        """Compiles, to the end."""
        return response_of(await self.finish(await self.compile(**fields)))

    def plan(self, *, timeout: float | None = None, **fields: Any) -> Any:
        """A call for what `compile` would do with these fields."""
        return self.compiler.PlanCompile(pb.PlanCompileRequest(**complete(**fields)), timeout=timeout)

    async def finish(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        """Waits until an operation is done."""
        request = operations_pb2.WaitOperationRequest(name=operation.name)
        done: operations_pb2.Operation = await self.operations.WaitOperation(request)
        assert done.done
        return done

    async def fail(
        self, operation: operations_pb2.Operation, code: str, reason: str, /, *fields: str, **metadata: str
    ) -> Refusal:
        """Expects an operation to fail; see `refusals.expect`."""
        return expect(read_refusal((await self.finish(operation)).error), code, reason, *fields, **metadata)

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


def complete(*, neuron_config: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Fields of a request for tiny at O1, unless they say otherwise."""
    config = {} if neuron_config is None else {"neuron_config": dict(neuron_config)}
    defaults = {
        "model": "tiny",
        "optimization_level": pb.OPTIMIZATION_LEVEL_O1,
        **({} if "config" in fields else {"config_json": json.dumps(config)}),
    }
    return defaults | fields


def response_of(operation: operations_pb2.Operation) -> pb.CompileResponse:
    assert operation.WhichOneof("result") == "response", operation.error
    response = pb.CompileResponse()
    assert operation.response.Unpack(response)
    return response


def metadata_of(operation: operations_pb2.Operation) -> pb.CompileMetadata:
    metadata = pb.CompileMetadata()
    assert operation.metadata.Unpack(metadata)
    return metadata


def options_of(home: Path) -> list[str]:
    """Of a compiler with state below `home` and checkpoints below `home/models`."""
    places = [f"--store={home}/store", f"--cache={home}/cache", f"--model-root={home}/models"]
    return ["--address=127.0.0.1:0", *places, "--drain-timeout=1"]


@asynccontextmanager
async def serve_compiler(
    home: Path,
    *options: str,
    runner: DirectedRunner | None = None,
    planning: PlanningPool | None = None,
    fetches: PlanningPool | None = None,
) -> AsyncIterator[tuple[Client, DirectedRunner]]:
    """Runs a compiler with state below `home` and checkpoints below `home/models`."""
    settings = parse_settings([*options_of(home), *options])
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
