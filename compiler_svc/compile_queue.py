"""Accepted compiles on their way: cache check, turn, build, version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Final

import structlog
from sqlalchemy.orm import Session

from bundle.errors import KilnError
from compiler_svc.builds.job import BuildEnvironment, BuildJob, BuildResult
from compiler_svc.builds.runner import BuildRunner, OnProgress
from compiler_svc.builds.shared import SharedBuilds
from compiler_svc.builds.turns import BuildTurns
from compiler_svc.bundle_cache import BundleCache, Identity
from compiler_svc.bundle_store import BundleStore
from compiler_svc.database import cache, operations
from compiler_svc.database.engine import Database
from compiler_svc.database.operations import Operation
from compiler_svc.database.versions import Version
from compiler_svc.errors import BuildFailed, CompileCancelled, CompileQueueFull, CompilerRestarted
from compiler_svc.operation_feed import OperationFeed
from compiler_svc.records import CompileResult, Progress, Stage
from compiler_svc.spec import CompileSpec
from execution.failure import Failure

RETRY_AFTER_S: Final = 15.0

_log = structlog.get_logger("compiler")


class CompileQueue:
    """Compiles that were accepted: a bounded number is built at once, a bounded number waits."""

    def __init__(
        self,
        *,
        database: Database,
        store: BundleStore,
        runner: BuildRunner,
        environment: BuildEnvironment,
        max_builds: int,
        max_waiting: int,
    ) -> None:
        """Joins the parts.

        Args:
            max_builds: Builds that run at once.
            max_waiting: Compiles that may wait for a turn beside them.
        """
        self._database = database
        self._store = store
        self._runner = runner
        self._environment = environment
        self._cache = BundleCache(database, store)
        self._shared = SharedBuilds()
        self._feed = OperationFeed()
        self._turns = BuildTurns(store.layout, max_builds)
        self._max_waiting = max_waiting
        self._max_accepted = max_builds + max_waiting
        self._num_accepted = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_closing = False

    async def submit(self, spec: CompileSpec, *, request_id: str | None, request_digest: str) -> Operation:
        """Accepts a compile and starts it.

        Returns:
            Its operation; or the one that the request id has already.

        Raises:
            RequestIdReused: The request id has the operation of another request.
            CompileQueueFull: Too many wait.
        """
        if self._num_accepted >= self._max_accepted:
            raise CompileQueueFull(self._max_waiting, RETRY_AFTER_S)
        self._num_accepted += 1
        try:
            create = partial(_find_or_create, name=spec.name, request_id=request_id, request_digest=request_digest)
            operation, is_new = await self._database.run(create)
        except BaseException:
            self._num_accepted -= 1
            raise
        if is_new:
            task = asyncio.create_task(self._run(operation, spec))
            self._tasks[operation.operation_id] = task
            task.add_done_callback(lambda _: self._forget(operation.operation_id))
        else:
            self._num_accepted -= 1
        return operation

    async def cancel(self, operation_id: str) -> None:
        """Starts cancelling an operation; one that is done stays as it is.

        Raises:
            OperationNotFound: There is none of that id.
        """
        await self._database.run(partial(operations.get_operation, operation_id=operation_id))
        task = self._tasks.get(operation_id)
        if task is not None and not task.cancelling():
            task.cancel()

    async def watch(self, operation_id: str) -> AsyncGenerator[Operation, None]:
        """Yields an operation as it is, then after every change until it is done.

        Raises:
            OperationNotFound: There is none of that id.
        """
        with self._feed.watch(operation_id) as changes:
            operation = await self._database.run(partial(operations.get_operation, operation_id=operation_id))
            yield operation
            while not operation.is_done:
                change = await changes.get()
                if change.is_done or change.update_time_ns > operation.update_time_ns:
                    operation = change
                    yield operation

    async def close(self) -> None:
        """Ends all compiles; their operations say that the compiler restarted."""
        self._is_closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, operation_id: str) -> None:
        del self._tasks[operation_id]
        self._num_accepted -= 1

    async def _run(self, operation: Operation, spec: CompileSpec) -> None:
        log = _log.bind(operation=operation.resource_name, name=spec.name)
        try:
            await self._compile(operation, spec)
        except asyncio.CancelledError:
            reason = CompilerRestarted if self._is_closing else CompileCancelled
            await self._fail(operation, reason(operation.resource_name))
        except KilnError as error:
            log.warning("compile failed", reason=error.reason, error=str(error))
            await self._fail(operation, error)
        except Exception:
            log.exception("compile failed")
            await self._fail(operation, BuildFailed("an internal error, which the compiler's log describes"))

    async def _compile(self, operation: Operation, spec: CompileSpec) -> None:
        async def report(progress: Progress) -> None:
            update = partial(operations.update_progress, operation_id=operation.operation_id, progress=progress)
            self._feed.publish(await self._database.run(update))

        await report(Progress(stage=Stage.CACHE_CHECK, message="hashing the checkpoint"))
        identity = await self._cache.identify(spec)
        if spec.skip_cache_lookup:
            cached = None
        else:
            cached = await self._cache.find(identity.action_digest)
        built = cached or await self._build(spec, identity, report)
        await self._record(operation, spec, identity, built, is_cached=cached is not None)

    async def _build(self, spec: CompileSpec, identity: Identity, report: OnProgress) -> BuildResult:
        async def build(on_progress: OnProgress) -> BuildResult:
            if self._turns.are_taken:
                await on_progress(Progress(stage=Stage.QUEUED, message="waiting for a free build slot"))
            async with self._turns.take():
                job = BuildJob(spec=spec, checkpoint_digest=identity.checkpoint_digest, environment=self._environment)
                return await self._runner.run(job, on_progress)

        if spec.skip_cache_lookup:
            return await build(report)
        return await self._shared.run(identity.action_digest, build, report)

    async def _record(
        self, operation: Operation, spec: CompileSpec, identity: Identity, built: BuildResult, *, is_cached: bool
    ) -> None:
        """Names the bundle, fills the cache and ends the operation, in one transaction."""

        def record(session: Session, version: Version) -> Operation:
            cache.remember_executables(session, built.new_executables)
            cache.remember_bundle(session, identity.action_digest, built.bundle_digest)
            result = CompileResult(
                name=version.name,
                version=version.version,
                digest=version.digest,
                cached=is_cached or all(executable.cached for executable in built.executables),
                executables=built.executables,
                warnings=spec.warnings,
                duration_s=(time.time_ns() - operation.create_time_ns) / 1e9,
            )
            return operations.finish_operation(session, operation.operation_id, result)

        self._feed.publish(await self._store.name_bundle(spec.name, built.bundle_digest, record))

    async def _fail(self, operation: Operation, error: KilnError) -> None:
        finish = partial(operations.finish_operation, operation_id=operation.operation_id, outcome=Failure.of(error))
        self._feed.publish(await self._database.run(finish))


def _find_or_create(
    session: Session, *, name: str, request_id: str | None, request_digest: str
) -> tuple[Operation, bool]:
    if request_id is not None:
        existing = operations.find_by_request_id(session, request_id, request_digest)
        if existing is not None:
            return existing, False
    created = operations.create_operation(session, name=name, request_id=request_id, request_digest=request_digest)
    return created, True
