"""Compile-time options of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compiler_svc.config.neuron_config import DType, NeuronConfig

GluType = Literal["glu", "swiglu"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The router. See `kiln.config.v1.RouterConfig`."""

    act_fn: Literal["softmax", "sigmoid"]
    dtype: DType


@dataclass(frozen=True, kw_only=True)
class RoutedExpertsMLPOpsConfig:
    """The routed experts; sizes None are the model's. See `kiln.config.v1.RoutedExpertsMLPOpsConfig`."""

    num_experts: int | None
    hidden_size: int | None
    intermediate_size: int | None
    top_k: int | None
    hidden_act: str | None
    glu_mlp: bool
    bias: bool
    glu_type: GluType
    hidden_act_scaling_factor: float
    hidden_act_bias: float
    capacity_factor: float | None
    use_index_calc_kernel: bool
    gate_clamp_upper_limit: float | None
    gate_clamp_lower_limit: float | None
    up_clamp_upper_limit: float | None
    up_clamp_lower_limit: float | None
    normalize_top_k_affinities: bool
    early_expert_affinity_modulation: bool
    input_layer_init_method: str | None
    output_layer_init_method: str | None
    enable_spmd_rank: bool
    is_prefill: bool | None


@dataclass(frozen=True, kw_only=True)
class BlockwiseMatmulConfig:
    """Blockwise matrix products of experts; `block_size` in tokens. See `kiln.config.v1.BlockwiseMatmulConfig`."""

    block_size: int
    use_block_parallel: bool
    block_sharding_strategy: Literal["HI_LO", "PING_PONG"]
    skip_dma_token: bool
    skip_dma_weight: bool
    logical_nc_config: int
    blockwise_nki_autograd_cls: str | None
    use_torch_block_wise: bool
    parallelize_token_to_block_mapping: bool
    optimized_block_to_token_mapping: bool
    always_augment_inputs_for_blockwise_matmul: bool
    use_shard_on_intermediate_dynamic_while: bool
    use_shard_on_block_dynamic_while: bool
    num_static_blocks: int | None


@dataclass(frozen=True, kw_only=True)
class MoEFusedTKGConfig:
    """Fused token generation of experts; None lets the compiler choose. See `kiln.config.v1.MoEFusedTKGConfig`."""

    quantized: bool
    moe_fused_kernel_enabled: bool | None
    router_topk_kernel_enabled: bool | None
    expert_mlp_kernel_enabled: bool | None
    shared_mlp_kernel_enabled: bool | None


@dataclass(frozen=True, kw_only=True)
class HybridShardingConfig:
    """Degrees of parallelism by submodel. See `kiln.config.v1.HybridShardingConfig`."""

    moe_cte_tp_degree: int
    moe_cte_ep_degree: int
    moe_tkg_tp_degree: int
    moe_tkg_ep_degree: int


@dataclass(frozen=True, kw_only=True)
class MoENeuronConfig(NeuronConfig):
    """Compile-time options of a mixture of experts. See `kiln.config.v1.NeuronConfig` for each attribute.

    `capacity_factor` None drops no tokens. `hybrid_sharding_config` None has `moe_tp_degree` and `moe_ep_degree` in
    every submodel.
    """

    moe_tp_degree: int
    moe_ep_degree: int
    hybrid_sharding_config: HybridShardingConfig | None
    router_config: RouterConfig
    return_expert_index: bool
    return_router_logits: bool
    blockwise_matmul_config: BlockwiseMatmulConfig
    capacity_factor: float | None
    glu_mlp: bool
    glu_type: GluType
    hidden_act_scaling_factor: float
    hidden_act_bias: float
    gate_clamp_upper_limit: float | None
    gate_clamp_lower_limit: float | None
    up_clamp_upper_limit: float | None
    up_clamp_lower_limit: float | None
    use_index_calc_kernel: bool
    early_expert_affinity_modulation: bool
    normalize_top_k_affinities: bool
    fused_shared_experts: bool
    shared_experts_sequence_parallel_enabled: bool
    transpose_shared_experts_weights: bool
    routed_experts_mlp_ops_config: RoutedExpertsMLPOpsConfig | None
    moe_fused_tkg_config: MoEFusedTKGConfig
