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
from bundle.host.file_modes import make_private_directory
from bundle.store.layout import Layout
from bundle.store.verification import BlobVerifier
from edge.errors import OptionsInvalid
from edge.health import OVERALL
from edge.interceptor import Surrounding
from edge.metrics import serve_metrics
from edge.server import EdgeServer
from edge.supervision import begin_task
from edge.tracing import open_tracing
from execution.forkserver.client import ForkserverClient
from execution.visible_cores import list_visible
from runtime_svc.api.access_rules import RULES, make_engine_rules
from runtime_svc.api.generation import GenerationService
from runtime_svc.api.runtime import RuntimeService
from runtime_svc.bundles.directory import BundleDirectory
from runtime_svc.bundles.grpc_source import GrpcBundleSource
from runtime_svc.bundles.leases import LeaseKeeper
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.captures.directory import CaptureDirectory
from runtime_svc.deployments.cores import CorePool
from runtime_svc.deployments.deployment import DeploymentState
from runtime_svc.deployments.deployment_spec import DeploymentDefaults
from runtime_svc.deployments.follower import AliasFollower
from runtime_svc.deployments.launcher import FileWatch, StartRanks
from runtime_svc.deployments.loader import Loader
from runtime_svc.deployments.memory import MemoryPool
from runtime_svc.deployments.reconciler import Reconciler
from runtime_svc.deployments.records import RecordStore
from runtime_svc.deployments.registry import FAREWELL_S, Deployments
from runtime_svc.deployments.resources import Resources
from runtime_svc.metrics import list_metrics
from runtime_svc.settings import Settings
from runtime_svc.text.text_queue import TextWorkers
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
        surroundings: Sequence[Surrounding] = (),
    ) -> None:
        engine = _make_vllm_engine(deployments, settings)
        sides = () if engine is None else [engine.with_adapter(name) for name, _ in settings.engine_adapters]

        def register(server: grpc.aio.Server) -> None:
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(deployments), server)
            runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(RuntimeService(deployments), server)
            if engine is not None:
                engine.register(server)

        self.edge = EdgeServer(
            settings.edge,
            services=SERVICES if engine is None else (*SERVICES, ENGINE_SERVICE),
            register=register,
            rules=RULES if engine is None else {**RULES, **make_engine_rules(lambda _: engine.find_deployment_id())},
            always_serving=(CONTROL_SERVICE,),
            surroundings=surroundings,
            request_limit=deployments.request_limit,
            side_registers=[side.register for side in sides],
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
async def open_server(
    settings: Settings, start_ranks: StartRanks, texts: ForkserverClient
) -> AsyncIterator[RuntimeServer]:
    """Opens blob cache and state directory, and builds the server, whose text processes `texts` forks.

    At exit every rank and every text process ends.
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
        workers = TextWorkers()
        stack.callback(workers.close)
        captures = None
        if settings.capture_directory is not None:
            captures = CaptureDirectory(settings.capture_directory)
            stack.push_async_callback(captures.close)
        target = TARGETS[settings.target]
        host_cores = list_visible(target.lowerings[0].format)
        cores = CorePool(settings.num_cores, in_runs=target.has_cores, host_cores=host_cores)
        deployments = Deployments(
            Loader(
                library,
                start_ranks,
                settings.engine,
                workers,
                texts,
                settings.text_limits,
                DeploymentDefaults(settings.threads_per_core, settings.target_inter_token_latency_s),
                cores,
                captures,
            ),
            Resources(
                cores,
                MemoryPool(settings.memory_bytes),
                target,
                settings.logical_core_size,
                input_capture=captures is not None,
                engine=settings.engine,
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
        supervisor.supervise("file watch", FileWatch(deployments.list).run)
        rows = [*server.edge.list_metrics(), *list_metrics(deployments)]
        server.edge.metrics_port = await stack.enter_async_context(serve_metrics(settings.edge, rows))
        yield server


def _make_vllm_engine(deployments: Deployments, settings: Settings) -> VllmEngineService | None:
    """Returns the servicer of vLLM's engine API; None if its messages are not installed."""
    if find_spec("smg_grpc_proto") is None:
        given = {
            "engine-deployment": settings.engine_deployment,
            "engine-adapter": ", ".join("=".join(one) for one in settings.engine_adapters),
        }
        accepted = "unset without the extra `vllm-engine`, as in `pip install 'kiln-runtime[vllm-engine]'`"
        violations = [FieldViolation(name, repr(value), accepted) for name, value in given.items() if value]
        if violations:
            raise OptionsInvalid(violations)
        return None
    from runtime_svc.vllm_engine.service import VllmEngineService  # noqa: PLC0415 - of the extra

    return VllmEngineService(deployments, settings.engine_deployment)
