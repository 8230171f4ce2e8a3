"""The asynchronous client of kiln.runtime.v1.RuntimeService and GenerationService."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias, Unpack

from kiln.runtime.v1 import generation_pb2, runtime_pb2
from kiln.runtime.v1.generation_pb2_grpc import GenerationServiceStub
from kiln.runtime.v1.runtime_pb2_grpc import RuntimeServiceStub

from kiln_client.completion import Completion, collect, collect_sequences
from kiln_client.enums import enum_name, enum_number
from kiln_client.errors import StreamIncomplete
from kiln_client.prompts import GenerateOptions, Pooling, Prompt, generate_request, prompt_fields
from kiln_client.service_client import ServiceClient
from kiln_client.streams import AsyncStream

if TYPE_CHECKING:
    from kiln.runtime.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from kiln.runtime.v1.runtime_pb2_grpc import RuntimeServiceAsyncStub

InFlight: TypeAlias = Literal["wait", "abort", "refuse", "continue", "finish_on_old"]
"""Policy for running requests; None takes the method's default."""
KvPolicy: TypeAlias = Literal["invalidate", "keep"]
"""Policy for cached keys and values when weights change; None invalidates them."""
Role: TypeAlias = Literal["target", "draft"]
"""The part that a bundle plays in a deployment; None means the target."""
OnProgress: TypeAlias = Callable[[runtime_pb2.LoadProgress], None]


