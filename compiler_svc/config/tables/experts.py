"""MoENeuronConfig and the configurations inside of it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from compiler_svc.config.attribute import LATER, PLANNED, Alias, Derivation, attribute, hint, refused
from compiler_svc.config.domains import Choice, Integer, Limit, Number
from compiler_svc.config.tables.attention import NO_KERNELS
from compiler_svc.config.tables.documents import (
    BLOCKWISE_MATMUL,
    HYBRID_SHARDING,
    MOE,
    MOE_FUSED_TKG,
    ROUTED_EXPERTS,
    ROUTER,
)
from compiler_svc.config.tables.general import DTYPES, DType
from compiler_svc.config.tables.neuron_config import NeuronConfig

GluType = Literal["glu", "swiglu"]
BlockShardStrategy = Literal["HI_LO", "PING_PONG"]

_ANY_NUMBER: Final = Number(-math.inf)
_NOTHING_INITIALIZED: Final = refused("weights come from a checkpoint, and nothing is initialized")
_RANK_FROM_TENSOR: Final = hint("executables take their rank from a tensor in any case", acts_as=True)
_BOTH_PHASES: Final = hint("the options hold for prefill and decode")

_AS_THE_MODEL: Final = hint("the model itself says whether its MLP has gates")
_NO_EXPERTS: Final = hint("plans know no model with experts")

_moe = functools.partial(attribute, MOE, cpu=LATER, neuron=_NO_EXPERTS)
_router = functools.partial(attribute, ROUTER, cpu=LATER, neuron=_NO_EXPERTS)
_routed = functools.partial(attribute, ROUTED_EXPERTS, cpu=LATER, neuron=_NO_EXPERTS)
_blockwise = functools.partial(attribute, BLOCKWISE_MATMUL, cpu=NO_KERNELS, neuron=_NO_EXPERTS)
_fused_tkg = functools.partial(attribute, MOE_FUSED_TKG, cpu=NO_KERNELS, neuron=_NO_EXPERTS)
_hybrid = functools.partial(attribute, HYBRID_SHARDING, cpu=LATER, neuron=_NO_EXPERTS)
# What an object says is in its attributes.
_table = functools.partial(attribute, MOE, cpu=LATER, neuron=PLANNED)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The router. See `kiln.config.v1.RouterConfig`."""

    act_fn: Literal["softmax", "sigmoid"] = _router(default="softmax")
    dtype: DType = _router(DTYPES, default="float32")


@dataclass(frozen=True, kw_only=True)
class RoutedExpertsMLPOpsConfig:
    """The routed experts; sizes None are the model's. See `kiln.config.v1.RoutedExpertsMLPOpsConfig`."""

    num_experts: int | None = _routed(Integer(1))
    hidden_size: int | None = _routed(Integer(1))
    intermediate_size: int | None = _routed(Integer(1))
    top_k: int | None = _routed(Integer(1))
    hidden_act: str | None = _routed()
    glu_mlp: bool = _routed(default=Derivation(lambda values: values["outer"]["glu_mlp"], "glu_mlp of MoENeuronConfig"))
    bias: bool = _routed(default=False)
    glu_type: GluType = _routed(default="glu")
    hidden_act_scaling_factor: float = _routed(_ANY_NUMBER, default=1.0)
    hidden_act_bias: float = _routed(_ANY_NUMBER, default=0.0)
    capacity_factor: float | None = _routed(Number(0, positive=True))
    use_index_calc_kernel: bool = _routed(default=False, cpu=NO_KERNELS)
    gate_clamp_upper_limit: float | None = _routed(Limit())
    gate_clamp_lower_limit: float | None = _routed(Limit())
    up_clamp_upper_limit: float | None = _routed(Limit())
    up_clamp_lower_limit: float | None = _routed(Limit())
    normalize_top_k_affinities: bool = _routed(default=False)
    early_expert_affinity_modulation: bool = _routed(default=False)
    input_layer_init_method: str | None = _routed(cpu=_NOTHING_INITIALIZED, neuron=_NOTHING_INITIALIZED)
    output_layer_init_method: str | None = _routed(cpu=_NOTHING_INITIALIZED, neuron=_NOTHING_INITIALIZED)
    enable_spmd_rank: bool = _routed(default=False, cpu=_RANK_FROM_TENSOR)
    is_prefill: bool | None = _routed(cpu=_BOTH_PHASES)


