"""Wraps gRPC method handlers of any arity in a context manager, and tells probes from other calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Final, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from edge.errors import ClientStalled, RequestMalformed
from edge.request_limit import SMALL_BYTES, RequestLimit
from edge.request_size import check_size

Context: TypeAlias = grpc.aio.ServicerContext[object, object]
#: Makes the context manager of a call: entered before its handler runs, left when the handler has ended or failed.
Surroundings = Callable[[Context], AbstractAsyncContextManager[None]]
#: Makes a request of its bytes.
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


def is_probe(method: str) -> bool:
    """Whether a call only asks whether the server lives, or what it offers. Logs and traces leave such calls out.

    Args:
        method: As gRPC writes it, `/package.Service/Method`.
    """
    return method.startswith(_PROBES)


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

    Handlers that are not coroutine functions stay as they are; only unimplemented methods have such handlers.

    Args:
        handler: The handler that the service registered, or a wrapped one.
        surroundings: Makes the context manager of each call.
        decode_inside: Whether to decode single requests inside `surroundings` too. A malformed one then raises
            RequestMalformed; otherwise gRPC ends the call with the parser's message.
        request_limit: Returns the size of the largest request; a larger one is not decoded inside, but raises
            RequestTooLarge. None sets no limit.
        stall_timeout_s: How long a response of a stream may wait for the client to read. The handler's generator is
            closed then, and ClientStalled raised. None: as long as it takes. Has no effect on a wrapped handler.
        check: Gets each decoded single request inside `surroundings`, before the handler does; None checks nothing.
    """
    arity, make_handler = next((name, make) for name, make in _FACTORIES.items() if getattr(handler, name) is not None)
    behavior = getattr(handler, arity)
    decode: Decode | None = None
    gets_decoded = handler.request_deserializer
    if decode_inside and not handler.request_streaming and handler.request_deserializer is not None:
        decode, gets_decoded = partial(_decode, handler.request_deserializer, request_limit), None
    wrapped: Callable[[object, Context], Awaitable[object]]
    if inspect.isasyncgenfunction(behavior):
        wrapped = _wrap_generator(behavior, surroundings, decode, check, stall_timeout_s)
    elif inspect.iscoroutinefunction(behavior):
        wrapped = _wrap_coroutine(behavior, surroundings, decode, check)
    else:
        return handler
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
                is_first = True
                async for response in responses:
                    if is_first:
                        # If a response that stalls carried it, gRPC would send it again with the status, and fail.
                        await context.send_initial_metadata(())
                        is_first = False
                    try:
                        # Flow control lets it return before the client has the response, but not many of them.
                        async with asyncio.timeout(stall_timeout_s):
                            await context.write(response)
                    except TimeoutError as error:
                        assert stall_timeout_s is not None, "gRPC raises no TimeoutError"
                        raise ClientStalled(stall_timeout_s) from error

    return run


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
