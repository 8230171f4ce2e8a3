"""`vllm.grpc.engine.VllmEngine` of one deployment: choose it, call, convert."""

# ruff: noqa: N802, ARG002 - names and arguments of the methods are gRPC's
from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import Any, Final

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from bundle.errors import FieldViolation, KilnError
from bundle.manifest import Manifest
from edge.access.principal import PRINCIPAL
from edge.interceptor import describe_call
from edge.surroundings import take_request_id
from execution.sampling_parameters import CHOSEN
from execution.text.prompt import PromptSize
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.api.embedding import begin_embedding, read_embedding
from runtime_svc.api.generation import abort_request, conclude_stream, find_deadline
from runtime_svc.deployments.deployment import Deployment, DeploymentState
from runtime_svc.deployments.registry import Deployments
from runtime_svc.engine.engine import Engine
from runtime_svc.errors import (
    ConstraintLimitExceeded,
    DeploymentNotChosen,
    DeploymentNotFound,
    DeploymentNotReady,
    EngineNotServing,
    FeatureNotServed,
    MethodNotServed,
    PromptTooLong,
    RequestInvalid,
)
from runtime_svc.vllm_engine.archive import make_tokenizer_archive
from runtime_svc.vllm_engine.messages import (
    Answer,
    call_from_pb,
    check_served,
    embed_from_pb,
    find_error,
    prompt_size_from_pb,
    rename_fields,
)

Context = grpc.aio.ServicerContext[Any, Any]

#: What routers expect of one message of an archive.
_CHUNK_BYTES: Final = 64 << 10

