"""The capabilities of a deployment, which follow from its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from bundle.abi.inputs import PROMPT_LOGPROBS
from bundle.abi.outputs import EMBEDDINGS
from bundle.abi.submodels import SUBMODELS
from bundle.abi.tensor import DTYPES
from bundle.manifest import Executable, GenerationDefaults, Manifest
from execution.ranks.step_memory import max_top_logprobs
from execution.sampling_parameters import CHOSEN, SamplingParams
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.request import SessionLimits, StallTimeouts
from runtime_svc.engine.scheduler.buckets import BucketTable

#: Features that every deployment of this runtime has.
MAX_STOP_STRINGS: Final = 16
MAX_STOP_TOKEN_IDS: Final = 1024
#: Names of adapters that capabilities list.
MAX_ADAPTERS: Final = 1000
#: Size of the largest logits of one token. By default gRPC clients take messages of 4 MiB; some room is for the rest.
MAX_LOGITS_BYTES: Final = (4 << 20) - (64 << 10)


@dataclass(frozen=True, slots=True)
class SubmodelShapes:
    """The static shapes of one submodel: rows of a step, and buckets in tokens, smallest first."""

    submodel: str
    batch_size: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features and limits that a request may use; the API explains each.

    `async_mode` is true whatever the configuration says: the engine always writes the output of a step while the next
    one runs, and if executables pick tokens, it calls the one after that meanwhile. `adapters` are
    those of the bundle, the first of many; `speculation_length` says that the runtime speculates in no deployment.
    """

    max_context_length: int
    max_length: int
    max_new_tokens: int | None
    max_batch_size: int
    vocab_size: int
    dynamic_sampling: bool
    max_top_k: int
    logprobs: bool
    max_logprobs: int
    logits: bool
    prompt_logprobs: bool
    embeddings: bool
    text: bool
    chat: bool
    #: The sampling values of a request that sets none; its seed stands for a random one.
    default_sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    input_capture: bool
    input_truncation: bool
    padding_side: Literal["right", "left"]
    submodels: tuple[SubmodelShapes, ...]
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_token_ids: int = MAX_STOP_TOKEN_IDS
    async_mode: bool = True
    adapters: tuple[str, ...] = ()
    adapter_slots: int = 0
    speculation_length: int = 0
    chat_templates: tuple[str, ...] = ()
    logit_processors: bool = False
    constraints: bool = False
    prefix_caching: bool = False
    sessions: bool = False
    max_num_sequences: int = 1
    session_limits: SessionLimits = field(default_factory=SessionLimits)
    stall_timeouts: StallTimeouts = field(default_factory=StallTimeouts)

    @classmethod
    def from_manifest(
        cls,
        manifest: Manifest,
        *,
        input_capture: bool = False,
        engine: EngineConfig | None = None,
    ) -> Capabilities:
        """Reads the capabilities off a manifest and `engine`, this runtime's bounds; None for the default ones."""
        limits, sampling, tokenizer = manifest.limits, manifest.sampling, manifest.tokenizer
        engine = engine or EngineConfig()
        buckets = BucketTable.from_manifest(manifest)
        has_logits = all("logits" in executable.flags for executable in manifest.executables)
        is_left_padded = any("left_padded" in executable.flags for executable in buckets.context_encoding)
        vocab_size = manifest.tokens.vocab_size
        return cls(
            # A sequence has at least one generated token.
            max_context_length=min(limits.max_context_length, buckets.max_prompt_tokens, limits.max_length - 1),
            max_length=limits.max_length,
            max_new_tokens=limits.max_new_tokens,
            max_batch_size=buckets.max_sequences,
            vocab_size=vocab_size,
            dynamic_sampling=sampling.dynamic,
            max_top_k=sampling.global_topk,
            logprobs=has_logits,
            max_logprobs=max_top_logprobs(manifest) if has_logits else 0,
            logits=has_logits and vocab_size * DTYPES["float32"].size_bytes <= MAX_LOGITS_BYTES,
            prompt_logprobs=all(PROMPT_LOGPROBS in one.flags for one in buckets.context_encoding),
            embeddings=all(EMBEDDINGS in one.flags for one in buckets.context_encoding),
            text=tokenizer is not None,
            chat=tokenizer is not None and bool(tokenizer.all_templates),
            chat_templates=() if tokenizer is None else tuple(sorted(tokenizer.all_templates)),
            logit_processors=manifest.serves_processors,
            constraints=manifest.serves_processors and tokenizer is not None and bool(manifest.tokens.eos),
            default_sampling=_default_sampling_of(manifest),
            eos_token_ids=manifest.tokens.eos,
            input_capture=input_capture,
            input_truncation=manifest.serving.input_truncation,
            padding_side="left" if is_left_padded else "right",
            prefix_caching=manifest.serving.prefix_caching,
            # A session goes on behind at least one token.
            sessions=buckets.find_room(1) > 0,
            # More could never be queued.
            max_num_sequences=min(engine.max_call_sequences, engine.queue_capacity + buckets.max_sequences),
            adapters=tuple(sorted(adapter.name for adapter in manifest.adapters)[:MAX_ADAPTERS]),
            adapter_slots=manifest.num_adapter_slots,
            stall_timeouts=engine.stall_timeouts,
            session_limits=engine.session_limits,
            submodels=tuple(map(_shapes_of, (buckets.context_encoding, buckets.token_generation))),
        )


def _default_sampling_of(manifest: Manifest) -> SamplingParams:
    named = msgspec.structs.asdict(manifest.serving.generation or GenerationDefaults())
    own = {name: getattr(manifest.sampling, name) for name in CHOSEN}
    chosen = own | {name: value for name, value in named.items() if value is not None}
    return SamplingParams(**chosen | {"top_k": max(chosen["top_k"], 0)})


def _shapes_of(executables: Sequence[Executable]) -> SubmodelShapes:
    largest = executables[-1]
    dimension = -1 if SUBMODELS[largest.submodel].bucket == "positions" else 0
    tokens = sorted({one.bucket[dimension] for one in executables})
    return SubmodelShapes(largest.submodel, largest.batch_size, tuple(tokens))
