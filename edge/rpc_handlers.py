"""Wraps gRPC method handlers of any arity in a context manager, and tells probes from other calls."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Final, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from edge.errors import RequestMalformed

Context: TypeAlias = grpc.aio.ServicerContext[object, object]
#: Makes the context manager of a call: entered before its handler runs, left when the handler has ended or failed.
Surroundings = Callable[[Context], AbstractAsyncContextManager[None]]

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
        return wrap_handler(handler, surroundings, decode_inside=self.decodes_inside)


def wrap_handler(
    handler: grpc.RpcMethodHandler[RequestT, ResponseT], surroundings: Surroundings, *, decode_inside: bool = False
) -> grpc.RpcMethodHandler[RequestT, ResponseT]:
    """Returns a handler that runs each call inside `surroundings`.

    Handlers that are not coroutine functions stay as they are; only unimplemented methods have such handlers.

    Args:
        handler: The handler that the service registered, or a wrapped one.
        surroundings: Makes the context manager of each call.
        decode_inside: Whether to decode single requests inside `surroundings` too. A malformed one then raises
            RequestMalformed; otherwise gRPC ends the call with the parser's message.
    """
    arity, make_handler = next((name, make) for name, make in _FACTORIES.items() if getattr(handler, name) is not None)
    behavior = getattr(handler, arity)
    decode, gets_decoded = _keep, handler.request_deserializer
    if decode_inside and not handler.request_streaming and handler.request_deserializer is not None:
        decode, gets_decoded = partial(_decode, handler.request_deserializer), None
    wrapped: Callable[[object, Context], Awaitable[object]]
    if inspect.isasyncgenfunction(behavior):
        wrapped = _wrap_generator(behavior, surroundings, decode)
    elif inspect.iscoroutinefunction(behavior):
        wrapped = _wrap_coroutine(behavior, surroundings, decode)
    else:
        return handler
    return make_handler(wrapped, gets_decoded, handler.response_serializer)


def _wrap_coroutine(
    behavior: Callable[[object, Context], Awaitable[object]],
    surroundings: Surroundings,
    decode: Callable[[object], object],
) -> Callable[[object, Context], Awaitable[object]]:
    async def run(request: object, context: Context) -> object:
        async with surroundings(context):
            return await behavior(decode(request), context)

    return run


def _wrap_generator(
    behavior: Callable[[object, Context], AsyncGenerator[object, None]],
    surroundings: Surroundings,
    decode: Callable[[object], object],
) -> Callable[[object, Context], Awaitable[None]]:
    # A coroutine that writes, not a generator: gRPC leaves generators of cancelled calls to the garbage collector,
    # but a handler must give up all that it holds when its call ends.
    async def run(request: object, context: Context) -> None:
        async with surroundings(context), aclosing(behavior(decode(request), context)) as responses:
            async for response in responses:
                await context.write(response)

    return run


def _keep(request: object) -> object:
    return request


def _decode(deserialize: Callable[[bytes], object], data: object) -> object:
    assert isinstance(data, bytes)
    try:
        return deserialize(data)
    except DecodeError as error:
        raise RequestMalformed from error
