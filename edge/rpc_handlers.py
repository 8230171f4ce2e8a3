"""Wrapping gRPC method handlers: something of ours around every call, whatever its arity."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TypeAlias, TypeVar

import grpc

Context: TypeAlias = grpc.aio.ServicerContext[object, object]
#: Entered before a call's handler runs, left when it has ended or failed.
Surroundings = Callable[[Context], AbstractAsyncContextManager[None]]

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_FACTORIES = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def wrap_handler(
    handler: grpc.RpcMethodHandler[RequestT, ResponseT], surroundings: Surroundings
) -> grpc.RpcMethodHandler[RequestT, ResponseT]:
    """Returns a handler that runs each call inside `surroundings`.

    Handlers that are no coroutine functions, which only unimplemented methods are, stay as they are.
    """
    arity, factory = next((name, make) for name, make in _FACTORIES.items() if getattr(handler, name) is not None)
    behavior = getattr(handler, arity)
    wrapped: Callable[[object, Context], Awaitable[object]]
    if inspect.isasyncgenfunction(behavior):
        wrapped = _wrap_generator(behavior, surroundings)
    elif inspect.iscoroutinefunction(behavior):
        wrapped = _wrap_coroutine(behavior, surroundings)
    else:
        return handler
    return factory(wrapped, handler.request_deserializer, handler.response_serializer)


def _wrap_coroutine(
    behavior: Callable[[object, Context], Awaitable[object]], surroundings: Surroundings
) -> Callable[[object, Context], Awaitable[object]]:
    async def run(request: object, context: Context) -> object:
        async with surroundings(context):
            return await behavior(request, context)

    return run


def _wrap_generator(
    behavior: Callable[[object, Context], AsyncGenerator[object, None]], surroundings: Surroundings
) -> Callable[[object, Context], Awaitable[None]]:
    # A coroutine that writes, not a generator: gRPC leaves the generators of cancelled calls to the garbage collector,
    # but what a handler holds must be free when its call ends.
    async def run(request: object, context: Context) -> None:
        async with surroundings(context), aclosing(behavior(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return run