class AsyncRuntime(ServiceClient):
    """Manages deployments and generates with them. Every method raises KilnError."""

    address_variable = "KILN_RUNTIME"

    @cached_property
    def _runtime(self) -> RuntimeServiceAsyncStub:
        return RuntimeServiceStub(self._channel)

    @cached_property
    def _generation(self) -> GenerationServiceAsyncStub:
        return GenerationServiceStub(self._channel)

    def generate(
        self,
        deployment_id: str,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream[generation_pb2.GenerateResponse]:
        """Generates and returns a stream of events: one Accepted, TokenDelta events, one Finished for each sequence.

        Dropping, closing or leaving the stream cancels the request and frees its slot.

        Args:
            deployment_id: Deployment to use.
            prompt: Text, token ids, or a conversation made by `chat`.
            timeout_s: Deadline, in seconds. Default: `timeouts.generate_s`.
            options: See GenerateOptions.
        """
        request = generate_request(deployment_id, prompt, **options)
        return self._stream(self._generation.Generate, request, timeout_s or self.timeouts.generate_s)

    async def complete(
        self,
        deployment_id: str,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Generates one sequence and waits for its end. Takes the arguments of `generate`.

        Raises:
            ValueError: `num_sequences` is more than 1.
        """
        if options.get("num_sequences", 1) > 1:
            raise ValueError("complete returns one sequence; complete_sequences returns all")
        async with self.generate(deployment_id, prompt, timeout_s=timeout_s, **options) as events:
            return await collect(events)

    async def complete_sequences(
        self,
        deployment_id: str,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Generates `num_sequences` sequences and waits for the end of all; returns them by index.

        Takes the arguments of `generate`, whose events also tell what other sequences had when one failed.
        """
        async with self.generate(deployment_id, prompt, timeout_s=timeout_s, **options) as events:
            return await collect_sequences(events)

    async def embed(
        self,
        deployment_id: str,
        prompts: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = False,
        adapter: str = "",
        cache_salt: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> list[generation_pb2.Embedding]:
        """Turns prompts into vectors, by a deployment whose `embeddings` is true.

        Args:
            deployment_id: Deployment to use.
            prompts: Texts or token ids, at most the deployment's `max_num_sequences`.
            pooling: Which hidden state stands for a prompt. Default `last`.
            normalize: Divide each vector by its length.
            adapter: Adapter that changes the model. Default: none.
            cache_salt: Share cached prefixes with requests of the same salt only.
            request_id: Id for `abort` and logs. Default: the server chooses one.
            timeout_s: Deadline, in seconds. Default: `timeouts.generate_s`.
        """
        request = generation_pb2.EmbedRequest(
            deployment_id=deployment_id,
            request_id=request_id,
            pooling=generation_pb2.Pooling.ValueType(enum_number(generation_pb2.Pooling.DESCRIPTOR, pooling)),
            normalize=normalize,
            adapter=adapter,
            cache_salt=cache_salt,
            inputs=[generation_pb2.EmbedInput(**prompt_fields(prompt)) for prompt in prompts],
        )
        timeout_s = timeout_s or self.timeouts.generate_s
        return [*(await self._ask(self._generation.Embed, request, timeout_s)).embeddings]

    async def abort(self, deployment_id: str, request_id: str) -> str:
        """Ends a request; returns `aborted`, or `already_finished` if no such request runs."""
        request = generation_pb2.AbortRequest(deployment_id=deployment_id, request_id=request_id)
        response = await self._ask(self._generation.Abort, request, self.timeouts.change_s)
        return enum_name(generation_pb2.AbortResponse.Outcome.DESCRIPTOR, response.outcome)

    async def tokenize(self, deployment_id: str, prompt: str | generation_pb2.Chat) -> list[int]:
        """Converts text or a conversation to the token ids that `generate` would use."""
        request = generation_pb2.TokenizeRequest(deployment_id=deployment_id, **prompt_fields(prompt))
        return [*(await self._ask(self._generation.Tokenize, request, self.timeouts.read_s)).token_ids]

    async def detokenize(
        self, deployment_id: str, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None
    ) -> str:
        """Converts token ids to text, without special tokens unless `skip_special_tokens` is False."""
        request = generation_pb2.DetokenizeRequest(
            deployment_id=deployment_id, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return (await self._ask(self._generation.Detokenize, request, self.timeouts.read_s)).text

    async def load_bundle(
        self,
        ref: str,
        deployment_id: str,
        *,
        cores: Sequence[int] = (),
        threads_per_core: int | None = None,
        follow_alias: bool = False,
        target_inter_token_latency_s: float | None = None,
        on_progress: OnProgress = lambda _: None,
        timeout_s: float | None = None,
    ) -> runtime_pb2.Deployment:
        """Loads a bundle and waits until it serves. If the caller cancels this call, loading continues.

        If the bundle has no weights, its deployment awaits `load_weights`.

        Args:
            ref: Bundle reference.
            deployment_id: Id of the new deployment.
            cores: Cores to use, as many as the bundle has ranks; empty lets the server choose.
            threads_per_core: Number of threads of each rank. Default: the server's.
            follow_alias: Whenever the alias moves, load the weights of the version that it names; `ref` must be
                NAME@ALIAS.
            target_inter_token_latency_s: Time between two tokens of a sequence, in seconds, a chunk of another one's
                prompt included, that chunks are chosen for. Default: the server's.
            on_progress: Called with every progress event.
            timeout_s: Deadline, in seconds. Default: `timeouts.load_s`.
        """
        request = runtime_pb2.LoadBundleRequest(
            ref=ref,
            deployment_id=deployment_id,
            cores=cores,
            threads_per_core=threads_per_core,
            follow_alias=follow_alias,
        )
        if target_inter_token_latency_s is not None:
            request.target_inter_token_latency.FromNanoseconds(round(target_inter_token_latency_s * 1e9))
        async with self._stream(self._runtime.LoadBundle, request, timeout_s or self.timeouts.load_s) as events:
            async for event in events:
                if event.WhichOneof("event") == "deployment":
                    return event.deployment
                on_progress(event.progress)
        raise StreamIncomplete("no deployment")

    async def unload_bundle(
        self, deployment_id: str, *, in_flight: InFlight | None = None
    ) -> runtime_pb2.UnloadBundleResponse:
        """Ends a deployment and frees its cores."""
        request = runtime_pb2.UnloadBundleRequest(
            deployment_id=deployment_id, in_flight_policy=_in_flight_policy(in_flight)
        )
        return await self._ask(self._runtime.UnloadBundle, request, self.timeouts.change_s)

    async def load_weights(
        self,
        deployment_id: str,
        ref: str,
        *,
        role: Role | None = None,
        in_flight: InFlight | None = None,
        kv: KvPolicy | None = None,
        keep_old: bool = False,
        on_progress: OnProgress = lambda _: None,
        timeout_s: float | None = None,
    ) -> runtime_pb2.LoadWeightsResult:
        """Replaces the weights of a deployment with those of another bundle of the same graph ABI.

        Args:
            deployment_id: Deployment to change.
            ref: Reference of the bundle that has the weights.
            role: Role whose weights change.
            in_flight: Policy for running requests. Default `wait`.
            kv: Policy for cached keys and values. Default `invalidate`.
            keep_old: Keep the old weights mapped, so that loading them again reads no file.
            on_progress: Called with every progress event.
            timeout_s: Deadline, in seconds. Default: `timeouts.load_s`.
        """
        request = runtime_pb2.LoadWeightsRequest(
            deployment_id=deployment_id,
            ref=ref,
            role=runtime_pb2.Role.ValueType(enum_number(runtime_pb2.Role.DESCRIPTOR, role)),
            in_flight_policy=_in_flight_policy(in_flight),
            kv_policy=runtime_pb2.KvPolicy.ValueType(enum_number(runtime_pb2.KvPolicy.DESCRIPTOR, kv)),
            keep_old_weights=keep_old,
        )
        async with self._stream(self._runtime.LoadWeights, request, timeout_s or self.timeouts.load_s) as events:
            async for event in events:
                if event.WhichOneof("event") == "result":
                    return event.result
                on_progress(event.progress)
        raise StreamIncomplete("no result")

    async def load_adapter(
        self, deployment_id: str, ref: str, *, name: str = "", replace: bool = False, timeout_s: float | None = None
    ) -> runtime_pb2.Adapter:
        """Lets the caller's requests name the adapter of a bundle.

        Args:
            deployment_id: The deployment.
            ref: Reference of the bundle that has the adapter.
            name: What requests call it. Default: its name in the bundle.
            replace: If the name is the caller's and means another adapter, let it mean this one.
            timeout_s: Deadline, in seconds. Default: `timeouts.load_s`.
        """
        request = runtime_pb2.LoadAdapterRequest(deployment_id=deployment_id, ref=ref, name=name, replace=replace)
        return (await self._ask(self._runtime.LoadAdapter, request, timeout_s or self.timeouts.load_s)).adapter

    async def unload_adapter(self, deployment_id: str, name: str) -> runtime_pb2.UnloadAdapterResponse:
        """Takes the name from an adapter that the caller has loaded; requests that use it go on."""
        request = runtime_pb2.UnloadAdapterRequest(deployment_id=deployment_id, name=name)
        return await self._ask(self._runtime.UnloadAdapter, request, self.timeouts.change_s)

    async def list_adapters(self, deployment_id: str) -> runtime_pb2.ListAdaptersResponse:
        """Lists the adapters that the caller's requests can name, ordered by name, and counts the ranks' slots."""
        request = runtime_pb2.ListAdaptersRequest(deployment_id=deployment_id)
        return await self._ask(self._runtime.ListAdapters, request, self.timeouts.read_s)

    async def reset_kv_cache(
        self,
        deployment_id: str,
        *,
        in_flight: InFlight | None = None,
        prefix_cache: bool = False,
        session_id: str | None = None,
    ) -> runtime_pb2.ResetKVCacheResponse:
        """Clears the KV cache of a deployment; returns the receipt.

        Args:
            deployment_id: The deployment.
            in_flight: What the runtime does about running requests; only without `prefix_cache` and `session_id`.
            prefix_cache: Clear only what later requests could share of earlier ones; running requests go on.
            session_id: Clear only this session of the caller, and forget it; running requests go on.

        Raises:
            ValueError: `prefix_cache` and `session_id` are both set.
        """
        if prefix_cache and session_id is not None:
            raise ValueError("prefix_cache and session_id exclude each other")
        request = runtime_pb2.ResetKVCacheRequest(
            deployment_id=deployment_id, in_flight_policy=_in_flight_policy(in_flight)
        )
        if prefix_cache:
            request.prefix_cache.SetInParent()
        if session_id is not None:
            request.session.session_id = session_id
            request.session.SetInParent()
        return await self._ask(self._runtime.ResetKVCache, request, self.timeouts.change_s)

    async def list_sessions(self, deployment_id: str) -> list[runtime_pb2.Session]:
        """Lists the caller's sessions with a deployment, ordered by id."""
        request = runtime_pb2.ListSessionsRequest(deployment_id=deployment_id)
        return [*(await self._ask(self._runtime.ListSessions, request, self.timeouts.read_s)).sessions]

    async def list_deployments(self) -> list[runtime_pb2.Deployment]:
        """Lists every deployment, ordered by id."""
        request = runtime_pb2.ListDeploymentsRequest()
        return [*(await self._ask(self._runtime.ListDeployments, request, self.timeouts.read_s)).deployments]

    async def get_deployment(self, deployment_id: str) -> runtime_pb2.Deployment:
        """Returns the state of one deployment."""
        request = runtime_pb2.GetDeploymentRequest(deployment_id=deployment_id)
        return (await self._ask(self._runtime.GetDeployment, request, self.timeouts.read_s)).deployment

    async def get_server_info(self) -> runtime_pb2.GetServerInfoResponse:
        """Returns version, target, cores and memory of the server."""
        return await self._ask(self._runtime.GetServerInfo, runtime_pb2.GetServerInfoRequest(), self.timeouts.read_s)


def _in_flight_policy(name: InFlight | None) -> runtime_pb2.InFlightPolicy.ValueType:
    return runtime_pb2.InFlightPolicy.ValueType(enum_number(runtime_pb2.InFlightPolicy.DESCRIPTOR, name))
