"""The resolved configuration: frozen, every default filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class OnDeviceSamplingConfig:
    """How the executable picks tokens.

    Attributes:
        do_sample: Whether a request that does not choose is sampled; otherwise it is greedy.
        top_k: Candidates kept; 0 keeps all that `global_topk` considers.
        top_p: Probability mass kept, in (0, 1].
        temperature: Divides the logits; 0 is greedy.
        dynamic: Whether requests choose top_k, top_p and temperature; otherwise they are baked in.
        deterministic: Whether 0.5 replaces the uniform random number.
        global_topk: Candidates considered; 0 considers the whole vocabulary.
    """

    do_sample: bool
    top_k: int
    top_p: float
    temperature: float
    dynamic: bool
    deterministic: bool
    global_topk: int

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, as NxD Inference has it without `do_sample` and `dynamic`."""
        return not (self.do_sample or self.dynamic)


@dataclass(frozen=True, kw_only=True)
class NeuronConfig:
    """Compile-time options; lengths in tokens. See `kiln.config.v1.NeuronConfig` for each attribute.

    `context_encoding_buckets` and `token_generation_buckets` are the buckets that are compiled, whether listed,
    generated, or the one of a configuration without bucketing. `max_new_tokens` None means no limit of its own.
    """

    batch_size: int
    padding_side: Literal["right"]
    seq_len: int
    max_context_length: int
    max_new_tokens: int | None
    max_length: int
    n_active_tokens: int
    n_positions: int
    torch_dtype: DType
    rpl_reduce_dtype: DType | None
    cast_type: Literal["config"]
    async_mode: bool
    save_sharded_checkpoint: bool
    skip_sharding: bool
    logical_nc_config: int
    skip_warmup: bool
    tp_degree: int
    fused_qkv: bool
    on_device_sampling_config: OnDeviceSamplingConfig | None
    output_logits: bool
    enable_bucketing: bool
    context_encoding_buckets: tuple[int, ...]
    token_generation_buckets: tuple[int, ...]
    is_continuous_batching: bool
    max_batch_size: int
    ctx_batch_size: int
    tkg_batch_size: int

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that some bucket takes, and that is a whole sequence at most."""
        return min(self.max_context_length, self.context_encoding_buckets[-1], self.longest_sequence)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, prompt and generated, that some bucket takes."""
        return min(self.seq_len, self.token_generation_buckets[-1])


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """What to compile, beside the model's own attributes."""

    neuron_config: NeuronConfig

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON's types, for the manifest and for cache keys."""
        document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return document
