"""NeuronConfig: attention, the KV cache and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compiler_svc.config.attribute import LATER, Support, attribute, hint, same_as
from compiler_svc.config.domains import Integer
from compiler_svc.config.tables.documents import ATTENTION, KERNELS, KV_QUANTIZATION, PREFIX_CACHING
from compiler_svc.config.tables.general import DTYPES, NO_SIZE, DType

NO_KERNELS: Final = hint("the compiler chooses this target's kernels")
_AS_THE_MODEL: Final = hint("the model itself says whether its queries and keys are normalized")
#: NKI kernels are for later.
_WITHOUT_KERNELS: Final = Support("honoured", values=(None, False))
_WHOLE_PROMPTS: Final = hint("ranks of this target do not split prompts")


@dataclass(frozen=True, kw_only=True)
class AttentionAttributes:
    """Attention, the KV cache's layout, and kernels; `attn_kernel_enabled` None lets the compiler choose."""

    fused_qkv: bool = attribute(ATTENTION, default=False, neuron=NO_SIZE)
    flash_decoding_enabled: bool = attribute(ATTENTION, default=False, cpu=LATER)
    sequence_parallel_enabled: bool = attribute(ATTENTION, default=False, cpu=_WHOLE_PROMPTS)
    qk_layernorm: bool = attribute(ATTENTION, default=False, cpu=_AS_THE_MODEL, neuron=_AS_THE_MODEL)
    attention_dtype: DType | None = attribute(ATTENTION, DTYPES)
    kv_cache_quant: bool = attribute(KV_QUANTIZATION, default=False, cpu=LATER)
    is_block_kv_layout: bool = attribute(PREFIX_CACHING, default=False)
    # vLLM's plugin for Neuron writes both, whatever the layout is.
    pa_num_blocks: int = attribute(PREFIX_CACHING, Integer(1), default=same_as("batch_size"))
    pa_block_size: int = attribute(PREFIX_CACHING, Integer(1), default=same_as("seq_len"))
    is_prefix_caching: bool = attribute(PREFIX_CACHING, default=False)
    attn_kernel_enabled: bool | None = attribute(KERNELS, cpu=NO_KERNELS, compiled=_WITHOUT_KERNELS)
    qkv_kernel_enabled: bool = attribute(KERNELS, default=False, cpu=NO_KERNELS, neuron=NO_SIZE)
    mlp_kernel_enabled: bool = attribute(KERNELS, default=False, cpu=NO_KERNELS, neuron=NO_SIZE)
    # These two change numbers, so they are more than a choice of kernels.
    quantized_mlp_kernel_enabled: bool = attribute(KERNELS, default=False, cpu=LATER)
    rmsnorm_quantize_kernel_enabled: bool = attribute(KERNELS, default=False, cpu=LATER, neuron=NO_SIZE)