@dataclass(frozen=True, kw_only=True)
class BlockwiseMatmulConfig:
    """Blockwise matrix products of experts; `block_size` in tokens. See `kiln.config.v1.BlockwiseMatmulConfig`."""

    block_size: int = _blockwise(Integer(1), default=512)
    use_block_parallel: bool = _blockwise(default=False)
    block_sharding_strategy: BlockShardStrategy = _blockwise(
        Choice(get_args(BlockShardStrategy), prefix="BlockShardStrategy."), default="HI_LO"
    )
    skip_dma_token: bool = _blockwise(default=False)
    skip_dma_weight: bool = _blockwise(default=False)
    logical_nc_config: int = _blockwise(
        Integer(1, 2),
        default=Derivation(lambda values: values["outer"]["logical_nc_config"], "logical_nc_config of NeuronConfig"),
    )
    blockwise_nki_autograd_cls: str | None = _blockwise()
    use_torch_block_wise: bool = _blockwise(default=False)
    parallelize_token_to_block_mapping: bool = _blockwise(default=True)
    optimized_block_to_token_mapping: bool = _blockwise(default=True)
    always_augment_inputs_for_blockwise_matmul: bool = _blockwise(default=False)
    use_shard_on_intermediate_dynamic_while: bool = _blockwise(default=False)
    use_shard_on_block_dynamic_while: bool = _blockwise(default=False)
    num_static_blocks: int | None = _blockwise(Integer(0))


@dataclass(frozen=True, kw_only=True)
class MoEFusedTKGConfig:
    """Fused token generation of experts; None lets the compiler choose. See `kiln.config.v1.MoEFusedTKGConfig`."""

    quantized: bool = _fused_tkg(default=False, cpu=LATER)
    moe_fused_kernel_enabled: bool | None = _fused_tkg()
    router_topk_kernel_enabled: bool | None = _fused_tkg()
    expert_mlp_kernel_enabled: bool | None = _fused_tkg()
    shared_mlp_kernel_enabled: bool | None = _fused_tkg()


@dataclass(frozen=True, kw_only=True)
class HybridShardingConfig:
    """Degrees of parallelism by submodel. See `kiln.config.v1.HybridShardingConfig`."""

    moe_cte_tp_degree: int = _hybrid(Integer(1), default=1)
    moe_cte_ep_degree: int = _hybrid(Integer(1), default=1)
    moe_tkg_tp_degree: int = _hybrid(Integer(1), default=1)
    moe_tkg_ep_degree: int = _hybrid(Integer(1), default=1)


@dataclass(frozen=True, kw_only=True)
class MoENeuronConfig(NeuronConfig):
    """Compile-time options of a mixture of experts. See `kiln.config.v1.NeuronConfig` for each attribute.

    `capacity_factor` None drops no tokens. `hybrid_sharding_config` None has `moe_tp_degree` and `moe_ep_degree` in
    every submodel.
    """

    moe_tp_degree: int = _moe(Integer(1), default=1)
    moe_ep_degree: int = _moe(Integer(1), default=1)
    hybrid_sharding_config: HybridShardingConfig | None = _table()
    router_config: RouterConfig = _table(default={})
    return_expert_index: bool = _moe(default=False)
    return_router_logits: bool = _moe(default=False)
    blockwise_matmul_config: BlockwiseMatmulConfig = _table(default={})
    capacity_factor: float | None = _moe(Number(0, positive=True))
    glu_mlp: bool = _moe(default=True, cpu=_AS_THE_MODEL)
    glu_type: GluType = _moe(default="glu")
    hidden_act_scaling_factor: float = _moe(_ANY_NUMBER, default=1.0)
    hidden_act_bias: float = _moe(_ANY_NUMBER, default=0.0)
    gate_clamp_upper_limit: float | None = _moe(Limit())
    gate_clamp_lower_limit: float | None = _moe(Limit())
    up_clamp_upper_limit: float | None = _moe(Limit())
    up_clamp_lower_limit: float | None = _moe(Limit())
    use_index_calc_kernel: bool = _moe(default=False, cpu=NO_KERNELS)
    early_expert_affinity_modulation: bool = _moe(default=False)
    # NxD Inference's code takes the opposite only, and loses the value that it wrote itself.
    normalize_top_k_affinities: bool = _moe(
        default=True, aliases=(Alias("disable_normalize_top_k_affinities", negated=True),)
    )
    fused_shared_experts: bool = _moe(default=False)
    shared_experts_sequence_parallel_enabled: bool = _moe(default=False)
    transpose_shared_experts_weights: bool = _moe(default=False)
    routed_experts_mlp_ops_config: RoutedExpertsMLPOpsConfig | None = _table()
    moe_fused_tkg_config: MoEFusedTKGConfig = _table(default={})
