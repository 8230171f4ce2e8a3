"""The asynchronous client of kiln.compiler.v1.CompilerService and its operations."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict, Unpack

from google.longrunning import operations_pb2 as operations
from google.longrunning.operations_pb2_grpc import OperationsStub
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.compiler.v1.compiler_pb2_grpc import CompilerServiceStub
from kiln.config.v1.config_pb2 import InferenceConfig

from kiln_client.enums import enum_number
from kiln_client.errors import KilnError, StreamIncomplete
from kiln_client.service_client import ServiceClient
from kiln_client.status import error_from_status
from kiln_client.streams import AsyncStream

if TYPE_CHECKING:
    from kiln.compiler.v1.compiler_pb2_grpc import CompilerServiceAsyncStub


class CompileOptions(TypedDict, total=False):
    """Options of a compile; what is left out takes the server's default."""

    target: str
    """Hardware: `cpu` (default), `inf2`, `trn1`, `trn2` or `trn3`."""
    isa: str
    """CPU instruction set: `x86-64-v3` (default), `x86-64-v4` or `native`."""
    optimization_level: int
    """0 ships the exported graph, 1 (default) and 2 compile ahead of time."""
    request_id: str
    """Makes the call idempotent."""
    skip_cache_lookup: bool
    """Build even where the cache has the result."""
    salt: str
    """Enters every cache key."""


def compile_request(
    name: str, model: str, config: Mapping[str, object] | InferenceConfig, **options: Unpack[CompileOptions]
) -> pb.CompileRequest:
    """Makes the request of one compile.

    Args:
        name: Bundle name.
        model: Directory of a Hugging Face checkpoint on the compiler's host, absolute or relative to a model root.
        config: NxD Inference's names, such as `{"neuron_config": {"seq_len": 256}}`; the server judges a mapping.
        options: See CompileOptions.

    Raises:
        ValueError: The mapping is not JSON, or an option has a value that its enum lacks.
    """
    level = options.get("optimization_level")
    request = pb.CompileRequest(
        name=name,
        model=model,
        target=pb.Target(
            kind=pb.Target.Kind.ValueType(enum_number(pb.Target.Kind.DESCRIPTOR, options.get("target"))),
            isa=options.get("isa", ""),
        ),
        optimization_level=pb.OptimizationLevel.ValueType(
            enum_number(pb.OptimizationLevel.DESCRIPTOR, None if level is None else f"o{level}")
        ),
        request_id=options.get("request_id", ""),
        skip_cache_lookup=options.get("skip_cache_lookup", False),
        salt=options.get("salt", ""),
    )
    if isinstance(config, InferenceConfig):
        request.config.CopyFrom(config)
    else:
        request.config_json = json.dumps(config, allow_nan=False)
    return request


class AsyncCompiler(ServiceClient):
    """Compiles bundles. Every method raises KilnError."""

    address_variable = "KILN_COMPILER"

    @cached_property
    def _stub(self) -> CompilerServiceAsyncStub:
        return CompilerServiceStub(self._channel)

    @cached_property
    def _operations(self) -> OperationsStub:
        return OperationsStub(self._channel)

    async def start_compile(self, request: pb.CompileRequest) -> operations.Operation:
        """Starts a compile and returns at once; the operation goes on without its caller."""
        return await self._ask(self._stub.Compile, request, self.timeouts.read_s)

    def watch_compile(self, operation: str, *, timeout_s: float | None = None) -> AsyncStream[pb.WatchCompileResponse]:
        """Streams the progress of a compile, the result or the error last."""
        request = pb.WatchCompileRequest(operation=operation)
        return self._stream(self._stub.WatchCompile, request, timeout_s or self.timeouts.compile_s)

    async def compile(
        self,
        request: pb.CompileRequest,
        *,
        on_start: Callable[[str], None] = lambda _: None,
        on_progress: Callable[[pb.CompileMetadata], None] = lambda _: None,
        timeout_s: float | None = None,
    ) -> pb.CompileResponse:
        """Compiles a bundle and waits for it.

        Cancelling this call cancels the operation. When the connection or the deadline ends first, the operation goes
        on, and the error's metadata names it: `watch_compile` finds it again.

        Args:
            request: What to compile, see `compile_request`.
            on_start: Takes the name of the operation.
            on_progress: Takes the present state and every change.
            timeout_s: Deadline, in seconds. Default: `timeouts.compile_s`.
        """
        operation = await self.start_compile(request)
        on_start(operation.name)
        try:
            async with self.watch_compile(operation.name, timeout_s=timeout_s) as events:
                return await _compile_result(events, on_progress)
        except KilnError as error:
            error.metadata.setdefault("operation", operation.name)
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(KilnError):  # it may have ended, or the server may be gone
                await self.cancel_operation(operation.name)
            raise

    async def get_operation(self, name: str) -> operations.Operation:
        """Tells where an operation stands."""
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
        """Asks an operation to end; its state tells when it has."""
        request = operations.CancelOperationRequest(name=name)
        await self._ask(self._operations.CancelOperation, request, self.timeouts.read_s)


async def _compile_result(
    events: AsyncStream[pb.WatchCompileResponse], on_progress: Callable[[pb.CompileMetadata], None]
) -> pb.CompileResponse:
    async for event in events:
        match event.WhichOneof("event"):
            case "progress":
                on_progress(event.progress)
            case "result":
                return event.result
            case "error":
                raise error_from_status(event.error)
    raise StreamIncomplete("no result")
