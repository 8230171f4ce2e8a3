"""A real gRPC server that has every method of Kiln's API and answers from a script.

It stands for the network peer: what a test asserts about the client crosses a socket.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import grpc
from google.longrunning import operations_pb2  # noqa: F401 - puts the service into the descriptor pool
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2  # noqa: F401
from kiln.compiler.v1 import compiler_pb2  # noqa: F401
from kiln.runtime.v1 import generation_pb2, runtime_pb2  # noqa: F401

from tests.hang_guard import HANG_S

HANG: Final = "hang"
"""A step that waits until the client goes."""


def refusal(
    code: str,
    reason: str,
    message: str = "no",
    *,
    fields: Sequence[tuple[str, str]] = (),
    retry_after_s: float | None = None,
    **metadata: str,
) -> status_pb2.Status:
    """A status as Kiln's servers send it."""
    status = status_pb2.Status(code=code_pb2.Code.Value(code), message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain="kiln", reason=reason, metadata=metadata))
    if fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=field, description=description, reason=reason)
            for field, description in fields
        ]
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=violations))
    if retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(int(retry_after_s * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


class ScriptedServer(grpc.GenericRpcHandler):
    """Answers each call with the next answer of its method; the last answer is given again and again.

    An answer is a message, a status to fail with, or HANG; for a streaming method it is a list of these.

    Attributes:
        address: `host:port`.
        requests: Requests by method name, in order.
        metadata: Metadata of each call, by method name, in order.
        time_limits_s: Time that the client left for each call, by method name; None without a deadline.
        cancelled: Set once a call of the method was cancelled by its client, by method name.
    """

    def __init__(self, credentials: grpc.ServerCredentials | None = None, address: str = "127.0.0.1:0") -> None:
        self._bind_address = address
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.metadata: dict[str, list[dict[str, str]]] = defaultdict(list)
        self.time_limits_s: dict[str, list[float | None]] = defaultdict(list)
        self.cancelled: dict[str, threading.Event] = defaultdict(threading.Event)
        self._answers: dict[str, list[Any]] = {}
        self._credentials = credentials
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server, self.address = self._run(self._start())

    def script(self, method: str, *answers: Any) -> None:
        """Sets the answers of a method."""
        self._answers[method] = list(answers)

    def stop(self) -> None:
        """Ends the server. Calling it again is harmless."""
        if self._loop.is_closed():
            return
        self._run(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HANG_S)

    async def _start(self) -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([self])
        if self._credentials is None:
            port = server.add_insecure_port(self._bind_address)
        else:
            port = server.add_secure_port(self._bind_address, self._credentials)
        await server.start()
        return server, f"127.0.0.1:{port}"

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        service, _, name = handler_call_details.method.lstrip("/").rpartition("/")
        method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
        codec = {
            "request_deserializer": message_factory.GetMessageClass(method.input_type).FromString,
            "response_serializer": lambda message: message.SerializeToString(),
        }
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(name), **codec)
        return grpc.unary_unary_rpc_method_handler(self._unary(name), **codec)

    def _unary(self, name: str) -> Callable[..., Any]:
        async def call(request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
            return await self._step(name, self._next(name, request, context), context)

        return call

    def _streaming(self, name: str) -> Callable[..., Any]:
        async def call(request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Message]:
            answer = self._next(name, request, context)
            try:
                for step in answer if isinstance(answer, list) else [answer]:
                    yield await self._step(name, step, context)
            except GeneratorExit:
                # The client went while a message was being sent, before the next step.
                self.cancelled[name].set()
                raise

        return call

    def _next(self, name: str, request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        self.requests[name].append(request)
        self.metadata[name].append({key: str(value) for key, value in context.invocation_metadata() or ()})
        self.time_limits_s[name].append(context.time_remaining())
        answers = self._answers.get(name) or [refusal("UNIMPLEMENTED", "NOT_SCRIPTED", f"{name} has no script")]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def _step(self, name: str, step: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
        if isinstance(step, status_pb2.Status):
            await context.abort_with_status(rpc_status.to_status(step))
        if step is HANG:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancelled[name].set()
                raise
        assert isinstance(step, Message)
        return step
