"""The run of one accepted compile: looks into the cache, waits for a slot, builds, keeps graphs, names a version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import structlog
from sqlalchemy.orm import Session

from bundle.digest import PREFIX
from bundle.errors import KilnError, ResourcesShort
from bundle.host.shortage import lasting_delays, name_shortage, outlast_shortages
from compiler_svc.builds.debug_file import has_graphs
from compiler_svc.builds.job import BuildEnvironment, BuildJob, BuildResult, CheckpointWritten, JobResult
from compiler_svc.bundles.store import BundleStore
from compiler_svc.compiles.build_runner import BuildRunner, OnProgress
from compiler_svc.compiles.cache import BundleCache, Identity
from compiler_svc.compiles.checkpoint_fetcher import CheckpointFetcher, FetchProgress
from compiler_svc.compiles.journal import OperationJournal
from compiler_svc.compiles.single_flight import SharedBuilds
from compiler_svc.compiles.statistics import CompileStatistics, StageClock
from compiler_svc.database.operations import Operation
from compiler_svc.database.versions import Version
from compiler_svc.errors import BuildFailed, CompileCancelled
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.planning.job_spec import CompileJobSpec, JobSpec, QuantizeJobSpec
from compiler_svc.records import CheckpointResult, CompileResult, Progress, Stage
from edge.supervision import report_failure
from execution.failure import Failure

_BEFORE_BUILDING: Final = frozenset({Stage.QUEUED, Stage.CACHE_CHECK})

_log = structlog.get_logger("compiler")


@dataclass(frozen=True)
class CompileServices:
    """The services that all compiles share."""

    journal: OperationJournal
    fetcher: CheckpointFetcher
    cache: BundleCache
    store: BundleStore
    runner: BuildRunner
    shared: SharedBuilds
    build_slots: asyncio.Semaphore
    environment: BuildEnvironment
    statistics: CompileStatistics = field(default_factory=CompileStatistics)


class CompileRun:
    """One compile. It ends its operation, unless the process stops: then the next process resumes the operation. The
    event `queued` is set when the compile waits for a build slot or needs none.
    """

    def __init__(self, services: CompileServices, operation: Operation, spec: JobSpec) -> None:
        self.queued = asyncio.Event()
        self._services = services
        self._operation = operation
        self._spec = spec
        self._log = _log.bind(operation=operation.resource_name, name=spec.name)
        self._task: asyncio.Task[None] | None = None
        self._build_id: str | None = None
        self._graphs_id: str | None = None
        self._newest = Progress(stage=Stage.QUEUED)
        self._clock = StageClock(services.statistics)
        self._is_building = False
        self._is_cancelled = False

    def start(self, after: CompileRun | None) -> asyncio.Task[None]:
        """Starts the compile; it queues for a build slot behind `after`."""
        self._task = asyncio.create_task(self._run(after))
        self._task.add_done_callback(report_failure)
        return self._task

    def cancel(self) -> None:
        """Cancels the compile and ends its operation."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self.stop()

    def stop(self) -> None:
        """Cancels the compile and leaves its operation unfinished, for the next process to resume."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    async def _run(self, after: CompileRun | None) -> None:
        try:
            if after is not None:
                await after.queued.wait()
            async with self._services.fetcher.keeping(self._spec):
                await self._compile()
        except asyncio.CancelledError:
            if not self._is_cancelled:
                await self._leave()
                return
            # The end may have to wait for room in the database, until `stop` cancels that, too.
            assert self._task is not None
            self._task.uncancel()
            await self._fail(CompileCancelled(self._operation.resource_name))
        except KilnError as error:
            self._log.warning("compile failed", reason=error.reason, error=str(error))
            await self._fail(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the operation has to end
            self._log.exception("compile failed", kind=type(error).__name__)
            await self._fail(name_shortage(error) or BuildFailed.by(error, "outside of the process that builds"))
        finally:
            self.queued.set()
        for build_id in (self._build_id, self._graphs_id):
            if build_id is not None:
                self._services.runner.discard(build_id)

    async def _compile(self) -> None:
        if self._spec.url:
            # Compiles that came later need not wait for a slow host.
            self.queued.set()
            self._spec = await self._services.fetcher.fetch(self._spec, self._report_fetch)
        await self._report(Progress(stage=Stage.CACHE_CHECK, message="hashing the checkpoint"))
        identity = await self._services.cache.identify(self._spec)
        if isinstance(self._spec, QuantizeJobSpec):
            await self._quantize(self._spec, identity)
            return
        if self._spec.skip_cache_lookup:
            self._build_id, cached = self._operation.operation_id, None
        else:
            self._build_id = identity.action_digest.removeprefix("sha256:")
            cached = await self._services.cache.find(identity.action_digest)
            self._services.statistics.bundles["miss" if cached is None else "hit"] += 1
        built = cached or await self._build(identity)
        if isinstance(self._spec, CompileJobSpec) and self._spec.debug:
            await self._keep_graphs(identity, built.bundle_digest)
        await outlast_shortages(partial(self._record, built, is_cached=cached is not None))

    async def _report_fetch(self, progress: FetchProgress) -> None:
        await self._report(Progress(stage=Stage.CACHE_CHECK, message=str(progress)))

    async def _quantize(self, spec: QuantizeJobSpec, identity: Identity) -> None:
        """Writes a checkpoint, and ends the operation."""
        self._build_id = identity.action_digest.removeprefix(PREFIX)
        job = self._make_job(self._build_id, identity)

        async def write(on_progress: OnProgress) -> JobResult:
            async with self._taking_slot(on_progress):
                return await self._run_counted(job, on_progress)

        written = await self._services.shared.run(identity.action_digest, write, self._report)
        assert isinstance(written, CheckpointWritten)
        result = CheckpointResult(
            model=str(spec.output),
            size_bytes=written.size_bytes,
            warnings=spec.warnings + written.warnings,
            duration_s=self._measure_s(),
        )
        await outlast_shortages(partial(self._services.journal.finish, self._operation, result))
        self._count_end("succeeded")

    def _make_job(self, build_id: str, identity: Identity, *, graphs_of: str | None = None) -> BuildJob:
        return BuildJob(
            build_id=build_id,
            spec=self._spec,
            checkpoint_digest=identity.checkpoint_digest,
            environment=self._services.environment,
            graphs_of=graphs_of,
        )

    @asynccontextmanager
    async def _taking_slot(self, on_progress: OnProgress, stage: Stage = Stage.QUEUED) -> AsyncIterator[None]:
        slots = self._services.build_slots
        if slots.locked():
            await on_progress(Progress(stage=stage, message="waiting for a free build slot"))
        async with slots:
            yield

    async def _build(self, identity: Identity) -> BuildResult:
        cache = self._services.cache
        assert self._build_id is not None
        job = self._make_job(self._build_id, identity)

        async def build(on_progress: OnProgress) -> BuildResult:
            async with self._taking_slot(on_progress):
                # An equal build may have ended since the first look into the cache.
                cached = None if self._spec.skip_cache_lookup else await cache.find(identity.action_digest)
                if cached is not None:
                    return cached
                built = await self._run_build(job, on_progress)
                await outlast_shortages(lambda: cache.remember(identity.action_digest, built))
                return built

        if self._spec.skip_cache_lookup:
            return await build(self._report)
        built = await self._services.shared.run(identity.action_digest, build, self._report)
        assert isinstance(built, BuildResult)
        return built

    async def _run_counted(self, job: BuildJob, on_progress: OnProgress) -> JobResult:
        statistics = self._services.statistics
        statistics.running_builds += 1
        try:
            await on_progress(Progress(stage=Stage.TRACE, message="starting the build"))
            return await self._run_job(job, on_progress)
        finally:
            statistics.running_builds -= 1

    async def _run_build(self, job: BuildJob, on_progress: OnProgress) -> BuildResult:
        built = await self._run_counted(job, on_progress)
        assert isinstance(built, BuildResult)
        statistics = self._services.statistics
        for executable in built.executables:
            statistics.executables["hit" if executable.cached else "miss"] += 1
        return built

    async def _run_job(self, job: BuildJob, on_progress: OnProgress) -> JobResult:
        """Runs the process of a job. However it ends, the store then holds none of its unfinished blobs."""
        try:
            # The compile that began the build may have ended, and others wait for it.
            async with self._services.fetcher.keeping(job.spec):
                return await self._services.runner.run(job, on_progress)
        finally:
            with suppress(OSError):  # the next collection sweeps, too
                await asyncio.shield(asyncio.to_thread(self._services.store.layout.sweep_unfinished))

    async def _keep_graphs(self, identity: Identity, digest: str) -> None:
        """Attaches the bundle's graphs to it unless it has them. Runs as a job of its own after the build or cache hit,
        so that requests with and without graphs share builds.
        """
        layout = self._services.store.layout
        self._graphs_id = f"graphs-{digest.removeprefix(PREFIX)}"
        job = self._make_job(self._graphs_id, identity, graphs_of=digest)

        async def keep(on_progress: OnProgress) -> JobResult:
            async with self._taking_slot(on_progress, Stage.PUBLISH):
                code_digest = digest_bundle_code()
                if not self._spec.skip_cache_lookup and await asyncio.to_thread(
                    has_graphs, layout, digest, code_digest
                ):
                    return BuildResult(bundle_digest=digest, executables=(), new_executables={})
                return await self._run_job(job, on_progress)

        async def report(progress: Progress) -> None:
            # Keeps the counts that the build has reported.
            counted = msgspec.structs.replace(self._newest, stage=Stage.PUBLISH, message=progress.message, eta_s=None)
            await self._report(counted)

        await self._services.shared.run(self._graphs_id, keep, report)

    async def _report(self, progress: Progress) -> None:
        self._newest = progress
        self._clock.enter(progress.stage)
        if not self._is_building and progress.stage not in _BEFORE_BUILDING:
            assert self._build_id is not None
            self._is_building = True
            former = await self._services.journal.begin_build(self._operation, self._build_id)
            if former is not None and former != self._build_id:
                # The checkpoint or the compiler has changed, so the former build's results are useless.
                self._services.runner.discard(former)
        try:
            await self._services.journal.report(self._operation, progress)
        except ResourcesShort as shortage:
            # The build goes on: the next report replaces this one.
            self._log.warning("progress is not recorded", error=str(shortage))
        if progress.stage is not Stage.CACHE_CHECK:
            self.queued.set()

    async def _record(self, built: BuildResult, *, is_cached: bool) -> None:
        """Names the bundle and ends the operation, in one transaction."""
        journal = self._services.journal

        def record(session: Session, version: Version) -> Operation:
            result = CompileResult(
                name=version.name,
                version=version.version,
                digest=version.digest,
                cached=is_cached or built.is_reused,
                executables=built.executables,
                warnings=self._spec.warnings + built.warnings,
                duration_s=self._measure_s(),
            )
            return journal.finish_in(session, self._operation, result)

        named = await self._services.store.name_bundle(
            self._spec.name,
            built.bundle_digest,
            record,
            source=self._spec.source,
            publisher=self._operation.publisher,
        )
        journal.publish(named)
        self._count_end("succeeded")

    def _measure_s(self) -> float:
        """Seconds since the operation was accepted."""
        return (time.time_ns() - self._operation.create_time_ns) / 1e9

    async def _leave(self) -> None:
        self._log.info("compile left to be resumed")
        if self._is_building:
            await self._services.journal.stop_build(self._operation)

    async def _fail(self, error: KilnError) -> None:
        self._count_end("cancelled" if isinstance(error, CompileCancelled) else "failed")
        # Others wait for this end, and no one else can record it.
        finish = partial(self._services.journal.finish, self._operation, Failure.of(error))
        await outlast_shortages(finish, lasting_delays())

    def _count_end(self, outcome: str) -> None:
        self._clock.enter(Stage.DONE)
        self._services.statistics.ended[outcome] += 1
