"""One deployment: a bundle on its cores, from the first stage of its load until it is unloaded."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar

from bundle.errors import FieldViolation, KilnError
from execution.text.errors import TextLimitExceeded, TextRefused
from execution.text.prompt import ChatPrompt, Prompt, PromptSize, TextPrompt, prompt_size
from runtime_svc.admission.calls import (
    GenerationCall,
    admit,
    check_call,
    check_num_token_ids,
    check_prompt,
    check_prompt_size,
    check_token_ids,
    prompt_field,
)
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.admission.limits import RequestLimits
from runtime_svc.admission.output import compile_output
from runtime_svc.admission.quotes import MAX_QUOTED_CHARS
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.captures.directory import CaptureDirectory, CapturingStream, PendingCapture
from runtime_svc.deployments.adapter_names import AdapterFiles, AdapterNames
from runtime_svc.deployments.deployment_spec import DeploymentDefaults, DeploymentSpec, Origin
from runtime_svc.deployments.errors import AdapterNotFound
from runtime_svc.deployments.followed import FollowedVersion
from runtime_svc.deployments.memory import CoreMemory, HeldWeights, MemoryNeed
from runtime_svc.deployments.progress import ProgressFeed
from runtime_svc.deployments.records import DeploymentRecord, WeightsRecord
from runtime_svc.engine.engine import Engine, EngineState
from runtime_svc.engine.prompt_reports import PromptLogprobs
from runtime_svc.engine.request import Adapter, Request
from runtime_svc.engine.streams import MergedStream, OutputStream
from runtime_svc.errors import DeploymentNotReady, FeatureNotServed, PromptLimitExceeded, RequestInvalid
from runtime_svc.text.codec import TextCodec
from runtime_svc.text.text_queue import TextWorkers

ConvertedT = TypeVar("ConvertedT")


class DeploymentState(enum.Enum):
    """Life of a deployment; the API explains each."""

    LOADING = enum.auto()
    READY = enum.auto()
    RECOVERING = enum.auto()
    UNLOADING = enum.auto()
    FAILED = enum.auto()
    AWAITING_WEIGHTS = enum.auto()


_ENGINE_STATES = {
    EngineState.READY: DeploymentState.READY,
    EngineState.RECOVERING: DeploymentState.RECOVERING,
    EngineState.FAILED: DeploymentState.FAILED,
}

#: What errors say that a prompt may be.
_ACCEPTED: Final[Mapping[type, str]] = MappingProxyType(
    {
        ChatPrompt: "what the bundle's chat template takes",
        TextPrompt: "what the bundle's tokenizer takes",
    }
)


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts that a loaded deployment serves with."""

    engine: Engine
    text: TextCodec
    capabilities: Capabilities
    workers: TextWorkers
    limits: RequestLimits
    #: Gives the engine the adapter that a caller names, if it is of an earlier process; see `adapters.open_adapter`.
    open_adapter: Callable[[str, str], Awaitable[None]]
    captures: CaptureDirectory | None = None


