"""Joins the parts of the compiler into a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import grpc
from google.longrunning import operations_pb2_grpc
from kiln.bundle.v1 import bundle_pb2_grpc
from kiln.compiler.v1 import compiler_pb2_grpc

from bundle.host.file_modes import make_private_directory
from bundle.host.process_lock import ProcessLock
from bundle.store.layout import Layout
from bundle.store.verification import BlobVerifier
from compiler_svc.api.access_rules import RULES
from compiler_svc.api.bundles import BundleService
from compiler_svc.api.compiler import CompilerService
from compiler_svc.api.limits import REQUEST_LIMIT
from compiler_svc.api.operations import OperationsService
from compiler_svc.api.status import CODES
from compiler_svc.builds.finished_shards import list_finished_shards
from compiler_svc.builds.job import BuildEnvironment
from compiler_svc.bundles.collection import Collection
from compiler_svc.bundles.importer import BundleImporter
from compiler_svc.bundles.store import BundleStore
from compiler_svc.compiles.build_runner import BuildRunner
from compiler_svc.compiles.cache import BundleCache
from compiler_svc.compiles.checkpoint_fetcher import CheckpointFetcher
from compiler_svc.compiles.journal import OperationJournal
from compiler_svc.compiles.queue import CompileQueue
from compiler_svc.compiles.run import CompileServices
from compiler_svc.compiles.single_flight import SharedBuilds
from compiler_svc.database.engine import Database
from compiler_svc.errors import StoreLocked
from compiler_svc.metrics import list_metrics
from compiler_svc.planning.planner import PlannerSettings
from compiler_svc.planning.pool import PlanningLimits, PlanningPool
from compiler_svc.settings import Settings
from edge.metrics import serve_metrics
from edge.server import EdgeServer
from edge.tracing import open_tracing

#: Plans with a check of graphs that run at once. Each takes what a lowering takes, beside the builds.
_MAX_GRAPH_CHECKS: Final = 1

SERVICES: Final = (
    "kiln.compiler.v1.CompilerService",
    "google.longrunning.Operations",
    "kiln.bundle.v1.BundleService",
)


@asynccontextmanager
async def open_server(
    settings: Settings, make_runner: Callable[[Path], BuildRunner], planning: PlanningPool, fetches: PlanningPool
) -> AsyncIterator[EdgeServer]:
    """Opens store and database, resumes operations that a former process left unfinished, and makes the server.
    `planning` runs what reads clients' configurations and checkpoints, `fetches` what fetches checkpoints.
    """
    with lock_store(settings.store):
        layout = Layout.create(settings.store)
        make_private_directory(settings.cache)
        database = Database(settings.database_url)
        make_private_directory(jobs := settings.store / "jobs")
        store = BundleStore(database, layout, list_kept=partial(list_finished_shards, jobs))
        importer = BundleImporter(
            store, roots=settings.import_roots, verifier=BlobVerifier(settings.store / "verified.sqlite")
        )
        journal = OperationJournal(database, settings.retention)
        fetcher = CheckpointFetcher(fetches, settings.urls, settings.fetch_timeout_s)
        services = CompileServices(
            journal=journal,
            fetcher=fetcher,
            cache=BundleCache(database, store),
            store=store,
            runner=make_runner(jobs),
            shared=SharedBuilds(),
            build_slots=asyncio.Semaphore(settings.max_builds),
            environment=BuildEnvironment(
                store=settings.store,
                database_url=settings.database_url,
                lowering_cache=settings.cache / "lowering",
                num_lowerings=settings.num_lowerings,
                lowering_timeout_s=settings.lowering_timeout_s,
                lowering_memory_bytes=settings.lowering_memory_bytes,
                checks_on_cores=settings.checks_on_cores,
            ),
        )
        planner = PlannerSettings(
            database_url=settings.database_url,
            store=settings.store,
            model_roots=settings.model_roots,
            num_lowerings=settings.num_lowerings,
            default_isa=settings.default_isa,
        )
        graph_checks = planning.with_limits(
            PlanningLimits(
                max_running=_MAX_GRAPH_CHECKS,
                max_waiting=settings.max_waiting,
                timeout_s=settings.lowering_timeout_s,
                max_memory_bytes=settings.lowering_memory_bytes,
            )
        )
        queue = CompileQueue(
            services,
            max_builds=settings.max_builds,
            max_waiting=settings.max_waiting,
            max_per_principal=settings.max_builds_per_principal,
        )

        def register(server: grpc.aio.Server) -> None:
            compiler = CompilerService(
                database=database,
                journal=journal,
                queue=queue,
                store=store,
                fetcher=fetcher,
                planning=planning,
                graph_checks=graph_checks,
                planner=planner,
                scratch=jobs,
            )
            compiler_pb2_grpc.add_CompilerServiceServicer_to_server(compiler, server)
            long_running = OperationsService(database=database, journal=journal, queue=queue)
            operations_pb2_grpc.add_OperationsServicer_to_server(long_running, server)
            bundle_pb2_grpc.add_BundleServiceServicer_to_server(BundleService(store, importer), server)

        try:
            async with open_tracing("compiler", settings.edge.trace_endpoint) as tracing:
                server = EdgeServer(
                    settings.edge,
                    services=SERVICES,
                    register=register,
                    codes=CODES,
                    rules=RULES,
                    surroundings=tracing,
                    request_limit=lambda: REQUEST_LIMIT,
                )
                rows = [*server.list_metrics(), *list_metrics(queue, services.statistics)]
                collection = Collection(store)
                await collection.warn_of_lost_bundles()
                await collection.collect()
                async with server.supervisor, serve_metrics(settings.edge, rows) as server.metrics_port:
                    server.supervisor.supervise("collection", collection.run)
                    await queue.resume()
                    yield server
        finally:
            await queue.close()
            database.close()


@contextmanager
def lock_store(store: Path) -> Iterator[None]:
    """Locks a store until the context ends; the kernel releases the lock if the process dies."""
    make_private_directory(store)
    try:
        lock = ProcessLock(store / "compiler.lock")
    except BlockingIOError as error:
        raise StoreLocked(str(store)) from error
    try:
        yield
    finally:
        lock.release()
