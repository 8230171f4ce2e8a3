"""Wraps gRPC method handlers of any arity in a context manager, and tells probes from other calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from edge.errors import ClientStalled, RequestMalformed
from edge.request_limit import SMALL_BYTES, RequestLimit
from edge.request_size import check_size

Context: TypeAlias = grpc.aio.ServicerContext[object, object]
#: Makes the context manager of a call: entered before its handler runs, left when the handler has ended or failed.
Surroundings = Callable[[Context], AbstractAsyncContextManager[None]]
#: Makes a request of its bytes, or an iterator of requests of an iterator of bytes.
Decode = Callable[[object], Awaitable[object]]

#: Refuses a call by its decoded request: raises what the call is to end with.
Check = Callable[[object, Context], None]

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
    """Whether a call only asks whether the server lives, or what it offers. Logs and traces leave such calls out.

    Args:
        method: As gRPC writes it, `/package.Service/Method`.
    """
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


class SurroundingInterceptor(grpc.aio.ServerInterceptor):
    """Runs every call of a server inside a context manager; subclasses say in which."""

    #: See `wrap_handler`.
    decodes_inside = False
    request_limit: Callable[[], RequestLimit] | None = None
    stall_timeout_s: float | None = None

    def surround(self, method: str) -> Surroundings | None:
        """Returns what makes the context managers of a method's calls; None leaves the method as it is.

        Args:
            method: As gRPC writes it, `/package.Service/Method`.
        """
        raise NotImplementedError

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[RequestT, ResponseT] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[RequestT, ResponseT] | None:
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        surroundings = self.surround(handler_call_details.method)
        if handler is None or surroundings is None:
            return handler
        return wrap_handler(
            handler,
            surroundings,
            decode_inside=self.decodes_inside,
            request_limit=self.request_limit,
            stall_timeout_s=self.stall_timeout_s,
        )


def wrap_handler(
    handler: grpc.RpcMethodHandler[RequestT, ResponseT],
    surroundings: Surroundings,
    *,
    decode_inside: bool = False,
    request_limit: Callable[[], RequestLimit] | None = None,
    stall_timeout_s: float | None = None,
    check: Check | None = None,
) -> grpc.RpcMethodHandler[RequestT, ResponseT]:
    """Returns a handler that runs each call inside `surroundings`.

    Handlers that are not coroutine functions run outside of `surroundings` and get their requests as bytes; only
    unimplemented methods have such handlers, and a malformed request must not hide that they are unimplemented.

    Args:
        handler: The handler that the service registered, or a wrapped one.
        surroundings: Makes the context manager of each call.
        decode_inside: Whether to decode requests inside `surroundings` too. A malformed one then raises
            RequestMalformed; otherwise gRPC ends the call with the parser's message.
        request_limit: Returns the size of the largest request; a larger one is not decoded inside, but raises
            RequestTooLarge. None sets no limit.
        stall_timeout_s: How long a response of a stream may wait for the client to read, unless the handler calls
            `change_stall_timeout`. The handler's generator is closed then, and ClientStalled raised. None: as long as
            it takes. Has no effect on a wrapped handler.
        check: Gets each decoded single request inside `surroundings`, before the handler does; None checks nothing.
    """
    arity, make_handler = next((name, make) for name, make in _FACTORIES.items() if getattr(handler, name) is not None)
    behavior = getattr(handler, arity)
    decode: Decode | None = None
    gets_decoded = handler.request_deserializer
    if decode_inside and handler.request_deserializer is not None:
        decode, gets_decoded = partial(_decode, handler.request_deserializer, request_limit), None
        if handler.request_streaming:
            decode = partial(_decode_stream, decode)
    wrapped: Callable[[object, Context], Awaitable[object]]
    if inspect.isasyncgenfunction(behavior):
        wrapped = _wrap_generator(behavior, surroundings, decode, check, stall_timeout_s)
    elif inspect.iscoroutinefunction(behavior):
        wrapped = _wrap_coroutine(behavior, surroundings, decode, check)
    else:
        return make_handler(behavior, None, handler.response_serializer)
    return make_handler(wrapped, gets_decoded, handler.response_serializer)


def _wrap_coroutine(
    behavior: Callable[[object, Context], Awaitable[object]],
    surroundings: Surroundings,
    decode: Decode | None,
    check: Check | None,
) -> Callable[[object, Context], Awaitable[object]]:
    async def run(request: object, context: Context) -> object:
        async with surroundings(context):
            decoded = request if decode is None else await decode(request)
            if check is not None:
                check(decoded, context)
            return await behavior(decoded, context)

    return run


def _wrap_generator(
    behavior: Callable[[object, Context], AsyncGenerator[object, None]],
    surroundings: Surroundings,
    decode: Decode | None,
    check: Check | None,
    stall_timeout_s: float | None,
) -> Callable[[object, Context], Awaitable[None]]:
    # A coroutine that writes, not a generator: gRPC leaves generators of cancelled calls to the garbage collector,
    # but a handler must give up all that it holds when its call ends.
    async def run(request: object, context: Context) -> None:
        async with surroundings(context):
            decoded = request if decode is None else await decode(request)
            if check is not None:
                check(decoded, context)
            async with aclosing(behavior(decoded, context)) as responses:
                if stall_timeout_s is None:
                    async for response in responses:
                        await context.write(response)
                else:
                    async with _StallTimer(stall_timeout_s) as timer:
                        await _write_all(responses, context, timer)

    return run


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
        """Watches nothing before it is entered."""
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
    """Changes how long a response of the running call may wait for its client to read; see `wrap_handler`.

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


async def _decode_stream(decode: Decode, requests: object) -> object:
    assert isinstance(requests, AsyncIterable)

    async def decode_each() -> AsyncGenerator[object, None]:
        async for data in requests:
            yield await decode(data)

    return decode_each()
