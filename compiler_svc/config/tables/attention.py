"""NeuronConfig: attention, the KV cache and kernels."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import LATER, Attribute, hint, same_as
from compiler_svc.config.domains import Flag, Integer
from compiler_svc.config.tables.documents import ATTENTION, KERNELS, KV_QUANTIZATION, PREFIX_CACHING
from compiler_svc.config.tables.general import DTYPES

NO_KERNELS: Final = hint("the compiler chooses this target's kernels")
_WHOLE_PROMPTS: Final = hint("ranks of this target do not split prompts")


ATTENTION_ATTRIBUTES: Final = (
    Attribute(name="fused_qkv", domain=Flag(), default=False, section=ATTENTION, cpu=LATER),
    Attribute(name="flash_decoding_enabled", domain=Flag(), default=False, section=ATTENTION, cpu=LATER),
    Attribute(name="sequence_parallel_enabled", domain=Flag(), default=False, section=ATTENTION, cpu=_WHOLE_PROMPTS),
    Attribute(name="qk_layernorm", domain=Flag(), default=False, section=ATTENTION, cpu=LATER),
    Attribute(name="attention_dtype", domain=DTYPES, section=ATTENTION, cpu=LATER),
    Attribute(name="kv_cache_quant", domain=Flag(), default=False, section=KV_QUANTIZATION, cpu=LATER),
    Attribute(name="is_block_kv_layout", domain=Flag(), default=False, section=PREFIX_CACHING, cpu=LATER),
    Attribute(
        name="pa_num_blocks",
        domain=Integer(1),
        default=same_as("batch_size"),
        derivation="batch_size",
        section=PREFIX_CACHING,
        cpu=LATER,
    ),
    Attribute(
        name="pa_block_size",
        domain=Integer(1),
        default=same_as("seq_len"),
        derivation="seq_len",
        section=PREFIX_CACHING,
        cpu=LATER,
    ),
    Attribute(name="is_prefix_caching", domain=Flag(), default=False, section=PREFIX_CACHING, cpu=LATER),
    Attribute(name="attn_kernel_enabled", domain=Flag(), section=KERNELS, cpu=NO_KERNELS),
    Attribute(name="qkv_kernel_enabled", domain=Flag(), default=False, section=KERNELS, cpu=NO_KERNELS),
    Attribute(name="mlp_kernel_enabled", domain=Flag(), default=False, section=KERNELS, cpu=NO_KERNELS),
    # These two change numbers: they are no mere kernels.
    Attribute(name="quantized_mlp_kernel_enabled", domain=Flag(), default=False, section=KERNELS, cpu=LATER),
    Attribute(name="rmsnorm_quantize_kernel_enabled", domain=Flag(), default=False, section=KERNELS, cpu=LATER),
)
