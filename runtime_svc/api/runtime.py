"""`kiln.runtime.v1.RuntimeService`: validate, call, convert."""

# ruff: noqa: N802, ARG002 - names and arguments of the methods are gRPC's
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from importlib import metadata
from typing import Any, Final

from kiln.runtime.v1 import runtime_pb2 as pb
from kiln.runtime.v1 import runtime_pb2_grpc

from edge.access.principal import PRINCIPAL
from edge.interceptor import describe_call
from runtime_svc.api.runtime_wire import (
    adapter_to_pb,
    deployment_info_to_pb,
    deployment_to_pb,
    policy_from_pb,
    progress_to_pb,
    reset_receipt_to_pb,
    reset_scope_from_pb,
    session_to_pb,
    spec_from_pb,
    timestamp_to_pb,
    weight_policies_from_pb,
    weights_receipt_to_pb,
)
from runtime_svc.deployments.adapters import AdapterLoad, describe_adapter
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.names import check_ref
from runtime_svc.deployments.progress import ProgressFeed
from runtime_svc.deployments.registry import Deployments
from runtime_svc.deployments.weights import WeightsLoad
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.errors import AliasFollowed

SCHEMA_REVISION: Final = 2
MINIMUM_CLIENT_REVISION: Final = 1


class RuntimeService(runtime_pb2_grpc.RuntimeServiceServicer):
    """Loads bundles and manages deployments."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments
        self._started_at_s = time.time()

    async def LoadBundle(self, request: pb.LoadBundleRequest, context: Any) -> AsyncIterator[pb.LoadBundleResponse]:
        """Loads a bundle; the load goes on if the client leaves."""
        describe_call(deployment_id=request.deployment_id)
        yield pb.LoadBundleResponse(progress=pb.LoadProgress(stage=pb.LoadProgress.STAGE_RESOLVE))
        deployment = await self._deployments.load(spec_from_pb(request))
        async for progress in deployment.progress.watch():
            yield pb.LoadBundleResponse(progress=progress_to_pb(progress))
        if deployment.failure is not None:
            raise deployment.failure
        deployment.require_loaded()
        yield pb.LoadBundleResponse(deployment=deployment_to_pb(deployment))

    async def UnloadBundle(self, request: pb.UnloadBundleRequest, context: Any) -> pb.UnloadBundleResponse:
        """Ends a deployment."""
        describe_call(deployment_id=request.deployment_id)
        policy = policy_from_pb(request.in_flight_policy, default=InFlightPolicy.ABORT)
        num_aborted = await self._deployments.unload(request.deployment_id, policy)
        return pb.UnloadBundleResponse(aborted_requests=num_aborted)

    async def ListDeployments(self, request: pb.ListDeploymentsRequest, context: Any) -> pb.ListDeploymentsResponse:
        """Lists deployments by id."""
        return pb.ListDeploymentsResponse(deployments=map(deployment_to_pb, self._list_visible()))

    async def GetDeployment(self, request: pb.GetDeploymentRequest, context: Any) -> pb.GetDeploymentResponse:
        """Returns one deployment as it is now."""
        describe_call(deployment_id=request.deployment_id)
        deployment = self._deployments.get(request.deployment_id)
        return pb.GetDeploymentResponse(deployment=deployment_to_pb(deployment))

    async def ResetKVCache(self, request: pb.ResetKVCacheRequest, context: Any) -> pb.ResetKVCacheResponse:
        """Zeroes a deployment's KV cache, or what it keeps for later requests, and returns the receipt."""
        describe_call(deployment_id=request.deployment_id)
        policy = policy_from_pb(request.in_flight_policy, default=InFlightPolicy.WAIT)
        deployment = self._deployments.get(request.deployment_id)
        serving = deployment.require_serving(while_recovering=False)
        engine = serving.engine
        match reset_scope_from_pb(request, serving.capabilities):
            case "prefix_cache":
                receipt = await engine.reset_prefix_cache()
            case "session":
                receipt = await engine.reset_session(PRINCIPAL.get().key, request.session.session_id)
            case "deployment":
                receipt = await engine.reset_kv_cache(policy)
        return reset_receipt_to_pb(receipt)

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        """Lists the caller's sessions with a deployment."""
        describe_call(deployment_id=request.deployment_id)
        engine = self._deployments.get(request.deployment_id).require_serving().engine
        loop_started_at_s = time.time() - asyncio.get_running_loop().time()
        sessions = engine.requests.sessions.list_of(PRINCIPAL.get().key)
        return pb.ListSessionsResponse(sessions=[session_to_pb(one, loop_started_at_s) for one in sessions])

    async def LoadWeights(self, request: pb.LoadWeightsRequest, context: Any) -> AsyncIterator[pb.LoadWeightsResponse]:
        """Replaces a deployment's weights; if the client leaves before the swap begins, the old weights serve on."""
        describe_call(deployment_id=request.deployment_id)
        policy, keep_kv = weight_policies_from_pb(request)
        deployment, feed = self._deployments.get(request.deployment_id), ProgressFeed()
        if deployment.followed_alias:
            raise AliasFollowed(deployment.deployment_id, deployment.followed_alias)
        check_ref(request.ref)
        find = partial(self._deployments.library.resolve, request.ref)
        load = WeightsLoad(request.ref, find, feed, policy, keep_kv, request.keep_old_weights)
        task = asyncio.create_task(self._deployments.load_weights(deployment, load))
        task.add_done_callback(lambda _: feed.close())
        try:
            async for progress in feed.watch():
                yield pb.LoadWeightsResponse(progress=progress_to_pb(progress))
            yield pb.LoadWeightsResponse(result=weights_receipt_to_pb(await task, deployment))
        finally:
            task.cancel()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        """Loads an adapter for the caller."""
        describe_call(deployment_id=request.deployment_id)
        deployment = self._deployments.get(request.deployment_id)
        load = AdapterLoad(PRINCIPAL.get().key, request.ref, request.name, request.replace)
        record = await self._deployments.load_adapter(deployment, load)
        return pb.LoadAdapterResponse(adapter=adapter_to_pb(record, describe_adapter(deployment, record)))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        """Takes the name from an adapter of the caller."""
        describe_call(deployment_id=request.deployment_id)
        deployment = self._deployments.get(request.deployment_id)
        num_users = await self._deployments.unload_adapter(deployment, PRINCIPAL.get().key, request.name)
        return pb.UnloadAdapterResponse(active_requests=num_users)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Any) -> pb.ListAdaptersResponse:
        """Lists the adapters that the caller's requests can name; with the scope admin those of all."""
        describe_call(deployment_id=request.deployment_id)
        deployment = self._deployments.get(request.deployment_id)
        records = deployment.adapters.list_of(PRINCIPAL.get().reach)
        described = ((record, describe_adapter(deployment, record)) for record in records)
        # Those that are lost are left out, but not those that no request has named since a restart.
        unopened = deployment.adapters.unopened
        return pb.ListAdaptersResponse(
            adapters=[
                adapter_to_pb(record, loaded)
                for record, loaded in described
                if loaded is not None or record.key in unopened
            ],
            num_slots=0 if deployment.capabilities is None else deployment.capabilities.adapter_slots,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Returns the server's version, target, cores, memory and deployments."""
        resources = self._deployments.resources
        cores, memory, target = resources.cores, resources.memory, resources.target
        return pb.GetServerInfoResponse(
            version=metadata.version("kiln-runtime"),
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=MINIMUM_CLIENT_REVISION,
            target=target.kind,
            isas=target.isas.list_supported(),
            total_cores=cores.num_cores,
            free_cores=len(cores.free),
            host_cores=cores.host_cores,
            start_time=timestamp_to_pb(self._started_at_s),
            total_memory_bytes=memory.total_bytes,
            free_memory_bytes=memory.free_bytes,
            deployments=map(deployment_info_to_pb, self._list_visible()),
        )

    def _list_visible(self) -> list[Deployment]:
        principal = PRINCIPAL.get()
        return [deployment for deployment in self._deployments.list() if principal.may_use(deployment.deployment_id)]
