"""Makes blocking clients of asynchronous ones, through one event loop in a background thread.

One loop serves every blocking client of the process. A method of a blocking client wraps the asynchronous method and
has the same parameters:

    class Runtime(BlockingClient[AsyncRuntime]):
        tokenize = blocking(AsyncRuntime.tokenize)
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, cast

from kiln_client.endpoint import Timeouts, TlsOptions
from kiln_client.service_client import ServiceClient
from kiln_client.streams import AsyncStream

C = TypeVar("C", bound=ServiceClient)
P = ParamSpec("P")
R = TypeVar("R")

_WIND_DOWN_S = 5.0


class LoopThread:
    """An event loop in a daemon thread, which starts with the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine on the loop and waits for it. An interrupt of the waiting thread cancels the coroutine.

        A caller on the loop itself, such as a progress callback, would wait forever: it gets RuntimeError.
        """
        loop = self._running_loop()
        if _current_loop() is loop:
            coroutine.close()
            raise RuntimeError("a blocking Kiln client cannot be called from a callback of a blocking Kiln client")
        ended = threading.Event()

        async def run_to_end() -> R:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run_to_end(), loop)
        try:
            return future.result()
        finally:
            if future.cancel():  # the waiting thread was interrupted: let the coroutine cancel its call and go
                ended.wait(_WIND_DOWN_S)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="kiln-client", daemon=True).start()
            return self._loop


def _current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


#: The loop of every blocking client of the process.
loop_thread: Final = LoopThread()


class Stream(Iterator[R], Generic[R]):
    """The responses of one call, as an iterator.

    Closing the stream, leaving its `with` block or dropping it cancels the call. Leaving a `for` loop drops a stream
    unless the caller holds another reference to it.
    """

    def __init__(self, stream: AsyncStream[R]) -> None:
        self._stream = stream

    def __next__(self) -> R:
        try:
            return loop_thread.run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Cancels the call. Iteration ends without an error."""
        loop_thread.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlockingClient(Generic[C]):
    """Base of the blocking clients. Threads may share a client. Callers close it, or use it with `with`."""

    asynchronous: ClassVar[type[ServiceClient]]
    """Class of the asynchronous client that this one wraps."""

    def __init__(
        self,
        address: str | None = None,
        *,
        tls: TlsOptions | None = None,
        timeouts: Timeouts | None = None,
        token: str | Path | None = None,
        allow_plaintext_token: bool = False,
    ) -> None:
        """Prepares a client without sending anything. Takes the arguments of ServiceClient, and raises its errors."""
        client = self.asynchronous(
            address, tls=tls, timeouts=timeouts, token=token, allow_plaintext_token=allow_plaintext_token
        )
        self._client = cast("C", client)

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._client.address

    def close(self) -> None:
        """Closes the connection. Running calls raise ClientClosed."""
        loop_thread.run(self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def blocking(method: Callable[Concatenate[C, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """Makes the blocking variant of a coroutine method."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return loop_thread.run(method(self._client, *args, **kwargs))

    return call


def streaming(method: Callable[Concatenate[C, P], AsyncStream[R]]) -> Callable[Concatenate[Any, P], Stream[R]]:
    """Makes the blocking variant of a method that returns a stream."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]:
        async def start() -> AsyncStream[R]:  # a call belongs to the loop that starts it
            return method(self._client, *args, **kwargs)

        return Stream(loop_thread.run(start()))

    return call