class Deployment:
    """One deployment. The registry moves it through its states."""

    def __init__(self, spec: DeploymentSpec, origin: Origin, defaults: DeploymentDefaults) -> None:
        self.spec = spec
        self.origin = origin
        self.threads_per_core = spec.threads_per_core or defaults.threads_per_core
        #: In seconds; None if chunks are chosen for no time.
        self.target_inter_token_latency_s = spec.target_inter_token_latency_s or defaults.target_inter_token_latency_s
        self.created_at_s = time.time()
        #: Digest of the bundle whose executables run; None until the reference is resolved.
        self.digest: str | None = None
        #: The version, `NAME:vN`, as which it was found first; empty if its source told none.
        self.version = ""
        #: The bundle; None until the reference is resolved.
        self.bundle: ResolvedBundle | None = None
        #: The weights in use, or to use once the deployment is loaded; None while weights are awaited.
        self.weights: WeightsRecord | None = None
        #: Weights that ranks keep mapped beside those in use; None if there are none.
        self.old_weights: HeldWeights | None = None
        #: What requests may ask for; None until the bundle is resolved and its resources are reserved.
        self.capabilities: Capabilities | None = None
        #: The cores that it holds.
        self.cores: tuple[int, ...] = ()
        #: The cores that it had in an earlier process.
        self.preferred_cores: tuple[int, ...] = ()
        #: The memory that it holds: for the state, and for the weights.
        self.state_memory = MemoryNeed()
        self.weights_memory = MemoryNeed()
        #: The memory of its cores; None if they have none of their own, or it holds none.
        self.core_memory: CoreMemory | None = None
        #: The last error of a load that retries; None once the load has ended.
        self.last_error: KilnError | None = None
        #: What the followed alias named when it was looked up last.
        self.followed = FollowedVersion()
        self.progress = ProgressFeed()
        #: A weight load holds it.
        self.weights_lock = asyncio.Lock()
        #: The adapters that requests can name. An earlier process may have loaded some that the engine lacks.
        self.adapters = AdapterNames()
        #: What gives a name its adapter holds it.
        self.adapters_lock = asyncio.Lock()
        #: The files that the engine writes into slots, by the adapter's digest; some it needs no more.
        self.adapter_files: dict[str, AdapterFiles] = {}
        self.is_unloading = False
        #: Called after its state, or what it follows, has changed.
        self.on_state_changed: Callable[[], None] = lambda: None
        #: Whether it has given back its cores and memory.
        self.is_gone = False
        self._recorded_epoch = 0
        self._should_be_ready = origin is Origin.FILE
        self._serving: Serving | None = None
        self._load_failure: KilnError | None = None

    @classmethod
    def from_record(cls, record: DeploymentRecord, defaults: DeploymentDefaults) -> Deployment:
        """Makes the deployment that an earlier process recorded, without its adapters."""
        deployment = cls(record.spec, record.origin, defaults)
        deployment.created_at_s = record.created_at_s
        deployment.digest, deployment.version = record.digest, record.version
        deployment.weights = record.weights
        deployment.preferred_cores = record.cores
        deployment._recorded_epoch = record.weight_epoch
        deployment._should_be_ready = True
        return deployment

    def to_record(self) -> DeploymentRecord:
        """Returns the record that lets the next process load it again. Its bundle must be resolved."""
        assert self.digest is not None
        return DeploymentRecord(
            spec=self.spec,
            origin=self.origin,
            digest=self.digest,
            version=self.version,
            cores=self.cores or self.preferred_cores,
            weights=self.weights,
            weight_epoch=self.weight_epoch,
            created_at_s=self.created_at_s,
        )

    @property
    def deployment_id(self) -> str:
        """The id that clients address it by."""
        return self.spec.deployment_id

    @property
    def weight_epoch(self) -> int:
        """Epoch of the weights in use, or to use once the deployment is loaded; 0 while weights are awaited."""
        return self._recorded_epoch if self.engine is None else self.engine.weight_epoch

    @property
    def followed_alias(self) -> str:
        """The alias that the weights follow; empty if they follow none."""
        return self.spec.ref if self.spec.follow_alias else ""

    @property
    def state(self) -> DeploymentState:
        """The state that clients see."""
        if self.is_unloading:
            return DeploymentState.UNLOADING
        if self._load_failure is not None:
            return DeploymentState.FAILED
        if self._serving is None:
            return DeploymentState.LOADING
        state = _ENGINE_STATES[self._serving.engine.state]
        is_awaiting = state is DeploymentState.READY and not self._serving.engine.weight_epoch
        return DeploymentState.AWAITING_WEIGHTS if is_awaiting else state

    @property
    def is_missing(self) -> bool:
        """Whether it should be READY and is not.

        A declared or recorded deployment should be; one that a call loads should be once it has been READY.
        """
        return self._should_be_ready and self.state not in {DeploymentState.READY, DeploymentState.UNLOADING}

    @property
    def failure(self) -> KilnError | None:
        """The error that made it FAILED; None if it has not failed."""
        return self._load_failure or (self._serving.engine.failure if self._serving is not None else None)

    @property
    def trouble(self) -> str:
        """Why it failed, or what its load or its ranks wait for; empty if nothing is wrong."""
        shortage = None if self.engine is None else self.engine.shortage
        return str(self.failure or self.last_error or shortage or "")

    @property
    def engine(self) -> Engine | None:
        """The engine; None until the load has succeeded."""
        return None if self._serving is None else self._serving.engine

    @property
    def text(self) -> TextCodec | None:
        """What converts its text; None until the load has succeeded."""
        return None if self._serving is None else self._serving.text

    @property
    def bundle_digests(self) -> set[str]:
        """Digests of the bundles that it uses: the executables', the weights', and those of adapters.

        An adapter that has lost its name is used until its last request has ended.
        """
        digests = {self.digest, *(one.digest for one in (self.weights, self.old_weights) if one is not None)}
        digests |= {record.bundle_digest for record in self.adapters.list_owned()}
        if self.engine is not None:
            is_loaded = self.engine.scheduler.adapters.is_loaded
            digests |= {files.bundle_digest for digest, files in self.adapter_files.items() if is_loaded(digest)}
        return {digest for digest in digests if digest is not None}

    @property
    def request_limits(self) -> RequestLimits | None:
        """The sizes of requests that it takes, or will take once it is loaded; None until its bundle is found."""
        if self._serving is not None:
            return self._serving.limits
        return None if self.capabilities is None else RequestLimits.of(self.capabilities)

    def find(self, bundle: ResolvedBundle) -> None:
        """Pins the deployment to its resolved bundle, and takes the bundle's weights unless it has used others."""
        self.bundle, self.digest = bundle, bundle.digest
        self.version = self.version or bundle.version
        if not self._recorded_epoch and self.weights is None and bundle.manifest.has_weights:
            self.weights = WeightsRecord(ref=self.spec.ref, digest=bundle.digest, version=self.version)
            self._recorded_epoch = 1

    def succeed(self, serving: Serving) -> None:
        """The load has succeeded; the deployment serves with `serving`. The registry closes the progress."""
        self._serving = serving
        self.last_error = None
        serving.engine.on_state_changed = self._tell_state
        self._tell_state()

    def fail(self, error: KilnError) -> None:
        """Ends the load with an error; the deployment is FAILED."""
        self._load_failure = error
        self.last_error = None
        self.progress.close()
        self._tell_state()

    async def close(self) -> None:
        """Ends the processes that it serves with."""
        if self._serving is not None:
            await self._serving.engine.close()
            await self._serving.text.close()

    def begin_unload(self) -> None:
        """Makes it UNLOADING."""
        self.is_unloading = True
        self._tell_state()

    def require_serving(self, *, while_recovering: bool = True) -> Serving:
        """Returns the parts that it serves with; with `while_recovering`, also while ranks restart.

        Requests may queue then, other calls must not.
        """
        states = {DeploymentState.READY} | ({DeploymentState.RECOVERING} if while_recovering else set())
        if self._serving is None or self.state not in states or not self.weight_epoch:
            raise self._not_ready()
        return self._serving

    def require_loaded(self) -> Serving:
        """Returns the parts that it serves with, even if it awaits its first weights."""
        if self._serving is None or self.state not in {DeploymentState.READY, DeploymentState.AWAITING_WEIGHTS}:
            raise self._not_ready()
        return self._serving

    async def convert(self, sizes: Iterable[PromptSize], num_bytes: int, read: Callable[[], ConvertedT]) -> ConvertedT:
        """Converts a request none of whose prompts is too long; a large one in a thread."""
        serving = self.require_serving()
        for size in sizes:
            check_prompt_size(size, serving.limits)
        return await serving.workers.run_if_large(num_bytes, read)

    async def generate(
        self, call: GenerationCall, *, deadline_s: float | None
    ) -> OutputStream | MergedStream | CapturingStream:
        """Checks and tokenizes a Generate call, and queues its sequences, whose output the returned stream carries.

        The sequences end at `deadline_s`, in seconds of the event loop's clock; None for no deadline.
        """
        serving = self.require_serving()
        size = 0 if call.prompt is None else prompt_size(call.prompt)
        await serving.workers.run_if_large(size, check_call, call, serving.capabilities)
        assert call.prompt is not None
        now_s = asyncio.get_running_loop().time()
        constraint, mask = await compile_output(call.constraint, call.tool_choice, call.prompt, serving.text)
        token_ids = await self.encode(call.prompt)
        requests = admit(call, token_ids, serving.capabilities, now_s=now_s)
        if call.adapter:
            await serving.open_adapter(call.caller, call.adapter)
        pending = await self._begin_capture(requests[0])
        try:
            if isinstance(told := requests[0].report, PromptLogprobs):
                told.text = await serving.text.prompt_text(told.token_ids)
            # The deployment may have changed state while threads worked.
            serving = self.require_serving()
            adapter = self.find_adapter(call.caller, call.adapter, serving.engine)
            for request in requests:
                request.adapter = adapter
                request.constrained = serving.text.constrain(constraint, mask)
            texts = [serving.text.sequence_text(call.stop_strings, is_constrained=bool(constraint)) for _ in requests]
            stream = serving.engine.submit(requests, texts, deadline_s=deadline_s)
        except BaseException:
            if pending is not None:
                pending.cancel()
            raise
        return stream if pending is None else CapturingStream(stream, pending)

    async def tokenize(self, prompt: Prompt | None) -> Sequence[int]:
        """Returns the token ids of a prompt."""
        serving, size = self.require_serving(), 0 if prompt is None else prompt_size(prompt)
        await serving.workers.run_if_large(size, check_prompt, prompt, serving.capabilities)
        assert prompt is not None
        return await self.encode(prompt)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of token ids."""
        serving, num_ids = self.require_serving(), len(token_ids)
        check_num_token_ids("token_ids", num_ids, serving.limits)
        token_ids = list(token_ids)
        await serving.workers.run_if_large(num_ids, check_token_ids, "token_ids", token_ids, serving.capabilities)
        if not serving.text.has_tokenizer:
            raise FeatureNotServed([FieldViolation("token_ids", "set", "nothing: the bundle has no tokenizer")])
        try:
            return await serving.text.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except TextLimitExceeded as error:
            raise PromptLimitExceeded("token_ids", error.limit) from error

    def find_adapter(self, caller: str, name: str, engine: Engine) -> Adapter | None:
        """Returns the adapter that a name means for a caller; None if it is empty."""
        if not name:
            return None
        record = self.adapters.find(caller, name)
        adapter = None if record is None else engine.find_adapter(record.key)
        if adapter is None:
            accepted = self.adapters.list_accepted(caller)
            raise AdapterNotFound(self.deployment_id, "adapter", name[:MAX_QUOTED_CHARS], accepted)
        return adapter

    def _tell_state(self) -> None:
        self._should_be_ready |= self.state is DeploymentState.READY
        self.on_state_changed()

    async def _begin_capture(self, request: Request) -> PendingCapture | None:
        captures = self.require_serving().captures
        if request.capture is None or captures is None:
            return None
        return await captures.begin(
            request.capture,
            deployment_id=self.deployment_id,
            bundle=self.digest or "",
            request_id=request.request_id,
            owner=request.owner,
        )

    def _not_ready(self) -> DeploymentNotReady:
        is_awaiting = self.state is DeploymentState.AWAITING_WEIGHTS
        detail = "LoadWeights makes it ready" if is_awaiting else self.trouble
        return DeploymentNotReady(self.deployment_id, self.state.name, detail)

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Returns the tokens of a prompt that admission has checked."""
        try:
            return await self.require_serving().text.encode(prompt)
        except TextRefused as error:
            # Templates repeat what they refuse.
            violation = FieldViolation(prompt_field(prompt), error.detail, _ACCEPTED[type(prompt)], quotes_text=True)
            raise RequestInvalid([violation]) from error
        except TextLimitExceeded as error:
            raise PromptLimitExceeded(prompt_field(prompt), error.limit) from error
