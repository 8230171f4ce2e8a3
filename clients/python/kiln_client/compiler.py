"""The asynchronous client of kiln.compiler.v1.CompilerService and its operations."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, Unpack

from google.longrunning import operations_pb2 as operations
from google.longrunning.operations_pb2_grpc import OperationsStub
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.compiler.v1.compiler_pb2_grpc import CompilerServiceStub

from kiln_client.compile_requests import QuantizeOptions, quantize_request
from kiln_client.errors import KilnError, StreamIncomplete, Unavailable, error_from_status
from kiln_client.service_client import ServiceClient
from kiln_client.streams import AsyncStream

if TYPE_CHECKING:
    from kiln.compiler.v1.compiler_pb2_grpc import CompilerServiceAsyncStub

OnStart: TypeAlias = Callable[[str], None]
OnProgress: TypeAlias = Callable[[pb.CompileMetadata], None]
OnLost: TypeAlias = Callable[[Unavailable], None]


_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 5.0


class AsyncCompiler(ServiceClient):
    """Compiles bundles and manages operations. Every method raises KilnError."""

    address_variable = "KILN_COMPILER"

    @cached_property
    def _stub(self) -> CompilerServiceAsyncStub:
        return CompilerServiceStub(self._channel)

    @cached_property
    def _operations(self) -> OperationsStub:
        return OperationsStub(self._channel)

    async def start_compile(self, request: pb.CompileRequest) -> operations.Operation:
        """Starts a compile and returns at once. The operation does not depend on its caller."""
        return await self._ask(self._stub.Compile, request, self.timeouts.read_s)

    async def plan_compile(self, request: pb.PlanCompileRequest) -> pb.PlanCompileResponse:
        """Plans a compile, without compiling: what it would make and what it would cost; see `plan_request`."""
        timeout_s = self.timeouts.compile_s if request.check_graphs else self.timeouts.read_s
        return await self._ask(self._stub.PlanCompile, request, timeout_s)

    async def start_shard_weights(
        self, name: str, model: str, executables_ref: str, *, request_id: str = "", skip_cache_lookup: bool = False
    ) -> operations.Operation:
        """Starts to write weights and returns at once. Takes the arguments of `shard_weights`."""
        request = pb.ShardWeightsRequest(
            name=name,
            model=model,
            executables_ref=executables_ref,
            request_id=request_id,
            skip_cache_lookup=skip_cache_lookup,
        )
        return await self._ask(self._stub.ShardWeights, request, self.timeouts.read_s)

    async def start_shard_adapter(
        self, name: str, adapter: str, executables_ref: str, *, request_id: str = ""
    ) -> operations.Operation:
        """Starts to divide an adapter and returns at once. Takes the arguments of `shard_adapter`."""
        request = pb.ShardAdapterRequest(
            name=name, adapter=adapter, executables_ref=executables_ref, request_id=request_id
        )
        return await self._ask(self._stub.ShardAdapter, request, self.timeouts.read_s)

    async def start_quantize_weights(
        self, model: str, output: str, **options: Unpack[QuantizeOptions]
    ) -> operations.Operation:
        """Starts to write a quantized checkpoint and returns at once. Takes the arguments of `quantize_weights`."""
        return await self._ask(
            self._stub.QuantizeWeights, quantize_request(model, output, **options), self.timeouts.read_s
        )

    def watch_compile(self, operation: str, *, timeout_s: float | None = None) -> AsyncStream[pb.WatchCompileResponse]:
        """Streams the progress of an operation over one connection. The last event is the result or the error."""
        request = pb.WatchCompileRequest(operation=operation)
        return self._stream(self._stub.WatchCompile, request, timeout_s or self.timeouts.compile_s)

    async def wait_compile(
        self,
        operation: str,
        *,
        on_progress: OnProgress = lambda _: None,
        on_lost: OnLost = lambda _: None,
        timeout_s: float | None = None,
    ) -> pb.CompileResponse:
        """Waits for the end of an operation that `start_compile` or `start_shard_weights` started.

        A restarted compiler resumes its operations, so the client opens a lost connection again, after 0.2 s at first
        and up to 5 s later, until the compiler has been unreachable for `timeouts.reconnect_s`. If the caller cancels
        this call, the operation continues.

        Args:
            operation: Name of the operation.
            on_progress: Called with the present state, at the start and after each reconnection, and with every change.
            on_lost: Called with the error of each lost connection before the client opens it again.
            timeout_s: Deadline over all connections, in seconds. Default: `timeouts.compile_s`.
        """
        return (await self._wait(operation, on_progress, on_lost, timeout_s)).result

    async def wait_operation(
        self,
        operation: str,
        *,
        on_progress: OnProgress = lambda _: None,
        on_lost: OnLost = lambda _: None,
        timeout_s: float | None = None,
    ) -> pb.CompileResponse | pb.QuantizeWeightsResponse:
        """Waits for the end of any operation, such as one of `start_quantize_weights`, as `wait_compile` does."""
        end = await self._wait(operation, on_progress, on_lost, timeout_s)
        return end.checkpoint if end.HasField("checkpoint") else end.result

    async def _wait(
        self, operation: str, on_progress: OnProgress, on_lost: OnLost, timeout_s: float | None
    ) -> pb.WatchCompileResponse:
        reconnection = Reconnection(self.timeouts.reconnect_s, timeout_s or self.timeouts.compile_s)
        while True:
            try:
                async with self.watch_compile(operation, timeout_s=reconnection.remaining_s()) as events:
                    end = await _last_event(events, on_progress, reconnection.reached)
                break
            except Unavailable as error:
                delay_s = reconnection.next_delay_s(error)
                if delay_s is None:
                    raise
                on_lost(error)
            await asyncio.sleep(delay_s)
        if end.WhichOneof("event") == "error":
            raise error_from_status(end.error)
        return end

    async def compile(
        self,
        request: pb.CompileRequest,
        *,
        on_start: OnStart = lambda _: None,
        on_progress: OnProgress = lambda _: None,
        on_lost: OnLost = lambda _: None,
        timeout_s: float | None = None,
    ) -> pb.CompileResponse:
        """Compiles a bundle and waits for it. Like `wait_compile`, survives restarts of the compiler.

        Cancelling this call cancels the operation. If the deadline passes, or the compiler stays unreachable, the
        operation continues, and the error's metadata has its name for `wait_compile`.

        Args:
            request: Made by `compile_request`.
            on_start: Called with the name of the operation.
            on_progress: Called with the present state and every change.
            on_lost: Called with the error of each lost connection before the client opens it again.
            timeout_s: Deadline, in seconds. Default: `timeouts.compile_s`.
        """
        operation = await self.start_compile(request)
        on_start(operation.name)
        return (await self._finish(operation.name, on_progress, on_lost, timeout_s)).result

    async def shard_weights(
        self,
        name: str,
        model: str,
        executables_ref: str,
        *,
        request_id: str = "",
        skip_cache_lookup: bool = False,
        on_start: OnStart = lambda _: None,
        on_progress: OnProgress = lambda _: None,
        on_lost: OnLost = lambda _: None,
        timeout_s: float | None = None,
    ) -> pb.CompileResponse:
        """Writes another checkpoint's weights for existing executables, and waits for the bundle as `compile` does.

        Args:
            name: Bundle name of the new version, which has weights only.
            model: Directory of a Hugging Face checkpoint on the compiler's host, absolute or relative to a model root.
            executables_ref: Reference of the bundle that has the executables.
            request_id: Makes the call idempotent: calls with the same id start one operation.
            skip_cache_lookup: Build even if the cache has the result.
            on_start: Called with the name of the operation.
            on_progress: Called with the present state and every change.
            on_lost: Called with the error of each lost connection before the client opens it again.
            timeout_s: Deadline, in seconds. Default: `timeouts.compile_s`.
        """
        operation = await self.start_shard_weights(
            name, model, executables_ref, request_id=request_id, skip_cache_lookup=skip_cache_lookup
        )
        on_start(operation.name)
        return (await self._finish(operation.name, on_progress, on_lost, timeout_s)).result

    async def shard_adapter(
        self,
        name: str,
        adapter: str,
        executables_ref: str,
        *,
        request_id: str = "",
        on_start: OnStart = lambda _: None,
        on_progress: OnProgress = lambda _: None,
        on_lost: OnLost = lambda _: None,
        timeout_s: float | None = None,
    ) -> pb.CompileResponse:
        """Divides a LoRA adapter among the ranks of existing executables, and waits for the bundle as `compile` does.

        Args:
            name: Bundle name of the new version, which has the adapter only, and what requests call the adapter.
            adapter: PEFT's directory, or NxD's file, on the compiler's host, absolute or relative to a model root.
            executables_ref: Reference of the bundle that has the executables.
            request_id: Makes the call idempotent: calls with the same id start one operation.
            on_start: Called with the name of the operation.
            on_progress: Called with the present state and every change.
            on_lost: Called with the error of each lost connection before the client opens it again.
            timeout_s: Deadline, in seconds. Default: `timeouts.compile_s`.
        """
        operation = await self.start_shard_adapter(name, adapter, executables_ref, request_id=request_id)
        on_start(operation.name)
        return (await self._finish(operation.name, on_progress, on_lost, timeout_s)).result

    async def quantize_weights(
        self,
        model: str,
        output: str,
        *,
        on_start: OnStart = lambda _: None,
        on_progress: OnProgress = lambda _: None,
        on_lost: OnLost = lambda _: None,
        timeout_s: float | None = None,
        **options: Unpack[QuantizeOptions],
    ) -> pb.QuantizeWeightsResponse:
        """Writes a quantized checkpoint of a plain one on the compiler's host, and waits for it as `compile` does.

        Args:
            model: Directory of a Hugging Face checkpoint on the compiler's host, absolute or relative to a model root.
            output: Directory to make there, likewise.
            on_start: Called with the name of the operation.
            on_progress: Called with the present state and every change.
            on_lost: Called with the error of each lost connection before the client opens it again.
            timeout_s: Deadline, in seconds. Default: `timeouts.compile_s`.
            options: See QuantizeOptions.
        """
        operation = await self.start_quantize_weights(model, output, **options)
        on_start(operation.name)
        return (await self._finish(operation.name, on_progress, on_lost, timeout_s)).checkpoint

    async def get_operation(self, name: str) -> operations.Operation:
        """Returns the present state of an operation."""
        request = operations.GetOperationRequest(name=name)
        return await self._ask(self._operations.GetOperation, request, self.timeouts.read_s)

    async def list_operations(self) -> list[operations.Operation]:
        """Lists every operation that the server remembers."""
        found: list[operations.Operation] = []
        request = operations.ListOperationsRequest(name="operations")
        while True:
            page = await self._ask(self._operations.ListOperations, request, self.timeouts.read_s)
            found.extend(page.operations)
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def cancel_operation(self, name: str) -> None:
        """Asks an operation to end and returns at once. The operation's state shows when it has ended."""
        request = operations.CancelOperationRequest(name=name)
        await self._ask(self._operations.CancelOperation, request, self.timeouts.read_s)

    async def _finish(
        self, operation: str, on_progress: OnProgress, on_lost: OnLost, timeout_s: float | None
    ) -> pb.WatchCompileResponse:
        """Waits for an operation that this caller started. If the caller is cancelled, cancels the operation."""
        try:
            return await self._wait(operation, on_progress, on_lost, timeout_s)
        except KilnError as error:
            error.metadata.setdefault("operation", operation)
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(KilnError):  # the operation may have ended, or the server may be unreachable
                await self.cancel_operation(operation)
            raise


