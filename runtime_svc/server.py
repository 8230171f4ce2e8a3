"""Joins the parts of the runtime to a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import grpc
import structlog
from kiln.runtime.v1 import generation_pb2_grpc, runtime_pb2_grpc

from bundle.errors import FieldViolation
from bundle.file_modes import make_private_directory
from bundle.layout import Layout
from bundle.verification import BlobVerifier
from edge.errors import OptionsInvalid
from edge.health import OVERALL
from edge.metrics import serve_metrics
from edge.server import EdgeServer
from edge.supervision import begin_task
from edge.tracing import open_tracing
from execution.text.handle import make_forkserver
from runtime_svc.access_rules import RULES, make_engine_rules
from runtime_svc.bundles.directory import BundleDirectory
from runtime_svc.bundles.grpc_source import GrpcBundleSource
from runtime_svc.bundles.leases import LeaseKeeper
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.captures.directory import CaptureDirectory
from runtime_svc.deployments.cores import CorePool
from runtime_svc.deployments.deployment import DeploymentState
from runtime_svc.deployments.deployment_spec import DeploymentDefaults
from runtime_svc.deployments.file_watch import FileWatch
from runtime_svc.deployments.follower import AliasFollower
from runtime_svc.deployments.launcher import StartRanks
from runtime_svc.deployments.loader import Loader
from runtime_svc.deployments.memory import MemoryPool
from runtime_svc.deployments.reconciler import Reconciler
from runtime_svc.deployments.records import RecordStore
from runtime_svc.deployments.registry import FAREWELL_S, Deployments
from runtime_svc.deployments.resources import Resources
from runtime_svc.engine.config import EngineConfig
from runtime_svc.generation_service import GenerationService
from runtime_svc.metrics import list_metrics
from runtime_svc.runtime_service import RuntimeService
from runtime_svc.settings import Settings
from runtime_svc.status import STATUS_TABLE
from runtime_svc.text.workers import TextWorkers
from targets.registry import TARGETS

if TYPE_CHECKING:
    from runtime_svc.vllm_engine.service import VllmEngineService

#: Its health does not depend on deployments: it loads them, and tells what became of them while the server drains.
CONTROL_SERVICE: Final = "kiln.runtime.v1.RuntimeService"
SERVICES: Final = ("kiln.runtime.v1.GenerationService", CONTROL_SERVICE)
#: The API that routers speak to engines of vLLM, if the extra `vllm-engine` is installed.
ENGINE_SERVICE: Final = "vllm.grpc.engine.VllmEngine"
#: Health has a name for each deployment: this and its id; and another one with this suffix if it follows an alias.
DEPLOYMENT_PREFIX: Final = "deployment/"
FOLLOW_SUFFIX: Final = "/follow"

_log = structlog.get_logger("runtime")


class RuntimeServer:
    """The gRPC server and the deployments behind it."""

    def __init__(
        self,
        settings: Settings,
        deployments: Deployments,
        reconciler: Reconciler,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """Builds the server; call it on the running event loop.

        Raises:
            OptionsInvalid: A deployment is named for vLLM's engine API, and the extra is not installed.
        """
        engine = _make_vllm_engine(deployments, settings.engine_deployment)

        def register(server: grpc.aio.Server) -> None:
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(deployments), server)
            runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(RuntimeService(deployments), server)
            if engine is not None:
                engine.register(server)

        self.edge = EdgeServer(
            settings.edge,
            status_table=STATUS_TABLE,
            services=SERVICES if engine is None else (*SERVICES, ENGINE_SERVICE),
            register=register,
            rules=RULES if engine is None else {**RULES, **make_engine_rules(lambda _: engine.find_deployment_id())},
            always_serving=(CONTROL_SERVICE,),
            interceptors=interceptors,
            request_limit=deployments.request_limit,
        )
        self._engine = engine
        self._drain_timeout_s = settings.edge.drain_timeout_s
        self._reconciler = reconciler
        self._reloads: set[asyncio.Task[None]] = set()
        self.deployments = deployments
        deployments.on_states_changed = self._update_health
        self._update_health()

    async def start(self) -> int:
        """Begins to load recorded and declared deployments, then listens; returns the port.

        Health is NOT_SERVING for the server as a whole and for inference until they are READY.

        Raises:
            AddressUnavailable, TlsFileInvalid: See `EdgeServer.start`.
            DeploymentsFileInvalid, StateInvalid, StateUnwritable: See `Reconciler.start`.
        """
        # Before the server listens, so that no client takes their ids and cores.
        await self._reconciler.start()
        return await self.edge.start()

    async def drain(self) -> None:
        """Ends the server: health reports NOT_SERVING, and streams may finish within the drain timeout.

        Streams that still run then end with UNAVAILABLE, and every rank ends.
        """
        # What is unloaded now stays known, and NOT_SERVING.
        self.deployments.on_states_changed = lambda: None
        draining = asyncio.create_task(self.edge.drain())
        await self.deployments.shut_down(self._drain_timeout_s - 2 * FAREWELL_S)
        await draining

    async def serve_until_signalled(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains. SIGHUP reads the deployments file again."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._begin_reload)
        received = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, received.set)
        await received.wait()
        _log.info("signalled")
        await self.drain()

    def _update_health(self) -> None:
        health, deployments = self.edge.health, self.deployments.list()
        is_complete = not any(deployment.is_missing for deployment in deployments)
        for name in (OVERALL, *(service for service in SERVICES if service != CONTROL_SERVICE)):
            health.set_serving(name, is_complete)
        if self._engine is not None:
            health.set_serving(ENGINE_SERVICE, self._engine.is_ready())
        serving: dict[str, bool] = {}
        for one in deployments:
            name = f"{DEPLOYMENT_PREFIX}{one.deployment_id}"
            serving[name] = one.state is DeploymentState.READY
            if one.followed_alias:
                # A name of its own, because the old weights serve: routers must not leave them.
                serving[f"{name}{FOLLOW_SUFFIX}"] = serving[name] and one.followed.is_taken
        for name, is_serving in serving.items():
            health.set_serving(name, is_serving)
        for name in health.names:
            if name.startswith(DEPLOYMENT_PREFIX) and name not in serving:
                health.forget(name)

    def _begin_reload(self) -> None:
        begin_task(self._reconciler.reload(), self._reloads)


@asynccontextmanager
async def open_server(settings: Settings, start_ranks: StartRanks) -> AsyncIterator[RuntimeServer]:
    """Opens blob cache and state directory, and builds the server. At exit every rank ends.

    Args:
        settings: Settings of this runtime.
        start_ranks: Starts rank groups.

    Raises:
        LayoutInvalid: The cache is no OCI layout, or a directory of bundles does not exist.
        StateInUse, StateInvalid: See `RecordStore`.
        TlsFileInvalid: See `CompilerEndpoint.connect`.
        AddressUnavailable: See `serve_metrics`.
        TracingUnavailable: See `open_tracing`.
        OptionsInvalid: See `RuntimeServer`.
    """
    async with AsyncExitStack() as stack:
        records = RecordStore(settings.state)
        stack.callback(records.close)
        source = None
        if settings.compiler is not None:
            source = GrpcBundleSource(settings.compiler)
            stack.push_async_callback(source.close)
        make_private_directory(settings.cache)
        library = BundleLibrary(
            source,
            directories=[BundleDirectory(root) for root in settings.bundles],
            store_root=settings.store,
            cache=Layout.create(settings.cache / "blobs"),
            verifier=BlobVerifier(settings.cache / "verified.db", always=settings.verify_always),
        )
        engine = EngineConfig(
            queue_capacity=settings.queue_capacity,
            max_call_sequences=settings.max_call_sequences,
            stream_capacity=settings.stream_capacity,
            chunks=settings.chunks,
            async_scheduling=settings.async_scheduling,
            stall_timeouts=settings.stall_timeouts,
            session_limits=settings.session_limits,
        )
        workers = TextWorkers()
        stack.callback(workers.close)
        texts = make_forkserver()
        stack.callback(texts.close)
        captures = None
        if settings.capture_directory is not None:
            captures = CaptureDirectory(settings.capture_directory)
            stack.push_async_callback(captures.close)
        target = TARGETS[settings.target]
        cores = CorePool(settings.num_cores, in_runs=target.has_cores)
        deployments = Deployments(
            Loader(
                library,
                start_ranks,
                engine,
                workers,
                texts,
                settings.text_limits,
                DeploymentDefaults(settings.threads_per_core, settings.chunks.target_s),
                cores,
                captures,
            ),
            Resources(
                cores,
                MemoryPool(settings.memory_bytes),
                target,
                settings.logical_core_size,
                input_capture=captures is not None,
                engine=engine,
            ),
            records,
        )
        stack.push_async_callback(deployments.shut_down, 0.0)
        timeout_s = settings.edge.drain_timeout_s
        reconciler = Reconciler(deployments, records, settings.deployments_file, timeout_s=timeout_s)
        tracing = await stack.enter_async_context(open_tracing("runtime", settings.edge.trace_endpoint))
        server = RuntimeServer(settings, deployments, reconciler, tracing)
        supervisor = await stack.enter_async_context(server.edge.supervisor)
        if source is not None:
            leases = LeaseKeeper(source, f"runtime/{records.runtime_id}", deployments.bundle_digests)
            deployments.on_bundles_changed = leases.wake
            supervisor.supervise("leases", leases.run)
        supervisor.supervise("following", AliasFollower(deployments, interval_s=settings.follow_interval_s).run)
        supervisor.supervise("file watch", FileWatch(deployments).run)
        rows = [*server.edge.list_metrics(), *list_metrics(deployments)]
        server.edge.metrics_port = await stack.enter_async_context(serve_metrics(settings.edge, rows))
        yield server


def _make_vllm_engine(deployments: Deployments, deployment_id: str | None) -> VllmEngineService | None:
    """Returns the servicer of vLLM's engine API; None if its messages are not installed.

    Raises:
        OptionsInvalid: They are not, and a deployment is named for it.
    """
    if find_spec("smg_grpc_proto") is None:
        if deployment_id is not None:
            accepted = "unset without the extra `vllm-engine`, as in `pip install 'kiln-runtime[vllm-engine]'`"
            raise OptionsInvalid([FieldViolation("engine-deployment", repr(deployment_id), accepted)])
        return None
    from runtime_svc.vllm_engine.service import VllmEngineService  # noqa: PLC0415 - of the extra

    return VllmEngineService(deployments, deployment_id)
