"""A whole runtime on loopback: real gRPC, real bundles, fake ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2_grpc
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import generation_pb2_grpc, runtime_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as runtime

from bundle.manifest import Manifest
from bundle.store.layout import Layout
from execution.text.handle import make_forkserver
from runtime_svc.deployments.launcher import StartRanks
from runtime_svc.engine.engine import Engine
from runtime_svc.server import RuntimeServer, open_server
from runtime_svc.settings import parse_settings
from tests.bundles.published import LayoutBundleService, publish
from tests.hang_guard import until
from tests.ranks.fakes import FakeRanks
from tests.servers.refusals import unpack

Metadata = tuple[tuple[str, str], ...]
#: For the runtimes of all tests of this process, because it takes most of a second to load.
TEXTS = make_forkserver()


class Runtime:
    """A served runtime, its store and its clients."""

    def __init__(self, server: RuntimeServer, port: int, store: Layout, bundles: LayoutBundleService) -> None:
        self.server = server
        self.store = store
        self.bundles = bundles
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.aio.insecure_channel(self.address)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.control = runtime_pb2_grpc.RuntimeServiceStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)
        self.groups: list[FakeRanks] = []
        self.start_failures: list[Exception] = []
        self.load_failures: list[Exception] = []
        self.started_with: list[dict[str, Any]] = []
        self.step_s = 0.0
        self.load_gate = asyncio.Event()
        self.load_gate.set()

    @property
    def ranks(self) -> FakeRanks:
        return self.groups[-1]

    async def start_ranks(
        self,
        manifest: Manifest,
        blob_path: Mapping[str, Path],
        *,
        num_threads: int,
        log_sink: Callable[[int, str], None],
        cores: Sequence[int],
    ) -> FakeRanks:
        if self.start_failures:
            raise self.start_failures.pop(0)
        self.started_with.append({"num_threads": num_threads})
        blob = manifest.weight_sets[0].shards[0].blob
        ranks = FakeRanks(manifest, bias=None if blob is None else int(blob_path[blob].read_text()))
        ranks.step_s = self.step_s
        ranks.load_gate = self.load_gate
        ranks.load_failures = self.load_failures
        log_sink(0, "hello")
        self.groups.append(ranks)
        return ranks

    def publish(self, name: str = "story", **options: Any) -> str:
        """Publishes a bundle under a name."""
        self.bundles.names[name] = publish(self.store, **options)
        return self.bundles.names[name]

    async def deploy(self, deployment_id: str = "d", *, ref: str = "story", **options: Any) -> runtime.Deployment:
        """Publishes and loads a bundle."""
        if ref not in self.bundles.names or options:
            self.publish(ref, **options)
        events = await self.load(ref, deployment_id)
        return events[-1].deployment

    async def load(
        self, ref: str, deployment_id: str = "d", cores: list[int] | None = None, **options: Any
    ) -> list[Any]:
        request = runtime.LoadBundleRequest(ref=ref, deployment_id=deployment_id, cores=cores or [], **options)
        return [event async for event in self.control.LoadBundle(request)]

    async def load_weights(self, ref: str, deployment_id: str = "d", **options: Any) -> list[Any]:
        request = runtime.LoadWeightsRequest(ref=ref, deployment_id=deployment_id, **options)
        return [event async for event in self.control.LoadWeights(request)]

    async def generate(self, prompt: list[int], max_new_tokens: int | None = 5, **options: Any) -> list[Any]:
        return await self.ask(token_request(prompt, max_new_tokens, **options))

    async def ask(self, request: generation.GenerateRequest, metadata: Metadata = ()) -> list[Any]:
        """Events of a whole generation."""
        return [event async for event in self.generation.Generate(request, metadata=metadata)]

    async def get(self, deployment_id: str = "d") -> runtime.Deployment:
        request = runtime.GetDeploymentRequest(deployment_id=deployment_id)
        return (await self.control.GetDeployment(request)).deployment

    async def wait_for(
        self, is_so: Callable[[runtime.Deployment], object], deployment_id: str = "d"
    ) -> runtime.Deployment:
        """Waits until something is so of a deployment, which is returned."""

        async def look() -> runtime.Deployment | None:
            deployment = await self.get(deployment_id)
            return deployment if is_so(deployment) else None

        return await until(look)  # type: ignore[no-any-return]

    async def wait_for_state(self, state: str, deployment_id: str = "d") -> runtime.Deployment:
        """Waits until a deployment is READY, FAILED, …"""
        wanted = runtime.Deployment.State.Value(f"STATE_{state}")
        return await self.wait_for(lambda one: one.state == wanted, deployment_id)

    async def wait_for_slots(self, used: int) -> None:
        await self.wait_for(lambda one: one.load.used_slots == used)

    def engine(self, deployment_id: str = "d") -> Engine:
        engine = self.server.deployments.get(deployment_id).engine
        assert engine is not None
        return engine

    async def wait_for_operation(self) -> None:
        """Waits until a reset, or a swap of weights, is due."""
        await until(lambda: bool(self.engine()._operations.waiting))

    async def check_health(self, name: str = "") -> str:
        """State of a name; the code of the answer if it has none."""
        try:
            response = await self._health.Check(health_pb2.HealthCheckRequest(service=name))
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

    async def watch_health(self, name: str = "") -> AsyncIterator[str]:
        async for response in self._health.Watch(health_pb2.HealthCheckRequest(service=name)):
            yield health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    async def wait_for_health(self, state: str, name: str = "") -> None:
        async def is_so() -> bool:
            return await self.check_health(name) == state

        await until(is_so)

    async def info(self) -> runtime.GetServerInfoResponse:
        return await self.control.GetServerInfo(runtime.GetServerInfoRequest())

    async def unload(self, deployment_id: str = "d", **options: Any) -> runtime.UnloadBundleResponse:
        return await self.control.UnloadBundle(runtime.UnloadBundleRequest(deployment_id=deployment_id, **options))


def token_request(
    prompt: list[int],
    max_new_tokens: int | None = 5,
    *,
    deployment_id: str = "d",
    request_id: str = "",
    **sampling: Any,
) -> generation.GenerateRequest:
    return generation.GenerateRequest(
        deployment_id=deployment_id,
        request_id=request_id,
        token_ids=generation.TokenIds(ids=prompt),
        sampling=generation.SamplingParams(**sampling),
        stop=generation.StopConditions(max_new_tokens=max_new_tokens, ignore_eos=True),
    )


def tokens_of(events: list[Any]) -> list[int]:
    return [token.id for event in events for token in event.delta.tokens]


def text_of(events: list[Any]) -> str:
    return "".join(event.delta.text for event in events)


def stages_of(events: list[Any]) -> list[str]:
    """Stages in order, each once."""
    names = [runtime.LoadProgress.Stage.Name(event.progress.stage) for event in events if event.HasField("progress")]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


async def hold(served: Runtime, request: generation.GenerateRequest) -> grpc.aio.UnaryStreamCall[Any, Any]:
    """A request that is in the middle of a step until the caller opens the gate."""
    served.ranks.gate.clear()
    call = served.generation.Generate(request)
    await anext(aiter(call))
    await served.wait_for_slots(1)
    return call


def details_of(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.BadRequest]:
    """ErrorInfo and BadRequest of a failed call."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    return unpack(status, error_details_pb2.ErrorInfo), unpack(status, error_details_pb2.BadRequest)


