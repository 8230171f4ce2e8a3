"""NeuronConfig: attention, the KV cache and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compiler_svc.config.attribute import LATER, Support, Values, attribute, hint, same_as
from compiler_svc.config.buckets import BUCKET_ATTRIBUTES, resolve_buckets
from compiler_svc.config.domains import integer
from compiler_svc.config.rule import KILN, NXDI_CODE, Note, Rule, needs
from compiler_svc.config.tables.documents import (
    ATTENTION,
    KERNELS,
    KV_QUANTIZATION,
    PREFIX_CACHING,
    QUANTIZATION,
    UNDOCUMENTED,
)
from compiler_svc.config.tables.general import DTYPES, NO_SIZE, DType
from compiler_svc.config.tables.quantization import QUANTIZED, KVQuantizationConfig
from targets.cpu import CPU

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
    qk_layernorm: bool = attribute(
        ATTENTION,
        default=False,
        cpu=_AS_THE_MODEL,
        neuron=_AS_THE_MODEL,
        note="NxD Inference adds norms that checkpoints have no weights for, unless the model has its own; refused for "
        "models that normalize neither",
    )
    attention_dtype: DType | None = attribute(
        ATTENTION,
        DTYPES,
        note="of attention and of the KV cache, torch_dtype if it is unset; weights keep the checkpoint's dtypes",
    )
    kv_cache_quant: bool = attribute(
        KV_QUANTIZATION,
        default=False,
        note="to float8_e4m3fn, as the API guide says; in NxD Inference, kv_quant_config is the switch",
    )
    kv_quant_config: KVQuantizationConfig | None = attribute(UNDOCUMENTED, note="decides whatever kv_cache_quant says")
    is_block_kv_layout: bool = attribute(PREFIX_CACHING, default=False)
    # vLLM's plugin for Neuron writes both, whatever the layout is.
    pa_num_blocks: int = attribute(
        PREFIX_CACHING, integer(1), default=same_as("batch_size"), note="NxD Inference checks no minimum"
    )
    pa_block_size: int = attribute(
        PREFIX_CACHING, integer(1), default=same_as("seq_len"), note="the feature guide recommends 32"
    )
    is_prefix_caching: bool = attribute(PREFIX_CACHING, default=False)
    attn_kernel_enabled: bool | None = attribute(
        KERNELS, cpu=NO_KERNELS, compiled=_WITHOUT_KERNELS, note="unset: on if it pays; only false turns it off"
    )
    qkv_kernel_enabled: bool = attribute(KERNELS, default=False, cpu=NO_KERNELS, neuron=NO_SIZE)
    mlp_kernel_enabled: bool = attribute(KERNELS, default=False, cpu=NO_KERNELS, neuron=NO_SIZE)
    # These two change numbers, so they are more than a choice of kernels.
    quantized_mlp_kernel_enabled: bool = attribute(
        KERNELS, default=False, cpu=LATER, note="quantizes the MLP alone if quantized is false"
    )
    rmsnorm_quantize_kernel_enabled: bool = attribute(KERNELS, default=False, cpu=LATER, neuron=NO_SIZE)


def _are_prompts_divisible(values: Values) -> bool:
    lengths = resolve_buckets(values)["context_encoding_buckets"]
    return all(length % values["tp_degree"] == 0 for length in lengths)


ATTENTION_RULES: Final = (
    Rule(
        ("attention_dtype", "torch_dtype", "cast_type"),
        lambda v: v["attention_dtype"] in (None, v["torch_dtype"]) or v["cast_type"] == "as-declared",
        "torch_dtype, which is {torch_dtype}; another dtype needs cast_type 'as-declared'",
        NXDI_CODE,
        breaks={"torch_dtype": "bfloat16", "attention_dtype": "float32"},
        keeps={"torch_dtype": "bfloat16", "attention_dtype": "float32", "cast_type": "as-declared"},
    ),
    Rule(
        ("sequence_parallel_enabled", "tp_degree", *BUCKET_ATTRIBUTES),
        lambda v: not v["sequence_parallel_enabled"] or _are_prompts_divisible(v),
        "false, unless max_context_length, which is {max_context_length}, and every context encoding bucket are "
        "divisible by tp_degree, which is {tp_degree}",
        ATTENTION,
        breaks={"seq_len": 100, "tp_degree": 8, "sequence_parallel_enabled": True},
        keeps={"seq_len": 104, "tp_degree": 8, "sequence_parallel_enabled": True},
    ),
)


def _has_blocks_for(values: Values, num_sequences: int) -> bool:
    return bool(values["pa_num_blocks"] * values["pa_block_size"] >= num_sequences * values["max_length"])


_BLOCKS: Final = {"seq_len": 1024, "is_block_kv_layout": True, "pa_block_size": 32}
_QUANTIZED_MLP: Final = {
    "mlp_kernel_enabled": True,
    "quantized_mlp_kernel_enabled": True,
    "quantization_type": "per_channel_symmetric",
    "quantization_dtype": "f8e4m3",
}

#: Positions that int32 can number.
_MAX_PLACES: Final = 1 << 31
_SIZES: Final = (
    "pa_num_blocks",
    "pa_block_size",
    "is_block_kv_layout",
    "batch_size",
    "max_batch_size",
    "max_length",
    "seq_len",
)


def _have_whole_blocks(values: Values) -> bool:
    """Whether all lengths that are read from blocks are lengths of whole blocks."""
    lists = resolve_buckets(values)
    lengths = (*lists["prefix_buckets"], *lists["token_generation_buckets"])
    return all(length % values["pa_block_size"] == 0 for length in lengths)


def _pads_right(name: str, because: str, **keeps: object) -> Rule:
    return Rule(
        (name, "padding_side"),
        lambda v: not v[name] or v["padding_side"] == "right",
        f"false beside padding_side left: {because}",
        KILN,
        breaks={**keeps, "padding_side": "left"},
        keeps=keeps,
        target=CPU.kind,
    )


BLOCK_KV_RULES: Final = (
    needs("is_prefix_caching", "is_block_kv_layout", section=PREFIX_CACHING),
    Rule(
        _SIZES,
        lambda v: not v["is_block_kv_layout"] or v["target"] == CPU.kind or _has_blocks_for(v, v["max_batch_size"]),
        "at least max_batch_size * max_length / pa_block_size = {max_batch_size} * {max_length} / {pa_block_size}: "
        "every row can hold a whole sequence",
        PREFIX_CACHING,
        breaks=_BLOCKS | {"batch_size": 2, "pa_num_blocks": 63},
        keeps=_BLOCKS | {"batch_size": 2, "pa_num_blocks": 64},
    ),
    Rule(
        _SIZES,
        lambda v: not v["is_block_kv_layout"] or _has_blocks_for(v, 1),
        "at least max_length / pa_block_size = {max_length} / {pa_block_size}: the longest sequence fits",
        KILN,
        breaks=_BLOCKS | {"batch_size": 2, "pa_num_blocks": 31},
        keeps=_BLOCKS | {"batch_size": 2, "pa_num_blocks": 32},
        target=CPU.kind,
    ),
    Rule(
        ("pa_num_blocks", "pa_block_size", "is_block_kv_layout", "batch_size", "seq_len"),
        lambda v: not v["is_block_kv_layout"] or (v["pa_num_blocks"] + 1) * v["pa_block_size"] <= _MAX_PLACES,
        f"less than {_MAX_PLACES} / pa_block_size, which is {{pa_block_size}}: executables number the positions of all "
        "blocks, and those of a scratch block, in int32",
        KILN,
        breaks=_BLOCKS | {"pa_num_blocks": 2**26},
        keeps=_BLOCKS | {"pa_num_blocks": 2**26 - 1},
    ),
    _pads_right(
        "is_block_kv_layout",
        "sequences that lose their blocks are computed again in chunks, which are padded on the right",
        **_BLOCKS | {"pa_num_blocks": 32},
    ),
    _pads_right(
        "is_prefix_caching",
        "what lies behind a cached prefix is padded on the right",
        **_BLOCKS | {"pa_num_blocks": 32, "is_prefix_caching": True},
    ),
    _pads_right("is_chunked_prefill", "a chunk behind the first one is padded on the right", is_chunked_prefill=True),
    Rule(
        ("pa_block_size", "is_block_kv_layout", *BUCKET_ATTRIBUTES),
        lambda v: not v["is_block_kv_layout"] or _have_whole_blocks(v),
        "a divisor of all token_generation_buckets and prefix_buckets, which end with {max_length} and "
        "{max_context_length} unless they are listed",
        PREFIX_CACHING,
        breaks=_BLOCKS | {"pa_num_blocks": 64, "pa_block_size": 48},
        keeps=_BLOCKS | {"pa_num_blocks": 64, "pa_block_size": 64},
    ),
)

BLOCK_KV_NOTES: Final = (
    Note(
        lambda v: (
            not v["is_block_kv_layout"] and (v["pa_num_blocks"], v["pa_block_size"]) != (v["batch_size"], v["seq_len"])
        ),
        "neuron_config: pa_num_blocks and pa_block_size are ignored because is_block_kv_layout is false",
        doubtful={"pa_num_blocks": 64},
        plain={"pa_num_blocks": 64, "is_block_kv_layout": True},
    ),
)


def _leaves_projections_unquantized(values: Values) -> bool:
    """Whether weights are quantized and a kernel is on that takes whole ones."""
    quantizes = values["quantized"] or values["quantized_mlp_kernel_enabled"]
    takes_whole_mlp = values["mlp_kernel_enabled"] and not values["quantized_mlp_kernel_enabled"]
    return quantizes and (values["qkv_kernel_enabled"] or takes_whole_mlp)


def _needs_bfloat16(kernel: str, **beside: object) -> Rule:
    return Rule(
        (kernel, "torch_dtype"),
        lambda v: not v[kernel] or v["torch_dtype"] == "bfloat16",
        "false, unless torch_dtype is 'bfloat16'; it is {torch_dtype}",
        KERNELS,
        breaks={**beside, kernel: True, "torch_dtype": "float16"},
        keeps={**beside, kernel: True, "torch_dtype": "torch.bfloat16"},
    )


KERNEL_RULES: Final = (
    needs("qkv_kernel_enabled", "fused_qkv", section=KERNELS),
    _needs_bfloat16("qkv_kernel_enabled", fused_qkv=True),
    _needs_bfloat16("mlp_kernel_enabled"),
    needs("quantized_mlp_kernel_enabled", "mlp_kernel_enabled", section=KERNELS, **_QUANTIZED_MLP),
    needs(
        "rmsnorm_quantize_kernel_enabled",
        "quantized_mlp_kernel_enabled",
        section=NXDI_CODE,
        **_QUANTIZED_MLP,
    ),
    Rule(
        ("quantization_type", "quantized_mlp_kernel_enabled"),
        lambda v: not v["quantized_mlp_kernel_enabled"] or v["quantization_type"] == "per_channel_symmetric",
        "'per_channel_symmetric', the only type of the quantized MLP kernel",
        NXDI_CODE,
        breaks=_QUANTIZED_MLP | {"quantization_type": "per_tensor_symmetric"},
        keeps=_QUANTIZED_MLP,
    ),
    Rule(
        ("quantization_dtype", "quantized_mlp_kernel_enabled"),
        lambda v: not v["quantized_mlp_kernel_enabled"] or v["quantization_dtype"] == "f8e4m3",
        "'f8e4m3', the only dtype of the quantized MLP kernel",
        NXDI_CODE,
        breaks=_QUANTIZED_MLP | {"quantization_dtype": "f8e5m2"},
        keeps=_QUANTIZED_MLP,
    ),
    Rule(
        (
            "modules_to_not_convert",
            "quantized",
            "qkv_kernel_enabled",
            "mlp_kernel_enabled",
            "quantized_mlp_kernel_enabled",
        ),
        lambda v: bool(v["modules_to_not_convert"]) or not _leaves_projections_unquantized(v),
        "a list of the modules that are left in full precision: weights are quantized, and a QKV or MLP kernel is on "
        "that takes them whole",
        QUANTIZATION,
        breaks=QUANTIZED | {"mlp_kernel_enabled": True},
        keeps=QUANTIZED | {"mlp_kernel_enabled": True, "modules_to_not_convert": ["mlp"]},
    ),
)
