"""Knowing when the last call of a service has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import grpc

from edge.rpc_handlers import Context, RequestT, ResponseT, wrap_handler


class RunningCalls(grpc.aio.ServerInterceptor):
    """Counts the running calls of some services.

    Health watches and reflection streams are as long as their clients live, and would make every drain last until its
    timeout; a server waits for the calls counted here instead.
    """

    def __init__(self, services: Iterable[str]) -> None:
        """Takes the fully-qualified names of the services to count."""
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no call runs."""
        await self._idle.wait()

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
    async def _count_call(self, _context: Context) -> AsyncIterator[None]:
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if self._count == 0:
                self._idle.set()
