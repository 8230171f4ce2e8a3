"""`kiln.compiler.v1.CompilerService`: validate, call, convert."""

# ruff: noqa: N802, ARG002 - names and arguments of the methods are gRPC's
from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.longrunning import operations_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.compiler.v1 import compiler_pb2_grpc

from compiler_svc.api.compiler_wire import (
    adapter_request_from_pb,
    digest_request,
    event_to_pb,
    operation_to_pb,
    quantize_request_from_pb,
    request_from_pb,
    shard_request_from_pb,
)
from compiler_svc.api.limits import OperationRequest, check_limits
from compiler_svc.api.plan_wire import plan_request_from_pb, plan_to_pb
from compiler_svc.bundles.store import BundleStore
from compiler_svc.compiles.checkpoint_fetcher import CheckpointFetcher
from compiler_svc.compiles.journal import OperationJournal
from compiler_svc.compiles.queue import CompileQueue
from compiler_svc.database import operations
from compiler_svc.database.engine import Database
from compiler_svc.database.operations import parse_resource_name
from compiler_svc.planning.adapter_admission import admit_adapter_request
from compiler_svc.planning.admission import admit_request
from compiler_svc.planning.job_spec import JobSpec
from compiler_svc.planning.planner import PlannerSettings, plan_compile
from compiler_svc.planning.pool import PlanningPool
from compiler_svc.planning.quantize_admission import admit_quantize_request
from compiler_svc.planning.shard_admission import admit_shard_request
from edge.access.principal import PRINCIPAL


class CompilerService(compiler_pb2_grpc.CompilerServiceServicer):
    """Accepts compiles and lets clients watch them."""

    def __init__(
        self,
        *,
        database: Database,
        journal: OperationJournal,
        queue: CompileQueue,
        store: BundleStore,
        fetcher: CheckpointFetcher,
        planning: PlanningPool,
        graph_checks: PlanningPool,
        planner: PlannerSettings,
        scratch: Path,
    ) -> None:
        self._database = database
        self._journal = journal
        self._queue = queue
        self._store = store
        self._fetcher = fetcher
        self._planning = planning
        self._graph_checks = graph_checks
        self._planner = planner
        # For the files of plans that check graphs. A compiler that starts empties it.
        self._scratch = scratch

    async def Compile(self, request: pb.CompileRequest, context: Any) -> operations_pb2.Operation:
        """Validates a request, then starts a compile."""
        planner = self._planner

        async def admit() -> JobSpec:
            wanted = request_from_pb(request)
            work = partial(admit_request, wanted, planner.model_roots, default_isa=planner.default_isa)
            return await self._fetcher.plan(self._planning, work)

        return await self._accept(request, admit)

    async def PlanCompile(self, request: pb.PlanCompileRequest, context: Any) -> pb.PlanCompileResponse:
        """Predicts what a compile would make and need."""
        check_limits(request)
        plan = partial(plan_compile, self._planner, plan_request_from_pb(request))
        if not request.check_graphs:
            return plan_to_pb(await self._fetcher.plan(self._planning, plan))
        # Here, and not in the process: that may be killed.
        with TemporaryDirectory(prefix="plan-", dir=self._scratch) as directory:
            plan = partial(plan, directory=Path(directory))
            return plan_to_pb(await self._fetcher.plan(self._graph_checks, plan))

    async def ShardWeights(self, request: pb.ShardWeightsRequest, context: Any) -> operations_pb2.Operation:
        """Validates a request, then starts to write weights."""

        async def admit() -> JobSpec:
            executables = (await self._store.get(request.executables_ref)).bundle
            wanted = shard_request_from_pb(request)
            work = partial(admit_shard_request, wanted, executables, self._planner.model_roots)
            return await self._fetcher.plan(self._planning, work)

        return await self._accept(request, admit)

    async def ShardAdapter(self, request: pb.ShardAdapterRequest, context: Any) -> operations_pb2.Operation:
        """Validates a request, then starts to divide an adapter."""

        async def admit() -> JobSpec:
            executables = (await self._store.get(request.executables_ref)).bundle
            wanted = adapter_request_from_pb(request)
            work = partial(admit_adapter_request, wanted, executables, self._planner.model_roots)
            return await self._fetcher.plan(self._planning, work)

        return await self._accept(request, admit)

    async def QuantizeWeights(self, request: pb.QuantizeWeightsRequest, context: Any) -> operations_pb2.Operation:
        """Validates a request, then starts to write a quantized checkpoint."""

        async def admit() -> JobSpec:
            wanted = quantize_request_from_pb(request)
            work = partial(admit_quantize_request, wanted, self._planner.model_roots)
            return await self._fetcher.plan(self._planning, work)

        return await self._accept(request, admit)

    async def WatchCompile(
        self, request: pb.WatchCompileRequest, context: Any
    ) -> AsyncIterator[pb.WatchCompileResponse]:
        """Streams the progress of one compile, then its result."""
        operation_id, reach = parse_resource_name(request.operation), PRINCIPAL.get().reach
        async with aclosing(self._journal.watch(operation_id, reach)) as changes:
            async for operation in changes:
                yield event_to_pb(operation)

    async def _accept(
        self, request: OperationRequest, admit: Callable[[], Awaitable[JobSpec]]
    ) -> operations_pb2.Operation:
        """Starts what `admit` admits, unless the call is repeated, even if the checkpoint has changed since."""
        check_limits(request)
        digest, request_id, operation = digest_request(request), request.request_id or None, None
        if request_id is not None:
            find, principal = operations.find_by_request_id, PRINCIPAL.get().key
            operation = await self._database.run(find, request_id, digest, principal)
        if operation is None:
            self._queue.check_room()
            operation = await self._queue.submit(await admit(), request_id=request_id, request_digest=digest)
        return operation_to_pb(operation)
