"""The resolved compile-time options: frozen, every default filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compiler_svc.config.lora_serving_config import LoraServingConfig
from compiler_svc.config.on_device_sampling_config import OnDeviceSamplingConfig

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class NeuronConfig:
    """Compile-time options; lengths in tokens. See `kiln.config.v1.NeuronConfig` for each attribute.

    `context_encoding_buckets`, `token_generation_buckets` and, with prefix caching, `prefix_buckets` are the buckets
    that are compiled, whether listed, generated, or the one of a configuration without bucketing. `max_new_tokens`
    None means no limit of its own. `scratchpad_page_size` is in MiB.
    """

    # General
    batch_size: int
    padding_side: Literal["right", "left"]
    seq_len: int
    max_context_length: int
    max_new_tokens: int | None
    max_length: int
    n_active_tokens: int
    n_positions: int
    torch_dtype: DType
    rpl_reduce_dtype: DType | None
    cast_type: Literal["config", "as-declared"]
    async_mode: bool
    save_sharded_checkpoint: bool
    skip_sharding: bool
    logical_nc_config: int
    skip_warmup: bool
    weights_to_skip_layout_optimization: tuple[str, ...]
    scratchpad_page_size: int | None
    allow_input_truncation: bool
    tp_degree: int
    cc_pipeline_tiling_factor: int
    output_logits: bool
    # Buckets and batches
    enable_bucketing: bool
    context_encoding_buckets: tuple[int, ...]
    token_generation_buckets: tuple[int, ...]
    prefix_buckets: tuple[int, ...]
    token_generation_batches: tuple[int, ...]
    is_continuous_batching: bool
    max_batch_size: int
    ctx_batch_size: int
    tkg_batch_size: int
    # Attention, KV cache and kernels
    fused_qkv: bool
    flash_decoding_enabled: bool
    sequence_parallel_enabled: bool
    qk_layernorm: bool
    attention_dtype: DType | None
    kv_cache_quant: bool
    is_block_kv_layout: bool
    pa_num_blocks: int
    pa_block_size: int
    is_prefix_caching: bool
    attn_kernel_enabled: bool | None
    qkv_kernel_enabled: bool
    mlp_kernel_enabled: bool
    quantized_mlp_kernel_enabled: bool
    rmsnorm_quantize_kernel_enabled: bool
    # Sampling
    on_device_sampling_config: OnDeviceSamplingConfig | None
    # Quantization
    quantized: bool
    quantized_checkpoints_path: str | None
    quantization_dtype: Literal["int8", "f8e4m3", "f8e5m2"]
    quantization_type: Literal["per_tensor_symmetric", "per_channel_symmetric"]
    modules_to_not_convert: tuple[str, ...]
    draft_model_modules_to_not_convert: tuple[str, ...]
    # Speculation
    speculation_length: int
    spec_batch_size: int
    enable_eagle_speculation: bool
    enable_eagle_draft_input_norm: bool
    is_eagle_draft: bool
    enable_fused_speculation: bool
    is_medusa: bool
    medusa_speculation_length: int
    num_medusa_heads: int
    medusa_tree: tuple[tuple[int, ...], ...]
    # Adapters
    lora_config: LoraServingConfig | None

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that some bucket takes, and that is a whole sequence at most."""
        longest = min(self.max_context_length, self.n_active_tokens)
        return min(longest, self.context_encoding_buckets[-1], self.longest_sequence)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, prompt and generated, that some bucket takes."""
        return min(self.seq_len, self.n_positions, self.token_generation_buckets[-1])

    @property
    def logical_neuron_cores(self) -> int:
        """Former name of `logical_nc_config`."""
        return self.logical_nc_config

    @property
    def trace_tokengen_model(self) -> bool:
        """Whether the token_generation submodel is compiled: without speculation."""
        return not (self.speculation_length or self.is_medusa or self.enable_fused_speculation)
