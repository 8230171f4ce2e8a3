"""Ending a server: no new calls, and knowing when the last one has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

import grpc

from edge.errors import ShuttingDown
from edge.rpc_handlers import Context, RequestT, ResponseT, wrap_handler


class RunningCalls(grpc.aio.ServerInterceptor):
    """Counts the running calls of some services, and can refuse new ones.

    Others, health above all, are answered to the end. They do not count, because health watches and reflection streams
    last as long as their clients.
    """

    def __init__(self, services: Iterable[str]) -> None:
        """Takes the fully-qualified names of the services to count."""
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._count = 0
        self._refusing = False
        self._idle = asyncio.Event()
        self._idle.set()

    def refuse_new(self) -> None:
        """Ends every call that comes from now on with ShuttingDown."""
        self._refusing = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no call runs, or until the timeout; tells which."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._count == 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[RequestT, ResponseT] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[RequestT, ResponseT] | None:
        """Wraps the method's handler, where it is of a counted service."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefixes):
            return handler
        return wrap_handler(handler, self._count_call)

    @asynccontextmanager
    async def _count_call(self, context: Context) -> AsyncIterator[None]:
        self._count += 1
        self._idle.clear()
        # Not when the handler returns: its last answer and the status are sent after that.
        context.add_done_callback(self._forget_call)  # type: ignore[arg-type] # the stubs want a class of theirs
        if self._refusing:
            raise ShuttingDown
        yield

    def _forget_call(self, _context: Context) -> None:
        self._count -= 1
        if self._count == 0:
            self._idle.set()