async def _last_event(
    events: AsyncStream[pb.WatchCompileResponse], on_progress: OnProgress, on_reached: Callable[[], None]
) -> pb.WatchCompileResponse:
    """Reads a watch to its end; returns its last event, the result or the error."""
    async for event in events:
        on_reached()
        if event.WhichOneof("event") in ("result", "checkpoint", "error"):
            return event
        on_progress(event.progress)
    raise StreamIncomplete("no result")


class Reconnection:
    """The reconnection attempts to one server during one wait.

    Delays double while the server stays unreachable. Each is varied at random, so that the clients of a restarted
    server do not all reconnect at once.
    """

    def __init__(self, patience_s: float, timeout_s: float) -> None:
        """Starts the clock. Both times are seconds: how long the server may be unreachable, and the whole wait."""
        self._patience_s = patience_s
        self._deadline = time.monotonic() + timeout_s
        self._reached_at = time.monotonic()
        self._delay_s = _FIRST_DELAY_S

    def remaining_s(self) -> float:
        """Returns the seconds until the deadline. Never 0, which callers would read as no deadline."""
        return max(self._deadline - time.monotonic(), 0.001)

    def reached(self) -> None:
        """Records that the server has answered."""
        self._reached_at = time.monotonic()
        self._delay_s = _FIRST_DELAY_S

    def next_delay_s(self, error: KilnError) -> float | None:
        """Returns the seconds to wait before the next attempt, at most the remaining time; None to give up.

        The delay is at least the `retry_after_s` of `error`, with which the connection was lost.
        """
        if time.monotonic() - self._reached_at >= self._patience_s:
            return None
        delay_s = max(self._delay_s * random.uniform(0.5, 1.0), error.retry_after_s or 0.0)
        self._delay_s = min(self._delay_s * 2, _MAX_DELAY_S)
        return min(delay_s, self.remaining_s())
