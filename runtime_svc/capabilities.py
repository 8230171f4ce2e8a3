"""What a request may ask of a deployment, read off its manifest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bundle.manifest import Manifest
from runtime_svc.engine.buckets import BucketTable


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """Sampling values of a request that sets none."""

    temperature: float
    top_k: int
    top_p: float

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always picked."""
        return self.temperature == 0 or self.top_k == 1

    def is_close(self, other: DefaultSampling) -> bool:
        """Whether both pick tokens alike; clients send float32, manifests hold what the configuration said."""
        if self.is_greedy or other.is_greedy:
            return self.is_greedy and other.is_greedy
        return (
            math.isclose(self.temperature, other.temperature, rel_tol=1e-6)
            and self.top_k == other.top_k
            and math.isclose(self.top_p, other.top_p, rel_tol=1e-6)
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a request may ask; the API explains each."""

    max_context_length: int
    max_length: int
    max_new_tokens: int | None
    max_batch_size: int
    vocab_size: int
    dynamic_sampling: bool
    max_top_k: int
    logprobs: bool
    text: bool
    chat: bool
    default_sampling: DefaultSampling
    eos_token_ids: tuple[int, ...]
    input_capture: bool

    @classmethod
    def from_manifest(cls, manifest: Manifest, *, input_capture: bool = False) -> Capabilities:
        """Capabilities of a bundle.

        Args:
            manifest: Has executables.
            input_capture: Whether this runtime has a directory for captured inputs.

        Raises:
            ManifestInvalid: Its executables do not cover what its limits promise.
        """
        limits, sampling, tokenizer = manifest.limits, manifest.sampling, manifest.tokenizer
        largest_prompt = BucketTable.from_manifest(manifest).max_prompt_tokens
        has_logits = all("logits" in executable.flags for executable in manifest.executables)
        return cls(
            # A sequence has at least one generated token.
            max_context_length=min(limits.max_context_length, largest_prompt, limits.max_length - 1),
            max_length=limits.max_length,
            max_new_tokens=limits.max_new_tokens,
            max_batch_size=min(manifest.state.num_slots, limits.tkg_batch_size),
            vocab_size=manifest.tokens.vocab_size,
            dynamic_sampling=sampling.dynamic,
            max_top_k=sampling.global_topk,
            logprobs=has_logits or sampling.mode == "host",
            text=tokenizer is not None,
            chat=tokenizer is not None and tokenizer.chat_template is not None,
            default_sampling=DefaultSampling(sampling.temperature, sampling.top_k, sampling.top_p),
            eos_token_ids=manifest.tokens.eos,
            input_capture=input_capture,
        )
