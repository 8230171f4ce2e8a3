"""One deployment: a bundle on its cores, from the first stage of its load to its end."""

from __future__ import annotations

import asyncio
import enum
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from bundle.errors import FieldViolation, KilnError
from runtime_svc.admission import GenerationCall, admit, check_call, check_prompt, check_token_ids, prompt_field
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.capabilities import Capabilities
from runtime_svc.deployments.progress import ProgressFeed
from runtime_svc.engine.engine import Engine, EngineState
from runtime_svc.engine.streams import OutputStream
from runtime_svc.errors import DeploymentNotReady, FeatureNotServed, RequestInvalid
from runtime_svc.text.chat_template import ChatTemplateError
from runtime_svc.text.codec import TextCodec
from runtime_svc.text.prompt import Prompt


class DeploymentState(enum.Enum):
    """Life of a deployment; the API explains each."""

    LOADING = enum.auto()
    READY = enum.auto()
    RECOVERING = enum.auto()
    UNLOADING = enum.auto()
    FAILED = enum.auto()


_ENGINE_STATES = {
    EngineState.READY: DeploymentState.READY,
    EngineState.RECOVERING: DeploymentState.RECOVERING,
    EngineState.FAILED: DeploymentState.FAILED,
}


@dataclass(frozen=True, slots=True)
class Serving:
    """What a loaded deployment serves with."""

    engine: Engine
    text: TextCodec


class Deployment:
    """One deployment. The registry moves it through its states."""

    def __init__(
        self, deployment_id: str, bundle: ResolvedBundle, capabilities: Capabilities, cores: tuple[int, ...]
    ) -> None:
        """Begins as LOADING, on cores that are reserved."""
        self.deployment_id = deployment_id
        self.bundle = bundle
        self.cores = cores
        self.capabilities = capabilities
        self.created_at_s = time.time()
        self.progress = ProgressFeed()
        #: Held while weights are loaded.
        self.weights_lock = asyncio.Lock()
        self.is_unloading = False
        self._serving: Serving | None = None
        self._load_failure: KilnError | None = None

    @property
    def state(self) -> DeploymentState:
        """Where it is in its life."""
        if self.is_unloading:
            return DeploymentState.UNLOADING
        if self._load_failure is not None:
            return DeploymentState.FAILED
        return DeploymentState.LOADING if self._serving is None else _ENGINE_STATES[self._serving.engine.state]

    @property
    def failure(self) -> KilnError | None:
        """Why it is FAILED."""
        return self._load_failure or (self._serving.engine.failure if self._serving is not None else None)

    @property
    def engine(self) -> Engine | None:
        """The engine, None before the load has ended."""
        return None if self._serving is None else self._serving.engine

    def succeed(self, serving: Serving) -> None:
        """The load ended well."""
        self._serving = serving
        self.progress.close()

    def fail(self, error: KilnError) -> None:
        """The load failed."""
        self._load_failure = error
        self.progress.close()

    def require_serving(self, *, while_recovering: bool = True) -> Serving:
        """What it serves with.

        Args:
            while_recovering: Requests may queue while ranks restart; other calls cannot use them then.

        Raises:
            DeploymentNotReady: It does not serve now.
        """
        states = {DeploymentState.READY} | ({DeploymentState.RECOVERING} if while_recovering else set())
        if self._serving is None or self.state not in states:
            raise DeploymentNotReady(self.deployment_id, self.state.name, str(self.failure or ""))
        return self._serving

    async def generate(self, call: GenerationCall, *, deadline_s: float | None) -> OutputStream:
        """Checks, tokenizes and queues a call.

        Args:
            call: As the client sent it.
            deadline_s: When to end it, by the event loop's clock.

        Raises:
            DeploymentNotReady, RequestInvalid, FeatureNotServed, PromptTooLong, RequestIdInUse, QueueFull: As named.
        """
        self.require_serving()
        check_call(call, self.capabilities)
        assert call.prompt is not None
        now_s = asyncio.get_running_loop().time()
        token_ids = await self._encode(call.prompt)
        # Things may have changed while a thread tokenized.
        serving = self.require_serving()
        request_id = call.request_id or f"req-{uuid.uuid4().hex}"
        request = admit(call, token_ids, self.capabilities, request_id=request_id, now_s=now_s)
        return serving.engine.submit(request, serving.text.sequence_text(call.stop_strings), deadline_s=deadline_s)

    async def tokenize(self, prompt: Prompt | None) -> list[int]:
        """Token ids that a prompt stands for.

        Raises:
            DeploymentNotReady, RequestInvalid, FeatureNotServed: As named.
        """
        self.require_serving()
        check_prompt(prompt, self.capabilities)
        assert prompt is not None
        return await self._encode(prompt)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids.

        Raises:
            DeploymentNotReady, RequestInvalid, FeatureNotServed: As named.
        """
        tokenizer = self.require_serving().text.tokenizer
        check_token_ids("token_ids", token_ids, self.capabilities)
        if tokenizer is None:
            raise FeatureNotServed([FieldViolation("token_ids", "set", "nothing: the bundle has no tokenizer")])
        return await asyncio.to_thread(tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)

    async def _encode(self, prompt: Prompt) -> list[int]:
        try:
            return await asyncio.to_thread(self.require_serving().text.encode, prompt)
        except ChatTemplateError as error:
            violation = FieldViolation(prompt_field(prompt), str(error), "what the bundle's chat template takes")
            raise RequestInvalid([violation]) from error
