"""The queue of accepted compiles, which outlives the compiler process."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from bundle.errors import KilnError
from compiler_svc.compiles.run import CompileRun, CompileServices
from compiler_svc.database.names import Publisher
from compiler_svc.database.operations import Operation
from compiler_svc.database.resumption import Unfinished
from compiler_svc.errors import CompileCancelled, CompileQueueFull, CompilerRestarted
from compiler_svc.planning.job_spec import JobSpec, read_spec, write_spec
from edge.access.principal import PRINCIPAL, Principal
from edge.access.quota import PrincipalQuota
from execution.failure import Failure

RETRY_AFTER_S: Final = 15.0
#: The compiler gives an operation up after this many of its builds ended together with the compiler process.
MAX_UNFINISHED_BUILDS: Final = 3

_log = structlog.get_logger("compiler")


class CompileQueue:
    """Runs accepted compiles: a bounded number at once, while a bounded number waits.

    Accepted compiles outlive the process: when it stops, their operations stay unfinished in the journal, and the next
    process resumes them.
    """

    def __init__(self, services: CompileServices, *, max_builds: int, max_waiting: int, max_per_principal: int) -> None:
        """`max_per_principal` counts one principal's compiles, running or waiting, but none that a former process
        accepted.
        """
        self._services = services
        self._quota = PrincipalQuota("builds", max_per_principal, retry_after_s=RETRY_AFTER_S)
        self._max_waiting = max_waiting
        self._max_accepted = max_builds + max_waiting
        self._num_accepted = 0
        self._runs: dict[str, CompileRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_accepted(self) -> int:
        """Compiles that run or wait."""
        return self._num_accepted

    def check_room(self) -> None:
        """Checks that the queue would accept another compile, before the caller spends time on validating it."""
        self._quota.check(PRINCIPAL.get())
        if self._num_accepted >= self._max_accepted:
            raise CompileQueueFull(self._max_waiting, RETRY_AFTER_S)

    async def submit(self, spec: JobSpec, *, request_id: str | None, request_digest: str) -> Operation:
        """Accepts a compile and starts it; returns its operation, or the one that the request id already has."""
        self.check_room()
        principal = PRINCIPAL.get()
        self._quota.take(principal)
        self._num_accepted += 1
        try:
            operation, is_new = await self._services.journal.find_or_create(
                name=spec.name,
                request_id=request_id,
                request_digest=request_digest,
                spec=write_spec(spec),
                publisher=Publisher.of(principal),
            )
        except BaseException:
            self._forget(principal)
            raise
        if is_new:
            self._start(operation, spec, principal=principal)
        else:
            self._forget(principal)
        return operation

    async def resume(self) -> None:
        """Queues the operations that a former process left unfinished, oldest first.

        Ends an operation instead if too many of its builds ended together with the process, if a client cancelled it,
        or if this version cannot read its job spec. Call it once, before the first `submit`.
        """
        unfinished = await self._services.journal.list_unfinished()
        self._services.runner.retain({one.build_id for one in unfinished if one.build_id is not None})
        last: CompileRun | None = None
        for one in unfinished:
            try:
                spec = _restore_spec(one)
            except KilnError as error:
                await self._services.journal.finish(one.operation, Failure.of(error))
                _log.warning("operation given up", operation=one.operation.resource_name, reason=error.reason)
                continue
            await self._services.journal.resume(one.operation)
            _log.info("operation resumed", operation=one.operation.resource_name, name=one.operation.name)
            self._num_accepted += 1
            last = self._start(one.operation, spec, after=last)

    async def cancel(self, operation_id: str) -> None:
        """Starts cancelling an operation of the call's principal. Has no effect on a finished operation."""
        await self._services.journal.request_cancel(operation_id, PRINCIPAL.get().reach)
        run = self._runs.get(operation_id)
        if run is not None:
            run.cancel()

    async def close(self) -> None:
        """Stops all compiles; the next process resumes their operations."""
        for run in list(self._runs.values()):
            run.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forget(self, principal: Principal | None) -> None:
        self._num_accepted -= 1
        if principal is not None:
            self._quota.give_back(principal)

    def _start(
        self,
        operation: Operation,
        spec: JobSpec,
        *,
        after: CompileRun | None = None,
        principal: Principal | None = None,
    ) -> CompileRun:
        run = CompileRun(self._services, operation, spec)
        task = run.start(after)
        self._runs[operation.operation_id] = run
        self._tasks.add(task)

        def forget(task: asyncio.Task[None]) -> None:
            del self._runs[operation.operation_id]
            self._tasks.discard(task)
            self._forget(principal)

        task.add_done_callback(forget)
        return run


def _restore_spec(unfinished: Unfinished) -> JobSpec:
    name = unfinished.operation.resource_name
    if unfinished.is_cancelled:
        raise CompileCancelled(name)
    if unfinished.unfinished_builds >= MAX_UNFINISHED_BUILDS:
        raise CompilerRestarted(name, f"{unfinished.unfinished_builds} builds of it ended with the compiler")
    if unfinished.spec is None:
        raise CompilerRestarted(name, "an older version accepted it")
    try:
        return read_spec(unfinished.spec)
    except ValueError as error:
        raise CompilerRestarted(name, "another version accepted it, whose records this one cannot read") from error
