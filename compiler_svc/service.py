"""`kiln.compiler.v1.CompilerService`: validate, call, convert."""

# ruff: noqa: N802, ARG002 - names and arguments of the methods are gRPC's
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from google.longrunning import operations_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.compiler.v1 import compiler_pb2_grpc

from compiler_svc.admission import admit_request
from compiler_svc.compile_queue import CompileQueue
from compiler_svc.database import operations
from compiler_svc.database.engine import Database
from compiler_svc.database.operations import parse_resource_name
from compiler_svc.wire import digest_request, event_to_pb, operation_to_pb, request_from_pb


class CompilerService(compiler_pb2_grpc.CompilerServiceServicer):
    """Accepts compiles and lets clients watch them."""

    def __init__(self, *, database: Database, queue: CompileQueue, model_roots: tuple[Path, ...]) -> None:
        """Takes the queue that compiles go to, and the roots that checkpoints lie in."""
        self._database = database
        self._queue = queue
        self._model_roots = model_roots

    async def Compile(self, request: pb.CompileRequest, context: Any) -> operations_pb2.Operation:
        """Judges a request, then starts a compile."""
        digest = digest_request(request)
        if request.request_id:
            # A repeated call finds its operation, whatever became of the checkpoint since.
            find = partial(operations.find_by_request_id, request_id=request.request_id, request_digest=digest)
            existing = await self._database.run(find)
            if existing is not None:
                return operation_to_pb(existing)
        spec = await asyncio.to_thread(admit_request, request_from_pb(request), self._model_roots)
        operation = await self._queue.submit(spec, request_id=request.request_id or None, request_digest=digest)
        return operation_to_pb(operation)

    async def WatchCompile(
        self, request: pb.WatchCompileRequest, context: Any
    ) -> AsyncIterator[pb.WatchCompileResponse]:
        """Streams the progress of one compile, the result last."""
        async with aclosing(self._queue.watch(parse_resource_name(request.operation))) as changes:
            async for operation in changes:
                yield event_to_pb(operation)
