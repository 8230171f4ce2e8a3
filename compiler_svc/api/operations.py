"""`google.longrunning.Operations`: validate, call, convert."""

# ruff: noqa: N802, ARG002 - names and arguments of the methods are gRPC's
from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import Any, Final

from google.longrunning import operations_pb2 as pb
from google.longrunning import operations_pb2_grpc
from google.protobuf.empty_pb2 import Empty

from compiler_svc.api.compiler_wire import operation_to_pb
from compiler_svc.api.paging import choose_page_size, read_page_token, write_page_token
from compiler_svc.compiles.journal import OperationJournal
from compiler_svc.compiles.queue import CompileQueue
from compiler_svc.database import operations
from compiler_svc.database.engine import Database
from compiler_svc.database.operations import Operation, parse_resource_name
from compiler_svc.errors import FilterInvalid, OperationNotFound
from edge.access.principal import PRINCIPAL

_FILTERS: Final = {"": None, "done=true": True, "done=false": False}
# Time that the answer needs to arrive before the client's deadline.
_ANSWER_TIME_S: Final = 0.2


class OperationsService(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    """Serves compile operations: a principal's own, and with the scope admin everyone's."""

    def __init__(self, *, database: Database, journal: OperationJournal, queue: CompileQueue) -> None:
        self._database = database
        self._journal = journal
        self._queue = queue

    async def GetOperation(self, request: pb.GetOperationRequest, context: Any) -> pb.Operation:
        """Reads an operation."""
        return operation_to_pb(await self._get(request.name))

    async def ListOperations(self, request: pb.ListOperationsRequest, context: Any) -> pb.ListOperationsResponse:
        """Lists operations, newest first."""
        if request.name not in {"", "operations"}:
            raise OperationNotFound(request.name)
        if request.filter not in _FILTERS:
            raise FilterInvalid(request.filter)
        page = await self._database.run(
            operations.list_operations,
            done=_FILTERS[request.filter],
            page_size=choose_page_size(request.page_size),
            after=read_page_token(request.page_token, tuple[int, str]),
            reach=PRINCIPAL.get().reach,
        )
        return pb.ListOperationsResponse(
            operations=map(operation_to_pb, page.operations), next_page_token=write_page_token(page.next_key)
        )

    async def CancelOperation(self, request: pb.CancelOperationRequest, context: Any) -> Empty:
        """Starts cancelling an operation."""
        await self._queue.cancel(parse_resource_name(request.name))
        return Empty()

    async def DeleteOperation(self, request: pb.DeleteOperationRequest, context: Any) -> Empty:
        """Forgets a finished operation."""
        operation_id = parse_resource_name(request.name)
        await self._database.run(operations.delete_operation, operation_id)
        return Empty()

    async def WaitOperation(self, request: pb.WaitOperationRequest, context: Any) -> pb.Operation:
        """Waits until an operation is done, or until the request's timeout or the call's deadline is near."""
        limits = [request.timeout.seconds + request.timeout.nanos / 1e9] if request.HasField("timeout") else []
        remaining_s = context.time_remaining()
        limits += [] if remaining_s is None else [remaining_s - _ANSWER_TIME_S]
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(limits)) if limits else None):
                await self._wait(parse_resource_name(request.name))
        return operation_to_pb(await self._get(request.name))

    async def _get(self, name: str) -> Operation:
        return await self._database.run(operations.get_operation, parse_resource_name(name), PRINCIPAL.get().reach)

    async def _wait(self, operation_id: str) -> None:
        async with aclosing(self._journal.watch(operation_id, PRINCIPAL.get().reach)) as changes:
            async for _ in changes:
                pass