def declare(directory: Path, *entries: Mapping[str, Any]) -> str:
    """Writes a file of deployments; returns the argument that names it."""
    path = directory / "deployments.json"
    path.write_text(json.dumps(entries))
    return f"--deployments={path}"


@asynccontextmanager
async def serve_bundles(
    bundles: LayoutBundleService, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    """Serves bundles; yields the address."""
    server = grpc.aio.server()
    bundle_pb2_grpc.add_BundleServiceServicer_to_server(bundles, server)
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def serve_runtime(
    tmp_path: Path,
    *arguments: str,
    has_compiler: bool = True,
    start_ranks: StartRanks | None = None,
    prepare: Callable[[LayoutBundleService], None] = lambda _: None,
) -> AsyncIterator[Runtime]:
    """Serves a runtime with extra command line arguments, on fake ranks unless others are given.

    A second one with the same path takes over what the first one left. `prepare` sees the bundle service first.
    """
    store = Layout.create(tmp_path / "store")
    bundles = LayoutBundleService(store)
    prepare(bundles)
    serving: asyncio.Future[Runtime] = asyncio.get_running_loop().create_future()

    async def start_fake_ranks(*args: Any, **kwargs: Any) -> FakeRanks:
        return await (await serving).start_ranks(*args, **kwargs)

    async with serve_bundles(bundles) as compiler:
        own = ["--address=127.0.0.1:0", f"--cache={tmp_path / 'cache'}", "--cores=4"]
        if has_compiler:
            own += [f"--compiler={compiler}", f"--bundle-store={store.root}"]
        settings = parse_settings([*own, *arguments])
        async with open_server(settings, start_ranks or start_fake_ranks, TEXTS) as server:
            served = Runtime(server, await server.start(), store, bundles)
            serving.set_result(served)
            try:
                yield served
                for deployment in server.deployments.list():
                    if deployment.engine is not None:
                        deployment.engine.scheduler.check_integrity()
            finally:
                await served.channel.close()
                await server.edge.stop()
    assert all(ranks.is_closed for ranks in served.groups), "a rank was left running"
