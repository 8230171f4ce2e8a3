"""Attributes whose values are validated and dropped.

Most are attributes of NxD Inference's code that no document names. Those that choose kernels, layouts or flags of the
compiler are hints; the others are accepted at their defaults, which a note says. Hooks of Python are refused. The names
are those of SDK 2.23 to 2.29; a name of the first and the last of these releases stands below a comment that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from compiler_svc.config.attribute import LATER, Attribute, Derivation, Support, hint, refused, same_as
from compiler_svc.config.domains import ANYTHING, FLAG, LIMIT, TEXT, Domain, integer
from compiler_svc.config.tables.attention import NO_KERNELS
from compiler_svc.config.tables.documents import INFERENCE_CONFIG, UNDOCUMENTED
from compiler_svc.config.tables.general import NEURON_ONLY

_DTYPE_COUNTS: Final = hint("torch_dtype counts if it is set")
_NO_HOOKS: Final = refused("it is a Python hook; the checkpoint's config.json is always read")
_NO_KERNEL_IN_PLANS: Final = hint("it chooses a kernel or a layout, on which no size of a plan depends")
_NO_FLAG_IN_PLANS: Final = hint("it steers the compiler, on which no size of a plan depends")
_ALWAYS_IN_CHUNKS: Final = hint(
    "this target computes long prompts in chunks wherever it can; --max-chunk-tokens of the runtime bounds them"
)
_ONLY_IN_2_23: Final = hint("releases of NxD Inference after SDK 2.23 do not have it")

#: Domains of hints, by the type of the default.
_HINT_DOMAINS: Final[Mapping[type, Domain]] = {bool: FLAG, int: integer(0), str: TEXT}


def _only_default(**defaults: Any) -> tuple[Attribute, ...]:
    """Rows of attributes that are accepted at their defaults only. A default may be a derivation."""
    return tuple(
        Attribute(UNDOCUMENTED, ANYTHING, name=name, default=default, cpu=LATER, neuron=LATER)
        for name, default in defaults.items()
    )


def _hints(cpu: Support, neuron: Support, **defaults: Any) -> tuple[Attribute, ...]:
    """Rows of attributes that targets ignore. A default may be a derivation of a flag."""
    return tuple(
        Attribute(
            UNDOCUMENTED,
            FLAG if isinstance(default, Derivation) else _HINT_DOMAINS.get(type(default), ANYTHING),
            name=name,
            default=default,
            cpu=cpu,
            neuron=neuron,
        )
        for name, default in defaults.items()
    )


#: Those of NeuronConfig and MoENeuronConfig.
_NEURON_CONFIG: Final = (
    *_only_default(
        # Lengths and batches
        on_cpu=False,
        buckets=Derivation(lambda values: [values["seq_len"]], "seq_len alone"),
        bucket_n_active_tokens=False,
        apply_seq_ids_mask=False,
        windowed_context_encoding_size=None,
        # Attention and KV cache
        attn_cls="NeuronLlamaAttention",
        kv_cache_batch_size=same_as("batch_size"),
        kv_cache_padding_size=0,
        pre_rope_rmsnorm=False,
        # Kernels
        moe_fused_nki_kernel_enabled=None,
        router_topk_nki_kernel_enabled=None,
        expert_mlp_nki_kernel_enabled=None,
        shared_mlp_nki_kernel_enabled=None,
        # Quantization
        quantization_block_size=None,
        quantization_block_axis=None,
        quantization_scale_dtype="f32",
        is_mxfp4_compute=False,
        is_hidden_dim_shuffled=False,
        is_intermediate_dim_shuffled=False,
        is_full_model_shuffled=False,
        # Speculation
        is_eagle3=False,
        token_tree_config=None,
        enable_token_tree=False,
        # Distribution
        cp_degree=1,
        mlp_cp_degree=1,
        attention_dp_degree=1,
        pp_degree=1,
        ep_degree=1,
        world_size=same_as("tp_degree"),
        local_ranks_size=same_as("tp_degree"),
        start_rank_id=0,
        # Experts
        moe_mask_padded_tokens=False,
        # Compilation and debugging
        lm_head_pad=Derivation(lambda values: values["logical_nc_config"] > 1, "true if logical_nc_config is 2"),
        lm_head_pad_alignment_size=1,
        target=None,
        enable_long_context_mode=Derivation(
            lambda values: values["max_context_length"] >= 32 * 1024, "true from a max_context_length of 32768 on"
        ),
        padded_hidden_size=None,
        padded_intermediate_size=None,
        tensor_capture_config=None,
        tensor_replacement_config=None,
        # Chunked prefill of SDK 2.23
        cp_max_num_seqs=0,
        cp_num_active_blocks=0,
        # Of the classes for GPT-OSS and for models with images
        sliding_window_attention_dp_degree=1,
        skip_vision=False,
        default_image_width=None,
        default_image_height=None,
    ),
    *_hints(
        NO_KERNELS,
        _NO_KERNEL_IN_PLANS,
        kv_cache_tiling=False,
        disable_kv_cache_tiling=False,
        k_cache_transposed=False,
        kv_cache_update_with_kernel=False,
        strided_context_parallel_kernel_enabled=False,
        qkv_nki_kernel_enabled=False,
        qkv_cte_nki_kernel_fuse_rope=False,
        qkv_kernel_nbsd_layout=False,
        qkv_kernel_fuse_residual_add=False,
        mlp_tkg_nki_kernel_enabled=False,
        mlp_kernel_fuse_residual_add=False,
        out_proj_kernel_enabled=False,
        attn_tkg_nki_kernel_enabled=False,
        attn_tkg_builtin_kernel_enabled=False,
        attn_block_tkg_nki_kernel_enabled=False,
        attn_block_cte_nki_kernel_enabled=False,
        attn_block_tkg_nki_kernel_cache_update=False,
        attn_block_tkg_nki_kernel_cascaded_attention=False,
        attn_block_tkg_nki_kernel_use_online_softmax=True,
        # From SDK 2.28 on
        attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb=False,
        disable_argmax_kernel=False,
        eagle_rolling_buffer_kernel_enabled=False,
    ),
    # The kernel's weights have the scales of norms in them: an executable without it would compute something else.
    *_hints(LATER, _NO_KERNEL_IN_PLANS, fused_rmsnorm_skip_gamma=False),
    *_hints(
        NEURON_ONLY,
        _NO_FLAG_IN_PLANS,
        weight_gather_seq_len_threshold=32768,
        enable_cte_modular_flow=False,
        layer_boundary_markers=False,
        seq_len_threshold_for_cc_tiling=16384,
        tile_cc=False,
        enable_spill_reload_dge=False,
        enable_output_completion_notifications=False,
        disable_numeric_cc_token=False,
        switch_cc=False,
        # From SDK 2.28 on
        dma_order_config=None,
        ep_dispatch_cc_option="AR_AG",
        # From SDK 2.29 on
        enable_ve_data_parallel=False,
    ),
    *_hints(_ALWAYS_IN_CHUNKS, LATER, chunked_prefill_config=None, is_chunked_prefill=False),
    *_hints(_ONLY_IN_2_23, _ONLY_IN_2_23, target_sequence_parallel_enabled=same_as("sequence_parallel_enabled")),
    Attribute(
        UNDOCUMENTED,
        FLAG,
        name="overrides_torch_dtype",
        default=False,
        cpu=_DTYPE_COUNTS,
        neuron=_DTYPE_COUNTS,
        compiled=_DTYPE_COUNTS,
    ),
    # NxD Inference writes its default, infinity, as a number that JSON does not have.
    Attribute(UNDOCUMENTED, LIMIT, name="quantize_clamp_bound", cpu=LATER, neuron=LATER),
)

#: By class name.
UNRECORDED: Final[Mapping[str, tuple[Attribute, ...]]] = {
    "InferenceConfig": (
        Attribute(INFERENCE_CONFIG, ANYTHING, name="load_config", cpu=_NO_HOOKS, neuron=_NO_HOOKS),
        *_only_default(metadata=None, num_cores_per_group=1),
    ),
    "NeuronConfig": _NEURON_CONFIG,
    "OnDeviceSamplingConfig": (
        *_hints(NO_KERNELS, _NO_KERNEL_IN_PLANS, top_k_kernel_enabled=False),
        # NxD Inference writes the first into its files; it has the second from SDK 2.28 on.
        *_only_default(on_device_sampling_config=True, sampling_dp_degree=1),
    ),
    "RoutedExpertsMLPOpsConfig": _only_default(
        hidden_size_actual=None,
        intermediate_size_actual=None,
        is_hidden_dim_shuffled=None,
        is_intermediate_dim_shuffled=None,
        expert_distribution=None,
        # Spelled so in NxD; it writes what follows from the one before.
        local_redudancy_degree=None,
    ),
    "MoEFusedTKGConfig": _only_default(norm_topk_prob=False, is_mxfp4_compute=None, router_mm_dtype="float32"),
    # From SDK 2.28 on
    "BlockwiseMatmulConfig": _hints(NO_KERNELS, _NO_KERNEL_IN_PLANS, pad_num_blocks_to_even=False),
    "LoraServingConfig": _only_default(is_context_encoding=False),
}
