"""Server streams that end when no caller reads them any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from kiln_client.errors import ClientClosed, KilnError

R = TypeVar("R")


def is_caller_cancelled() -> bool:
    """Whether a CancelledError is meant for the running task.

    gRPC raises the same error if an abort, or closing the channel, cancelled the call that the task reads.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class AsyncStream(AsyncIterator[R], Generic[R]):
    """The responses of one call, as an asynchronous iterator.

    The call starts when the stream is made. Aborting or closing the stream, leaving its `async with` block or dropping
    it cancels the call. Leaving an `async for` loop drops a stream unless the caller holds another reference to it.
    """

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[Any, R],
        loop: asyncio.AbstractEventLoop,
        explain: Callable[[grpc.aio.AioRpcError], Awaitable[KilnError]],
    ) -> None:
        self._loop = loop
        self._call = call
        self._responses = aiter(call)
        self._explain = explain
        self._aborted = False

    async def __anext__(self) -> R:
        if self._aborted:
            raise StopAsyncIteration
        try:
            return await anext(self._responses)
        except grpc.aio.AioRpcError as error:
            raise await self._explain(error) from None
        except asyncio.CancelledError:
            if is_caller_cancelled():
                # gRPC cancels the call of a cancelled reader too, unless the request has been sent at this very moment.
                self._call.cancel()
                raise
            if self._aborted:
                raise StopAsyncIteration from None
            raise ClientClosed from None

    def abort(self) -> None:
        """Cancels the call. Iteration ends without an error."""
        self._aborted = True
        self._call.cancel()

    async def aclose(self) -> None:
        """Cancels the call, for `contextlib.aclosing`."""
        self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        # gRPC's own iterator and call refer to each other, so its finalizer waits for the cycle collector, which may
        # run in any thread; a dropped stream must free its slot now.
        if not self._call.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the connection
                self._loop.call_soon_threadsafe(self._call.cancel)
