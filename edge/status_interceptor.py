"""Handlers raise named errors; here they become statuses with details."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import structlog
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from edge.rpc_handlers import Context, RequestT, ResponseT, wrap_handler
from edge.status import EDGE_STATUSES, StatusTable, is_mapped, status_from_error

_log = structlog.get_logger("edge")


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose handler raised with the error's status.

    An error that the table does not have becomes INTERNAL; it is logged with its traceback, and the client gets the
    request id instead. Cancellation and deadlines are no errors, and pass.
    """

    def __init__(self, table: StatusTable) -> None:
        """Takes the service's error classes and their codes."""
        self._table = {**EDGE_STATUSES, **table}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[RequestT, ResponseT] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[RequestT, ResponseT] | None:
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        return None if handler is None else wrap_handler(handler, self._render_errors, decode_inside=True)

    @asynccontextmanager
    async def _render_errors(self, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.BaseError:
            # gRPC's own: the call has been aborted, or its client is gone.
            raise
        except Exception as error:  # noqa: BLE001 - the last line before the wire
            if not is_mapped(error, self._table):
                _log.exception("unmapped error")
            status = status_from_error(error, self._table)
            request_id = structlog.contextvars.get_contextvars().get("request_id")
            if request_id is not None:
                status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
            await context.abort_with_status(rpc_status.to_status(status))
