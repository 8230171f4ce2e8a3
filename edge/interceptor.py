"""The one interceptor of a server: runs each call inside surroundings, and decodes its requests there."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, contextmanager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError

from edge.errors import ClientStalled, RequestMalformed
from edge.request_limit import SMALL_BYTES, RequestLimit
from edge.request_size import check_size

Context: TypeAlias = grpc.aio.ServicerContext[object, object]
#: Refuses a call by its decoded request, or the iterator of its requests: raises what the call is to end with.
Check = Callable[[object], None]
#: What surrounds a call: entered before its request is decoded, left when its handler has ended or failed.
CallContext = AbstractAsyncContextManager[Check | None]
#: Makes the surrounding of a call.
Surround = Callable[[Context], CallContext]
#: Makes a request of its bytes, or an iterator of requests of an iterator of bytes.
_Decode = Callable[[object], Awaitable[object]]

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_FACTORIES: Final = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}

#: Orchestrators and tools make these calls every second.
_PROBES: Final = ("/grpc.health.", "/grpc.reflection.")
#: A call's deadline counts from its arrival at the server, so that its client gives up a little earlier. By how much at
#: most, in seconds, if that is not to pass for a client that changed its mind.
_ARRIVAL_MARGIN_S: Final = 0.05
#: Looks at a stream's write in the time that a client has to read.
_LOOKS: Final = 8


def is_probe(method: str) -> bool:
    """Whether a call only asks whether the server lives, or what it offers. Logs and traces leave such calls out."""
    return method.startswith(_PROBES)


@contextmanager
def noting_code(context: Context, note: Callable[[grpc.StatusCode], None]) -> Iterator[None]:
    """Tells `note` with which code the call ends that the block surrounds."""
    code = grpc.StatusCode.CANCELLED
    try:
        yield
        code = context.code() or grpc.StatusCode.OK
    except (grpc.aio.BaseError, asyncio.CancelledError):
        # The handler aborted with a code, or the client left before its answer.
        code = context.code() or grpc.StatusCode.CANCELLED
        raise
    finally:
        if code is grpc.StatusCode.CANCELLED:
            remaining_s = context.time_remaining()
            if remaining_s is not None and remaining_s <= _ARRIVAL_MARGIN_S:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
        note(code)


def describe_call(**fields: object) -> None:
    """Adds fields to the line of the call that this is called in, and to every later line of it."""
    structlog.contextvars.bind_contextvars(**fields)


class Method(NamedTuple):
    """A method of a server, named as gRPC writes it: `/package.Service/Method`."""

    name: str
    is_stream: bool


class Surrounding(Protocol):
    """What the calls of a server, or of some of its methods, run inside: a log, a count, a check of the caller."""

    def surround(self, method: Method) -> Surround | None:
        """Returns what makes the context managers of a method's calls; None leaves the method as it is."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Runs every call inside its surroundings, the first one outermost, and decodes its requests inside all of them."""

    def __init__(
        self,
        surroundings: Sequence[Surrounding],
        *,
        request_limit: Callable[[], RequestLimit] | None = None,
        stall_timeout_s: float | None = None,
        may_stall: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Takes the surroundings and what bounds requests and responses; None sets no bound.

        Args:
            request_limit: Returns the size of the largest request; a larger one is not decoded, but raises
                RequestTooLarge.
            stall_timeout_s: How long a response of a stream may wait for the client to read, unless the handler calls
                `change_stall_timeout`. The handler's generator is closed then, and ClientStalled raised.
            may_stall: Tells of which methods responses may not wait longer.
        """
        self._surroundings = surroundings
        self._request_limit = request_limit
        self._stall_timeout_s = stall_timeout_s
        self._may_stall = may_stall

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[RequestT, ResponseT] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[RequestT, ResponseT] | None:
        """Wraps the method's handler.

        Handlers that are not coroutine functions run outside of the surroundings and get their requests as bytes; only
        unimplemented methods have such handlers, and a malformed request must not hide that they are unimplemented.
        """
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = Method(handler_call_details.method, handler.response_streaming)
        arity, make_handler = next((name, make) for name, make in _FACTORIES.items() if getattr(handler, name))
        behavior = getattr(handler, arity)
        is_stream = inspect.isasyncgenfunction(behavior)
        if is_stream or inspect.iscoroutinefunction(behavior):
            made = [one.surround(method) for one in self._surroundings]
            surrounds = [one for one in made if one is not None]
            stall_timeout_s = self._stall_timeout_s if self._may_stall(method.name) else None
            answer = partial(_write_responses, behavior, stall_timeout_s) if is_stream else behavior
            behavior = partial(_run_call, surrounds, self._make_decode(handler), answer)
        return make_handler(behavior, None, handler.response_serializer)

    def _make_decode(self, handler: Any) -> _Decode:
        decode = partial(_decode, handler.request_deserializer, self._request_limit)
        return partial(_decode_stream, decode) if handler.request_streaming else decode


async def _run_call(
    surrounds: Sequence[Surround],
    decode: _Decode,
    answer: Callable[[object, Context], Awaitable[object]],
    request: object,
    context: Context,
) -> object:
    async with AsyncExitStack() as stack:
        checks = [await stack.enter_async_context(surround(context)) for surround in surrounds]
        decoded = await decode(request)
        for check in checks:
            if check is not None:
                check(decoded)
        return await answer(decoded, context)


async def _write_responses(
    behavior: Callable[[object, Context], AsyncGenerator[object, None]],
    stall_timeout_s: float | None,
    request: object,
    context: Context,
) -> None:
    """Writes what a generator yields, and closes it: a handler must give up all that it holds when its call ends.

    gRPC leaves generators of cancelled calls to the garbage collector.
    """
    async with aclosing(behavior(request, context)) as responses:
        if stall_timeout_s is None:
            async for response in responses:
                await context.write(response)
        else:
            async with _StallTimer(stall_timeout_s) as timer:
                await _write_all(responses, context, timer)


async def _write_all(responses: AsyncGenerator[object, None], context: Context, timer: _StallTimer) -> None:
    is_first = True
    async for response in responses:
        if is_first:
            # If a response that stalls carried it, gRPC would send it again with the status, and fail.
            await context.send_initial_metadata(())
            is_first = False
        timer.num_looks = 0
        # Flow control lets it return before the client has the response, but not many of them.
        await context.write(response)
        timer.num_looks = None


class _StallTimer:
    """Ends the block that it surrounds with ClientStalled if a write in it takes too long.

    There is one timer for all writes. It is not moved by each of them, which would take several microseconds of every
    token; it looks several times in a timeout at the write that is under way. Time in which the server itself did not
    run counts as one look, however long it was: the client could not be served then.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        #: How many looks have seen the write that is under way; None between writes. The writer sets it itself: two
        #: calls for every token would only cost time.
        self.num_looks: int | None = None
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._look_handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        _STALL_TIMER.set(self)
        self._plan_look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._look_handle is not None:
            self._look_handle.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            raise ClientStalled(self._timeout_s) from timeout

    def change(self, timeout_s: float) -> None:
        """Sets another timeout, for the write that is under way too."""
        self._timeout_s = timeout_s
        if self._look_handle is not None:
            self._look_handle.cancel()
        self._plan_look()

    def _plan_look(self) -> None:
        self._look_handle = self._loop.call_later(self._timeout_s / _LOOKS, self._look)

    def _look(self) -> None:
        if self.num_looks is not None:
            self.num_looks += 1
            # The first look comes at any time after the write has begun.
            if self.num_looks > _LOOKS:
                self._timeout.reschedule(self._loop.time())
                return
        self._plan_look()


_STALL_TIMER: ContextVar[_StallTimer | None] = ContextVar("stall timer of the running call", default=None)


def change_stall_timeout(timeout_s: float) -> None:
    """Changes how long a response of the running call may wait for its client to read; see `CallInterceptor`.

    Has no effect in calls that are no streams, and on servers without a timeout.
    """
    timer = _STALL_TIMER.get()
    if timer is not None:
        timer.change(timeout_s)


async def _decode(
    deserialize: Callable[[bytes], object], request_limit: Callable[[], RequestLimit] | None, data: object
) -> object:
    assert isinstance(data, bytes)
    try:
        # The stubs' deserializers are class methods of their messages.
        if request_limit is not None and len(data) > SMALL_BYTES:
            await check_size(data, deserialize.__self__.DESCRIPTOR, request_limit())  # type: ignore[attr-defined]
        return deserialize(data)
    except DecodeError as error:
        raise RequestMalformed from error


async def _decode_stream(decode: _Decode, requests: object) -> object:
    assert isinstance(requests, AsyncIterable)

    async def decode_each() -> AsyncGenerator[object, None]:
        async for data in requests:
            yield await decode(data)

    return decode_each()