_SERVING_STATES: Final = frozenset({DeploymentState.READY, DeploymentState.RECOVERING})


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc] # it has no types
    """Speaks for one deployment, or for an adapter of it: the API has no field that names one."""

    def __init__(self, deployments: Deployments, deployment_id: str | None, adapter: str = "") -> None:
        """Takes the deployment's id, None for the only one that serves, and the adapter's name, empty for none."""
        self._deployments = deployments
        self._deployment_id = deployment_id
        self._adapter = adapter
        self._started_at_s = time.monotonic()
        self._newest_request_s = 0.0

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Generates sequences: chunks with `stream`, then one message with all of each."""
        arrived_ns = time.time_ns()
        self._newest_request_s = arrived_ns / 1e9
        request_id = take_request_id(context, request.request_id)
        check_served(request)
        convert = partial(call_from_pb, request, request_id=request_id, caller=PRINCIPAL.get(), adapter=self._adapter)
        with _naming_errors():
            deployment = self._deployments.get_for_requests(self._choose().deployment_id)
            describe_call(deployment_id=deployment.deployment_id)
            call = await deployment.convert([prompt_size_from_pb(request)], request.ByteSize(), convert)
            stream = await deployment.generate(call, deadline_s=find_deadline(context))
        answer = Answer(call, is_streamed=request.stream)
        with conclude_stream(stream, arrived_ns):
            async for event in stream:
                if (response := answer.add(event)) is not None:
                    yield response
        for end in stream.ends:
            if (cause := find_error(end.finish)) is not None:
                raise cause

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends requests; their slots are free when the client gets the answer. Those that have ended are no error."""
        engine = self._choose().engine
        if engine is not None:
            for request_id in request.request_ids:
                abort_request(engine, request_id)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Tells whether a Generate would run now."""
        try:
            deployment = self._choose()
            deployment.require_serving(while_recovering=False)
        except KilnError as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message=f"deployment {deployment.deployment_id!r} is READY")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Describes the deployment; the model is called as the adapter, or as the deployment."""
        deployment = self._choose()
        capabilities, manifest = _describe(deployment)
        return pb.GetModelInfoResponse(
            # No path, and no name that a hub could know: routers look for a tokenizer there before they ask for ours.
            model_path=deployment.digest,
            tokenizer_path=deployment.digest,
            served_model_name=self._adapter or deployment.deployment_id,
            is_generation=True,
            architectures=[manifest.architecture],
            max_context_length=capabilities.max_length,
            max_req_input_len=capabilities.max_context_length,
            vocab_size=capabilities.vocab_size,
            eos_token_ids=capabilities.eos_token_ids,
            bos_token_id=manifest.tokens.bos or 0,
            pad_token_id=manifest.tokens.pad,
            default_sampling_params_json=_default_sampling_json(capabilities),
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Describes the engine."""
        deployment = self._choose()
        _, manifest = _describe(deployment)
        engine = deployment.require_serving().engine
        return pb.GetServerInfoResponse(
            server_type="kiln",
            active_requests=len(engine.requests),
            is_paused=not engine.scheduler.is_admitting,
            last_receive_timestamp=self._newest_request_s,
            uptime_seconds=time.monotonic() - self._started_at_s,
            data_parallel_size=1,
            max_num_seqs=engine.scheduler.max_running,
            block_size=engine.scheduler.kv.block_tokens,
            kv_cache_dtype=manifest.state.tensors[0].dtype,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Tells how busy the engine is; it has one data-parallel rank, whose number is 0."""
        if request.dp_rank:
            raise RequestInvalid([FieldViolation("dp_rank", str(request.dp_rank), "unset or 0")])
        engine = self._choose().require_serving().engine
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=metadata.version("kiln-runtime"),
            dp_rank_count=1,
            loads=[_load_to_pb(engine)],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Sends the tokenizer's files as a ZIP archive; the last message has the SHA-256 of the whole."""
        deployment = self._choose()
        _, manifest = _describe(deployment)
        if manifest.tokenizer is None:
            raise MethodNotServed("GetTokenizer", f"the bundle of deployment {deployment.deployment_id!r} has none")
        assert deployment.bundle is not None
        bundle = await self._deployments.library.fetch(deployment.bundle, lambda *_: None)
        archive = await asyncio.to_thread(make_tokenizer_archive, bundle)
        for start in range(0, len(archive), _CHUNK_BYTES):
            is_last = start + _CHUNK_BYTES >= len(archive)
            yield common_pb2.GetTokenizerChunk(
                data=archive[start : start + _CHUNK_BYTES],
                sha256=hashlib.sha256(archive).hexdigest() if is_last else "",
            )

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Turns a prompt into the vector of its last token, of length 1, as vLLM does by default."""
        arrived_ns = time.time_ns()
        request_id = take_request_id(context, request.request_id)
        size = PromptSize("token_ids", request.tokenized.ByteSize(), len(request.tokenized.input_ids))
        convert = partial(embed_from_pb, request, request_id=request_id, caller=PRINCIPAL.get(), adapter=self._adapter)
        with _naming_errors():
            deployment = self._deployments.get_for_requests(self._choose().deployment_id)
            describe_call(deployment_id=deployment.deployment_id)
            if not deployment.require_serving().capabilities.embeddings:
                raise MethodNotServed("Embed", "the bundle was not compiled with output_embeddings: true")
            call = await deployment.convert([size], request.ByteSize(), convert)
            (own,), stream = await begin_embedding(deployment, call, deadline_s=find_deadline(context))
        with conclude_stream(stream, arrived_ns):
            async for _ in stream:
                pass
        if stream.error is not None:
            raise stream.error
        values = read_embedding(own, normalizes=True)
        return pb.EmbedResponse(embedding=values, prompt_tokens=len(own.prompt_token_ids), embedding_dim=len(values))

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Refuses: there is no prefix cache."""
        raise MethodNotServed("FlushCache", "there is no prefix cache; RuntimeService.ResetKVCache zeroes the KV cache")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        """Refuses: there is no profiler."""
        raise MethodNotServed("StartProfile", "there is no profiler")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        """Refuses: there is no profiler."""
        raise MethodNotServed("StopProfile", "there is no profiler")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> Any:
        """Refuses: without a prefix cache nothing happens that a router could know."""
        raise MethodNotServed("SubscribeKvEvents", "there is no prefix cache")

    def with_adapter(self, name: str) -> VllmEngineService:
        """Returns a servicer that speaks for an adapter of the same deployment."""
        return VllmEngineService(self._deployments, self._deployment_id, name)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    def is_ready(self) -> bool:
        """Tells whether a Generate would run now."""
        try:
            return self._choose().state is DeploymentState.READY
        except KilnError:
            return False

    def find_deployment_id(self) -> str | None:
        """Returns the id of the deployment that calls speak for now; None if they will be refused."""
        try:
            return self._choose().deployment_id
        except KilnError:
            return None

    def _choose(self) -> Deployment:
        if self._deployment_id is not None:
            return self._deployments.get(self._deployment_id)
        serving = [one for one in self._deployments.list() if one.state in _SERVING_STATES]
        if len(serving) != 1:
            raise DeploymentNotChosen([one.deployment_id for one in serving])
        return serving[0]


@contextmanager
def _naming_errors() -> Iterator[None]:
    """Raises what a call is refused for as this API does."""
    try:
        yield
    # The client cannot name a deployment: this says nothing of its request, and routers try another runtime.
    except (DeploymentNotChosen, DeploymentNotFound, DeploymentNotReady) as error:
        raise EngineNotServing(str(error)) from error
    except (RequestInvalid, FeatureNotServed, PromptTooLong, ConstraintLimitExceeded) as error:
        raise rename_fields(error) from error


def _describe(deployment: Deployment) -> tuple[Capabilities, Manifest]:
    capabilities = deployment.require_serving().capabilities
    assert deployment.bundle is not None
    return capabilities, deployment.bundle.manifest


def _default_sampling_json(capabilities: Capabilities) -> str:
    """Returns what a router is to send for values that its client leaves unset."""
    return json.dumps({name: getattr(capabilities.default_sampling, name) for name in CHOSEN})


def _load_to_pb(engine: Engine) -> pb.SchedulerLoad:
    scheduler, kv = engine.scheduler, engine.scheduler.kv
    num_used_tokens, max_tokens = scheduler.num_kv_tokens, kv.num_blocks * kv.block_tokens
    return pb.SchedulerLoad(
        num_running_reqs=scheduler.num_running,
        num_waiting_reqs=len(scheduler.waiting),
        num_total_reqs=scheduler.num_running + len(scheduler.waiting),
        num_used_tokens=num_used_tokens,
        max_total_num_tokens=max_tokens,
        # Of tokens, not of slots, which are all in use whenever a full batch runs: SMG avoids a worker above 0.8.
        token_usage=num_used_tokens / max_tokens,
        utilization=scheduler.num_running / scheduler.max_running,
        max_running_requests=scheduler.max_running,
        num_waiting_uncached_tokens=scheduler.num_waiting_tokens,
    )
