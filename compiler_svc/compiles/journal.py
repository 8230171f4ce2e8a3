"""The journal of operations: records every change in the database and passes it on to watchers."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from sqlalchemy.orm import Session

from compiler_svc.database import operations, resumption
from compiler_svc.database.engine import Database
from compiler_svc.database.names import Publisher
from compiler_svc.database.operations import Operation
from compiler_svc.database.resumption import Unfinished
from compiler_svc.errors import TooManyWatchers
from compiler_svc.records import OperationResult, Progress
from execution.failure import Failure

#: Changes that wait for a slow watcher; when the queue is full, the watcher misses the oldest, never the last.
_MAX_KEPT: Final = 256
#: Calls that may watch one operation, or wait for it, at the same time.
MAX_WATCHERS: Final = 128
_RETRY_AFTER_S: Final = 5.0


class OperationFeed:
    """Passes changes of operations on to their watchers."""

    def __init__(self) -> None:
        self._watchers: defaultdict[str, set[asyncio.Queue[Operation]]] = defaultdict(set)

    def publish(self, operation: Operation) -> None:
        """Passes an operation's new state on to its watchers."""
        for queue in self._watchers.get(operation.operation_id, ()):
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(operation)

    @contextmanager
    def watch(self, operation_id: str) -> Iterator[asyncio.Queue[Operation]]:
        """Collects every later change of an operation."""
        if len(self._watchers.get(operation_id, ())) >= MAX_WATCHERS:
            raise TooManyWatchers(f"operations/{operation_id}", MAX_WATCHERS, _RETRY_AFTER_S)
        queue: asyncio.Queue[Operation] = asyncio.Queue(_MAX_KEPT)
        self._watchers[operation_id].add(queue)
        try:
            yield queue
        finally:
            self._watchers[operation_id].discard(queue)
            if not self._watchers[operation_id]:
                del self._watchers[operation_id]


_DAY_NS: Final = 86_400 * 10**9


@dataclass(frozen=True)
class Retention:
    """How long the journal keeps finished operations: the newest `keep`, unless they ended more than `days` ago."""

    keep: int
    days: float


class OperationJournal:
    """Records operations and lets callers watch them."""

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database = database
        self._retention = retention
        self._feed = OperationFeed()

    async def find_or_create(
        self, *, name: str, request_id: str | None, request_digest: str, spec: bytes, publisher: Publisher
    ) -> tuple[Operation, bool]:
        """Finds the operation of a publisher's request id, or creates one; also returns whether it is new."""

        def work(session: Session) -> tuple[Operation, bool]:
            if request_id is not None:
                existing = operations.find_by_request_id(session, request_id, request_digest, publisher.principal)
                if existing is not None:
                    return existing, False
            created = operations.create_operation(
                session,
                name=name,
                request_id=request_id,
                request_digest=request_digest,
                spec=spec,
                publisher=publisher,
            )
            return created, True

        return await self._database.run(work)

    async def list_unfinished(self) -> list[Unfinished]:
        """Lists the operations that a former process left unfinished, oldest first."""
        return await self._database.run(resumption.list_unfinished)

    async def resume(self, operation: Operation) -> None:
        """Records that an operation is queued again."""
        self.publish(await self._database.run(resumption.resume_operation, operation.operation_id))

    async def begin_build(self, operation: Operation, build_id: str) -> str | None:
        """Records that a build begins for the operation; returns the build id of the former attempt, if any."""
        return await self._database.run(resumption.begin_build, operation.operation_id, build_id)

    async def stop_build(self, operation: Operation) -> None:
        """Records that this process stops the build and a later process will resume it."""
        await self._database.run(resumption.stop_build, operation.operation_id)

    async def report(self, operation: Operation, progress: Progress) -> None:
        """Records the operation's progress."""
        self.publish(await self._database.run(operations.update_progress, operation.operation_id, progress))

    async def request_cancel(self, operation_id: str, reach: str | None) -> None:
        """Records that a client cancelled an operation."""
        await self._database.run(operations.request_cancel, operation_id, reach)

    async def finish(self, operation: Operation, outcome: OperationResult | Failure) -> None:
        """Ends an operation with its result or error."""
        self.publish(await self._database.run(self.finish_in, operation, outcome))

    def finish_in(self, session: Session, operation: Operation, outcome: OperationResult | Failure) -> Operation:
        """Ends an operation in the caller's transaction. The caller publishes the result after the commit."""
        finished = operations.finish_operation(session, operation.operation_id, outcome)
        session.flush()
        operations.forget_finished(
            session,
            keep=self._retention.keep,
            older_than_ns=time.time_ns() - round(self._retention.days * _DAY_NS),
        )
        return finished

    def publish(self, operation: Operation) -> None:
        """Passes an operation's new state on to its watchers."""
        self._feed.publish(operation)

    async def watch(self, operation_id: str, reach: str | None) -> AsyncGenerator[Operation, None]:
        """Yields an operation at once, then after every change until it is done."""
        read = partial(self._database.run, operations.get_operation, operation_id, reach)
        # Before it is watched, too: whom it does not belong to must not learn that others watch it.
        await read()
        with self._feed.watch(operation_id) as changes:
            operation = await read()
            yield operation
            while not operation.is_done:
                change = await changes.get()
                if change.is_done or change.update_time_ns > operation.update_time_ns:
                    operation = change
                    yield operation
