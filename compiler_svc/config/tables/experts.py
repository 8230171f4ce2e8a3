"""MoENeuronConfig and the configurations inside of it."""

from __future__ import annotations

import math
from typing import Any, Final

from compiler_svc.config.attribute import LATER, Alias, Attribute, ConfigTable, hint, refused
from compiler_svc.config.domains import Choice, Domain, Flag, Integer, Limit, Number, Table, Text
from compiler_svc.config.tables.attention import NO_KERNELS
from compiler_svc.config.tables.documents import (
    BLOCKWISE_MATMUL,
    HYBRID_SHARDING,
    MOE,
    MOE_FUSED_TKG,
    ROUTED_EXPERTS,
    ROUTER,
)
from compiler_svc.config.tables.general import DTYPES

_GLU: Final = Choice(("glu", "swiglu"))
_ANY_NUMBER: Final = Number(-math.inf)
_NOTHING_INITIALIZED: Final = refused("weights come from a checkpoint, and nothing is initialized")
_RANK_FROM_TENSOR: Final = hint("executables take their rank from a tensor in any case", acts_as=True)
_BOTH_PHASES: Final = hint("the options hold for prefill and decode")


def _moe(name: str, domain: Domain, default: Any = None, **columns: Any) -> Attribute:
    return Attribute(name=name, domain=domain, default=default, section=MOE, **{"cpu": LATER} | columns)


def _degree(name: str, section: str) -> Attribute:
    return Attribute(name=name, domain=Integer(1), default=1, section=section, cpu=LATER)


def _clamps(section: str) -> tuple[Attribute, ...]:
    names = ("gate_clamp_upper_limit", "gate_clamp_lower_limit", "up_clamp_upper_limit", "up_clamp_lower_limit")
    return tuple(Attribute(name=name, domain=Limit(), section=section, cpu=LATER) for name in names)


MOE_ATTRIBUTES: Final = (
    _degree("moe_tp_degree", MOE),
    _degree("moe_ep_degree", MOE),
    _moe("hybrid_sharding_config", Table("HybridShardingConfig")),
    _moe("router_config", Table("RouterConfig"), {}),
    _moe("return_expert_index", Flag(), False),
    _moe("return_router_logits", Flag(), False),
    _moe("blockwise_matmul_config", Table("BlockwiseMatmulConfig"), {}),
    _moe("capacity_factor", Number(0, positive=True)),
    _moe("glu_mlp", Flag(), True),
    _moe("glu_type", _GLU, "glu"),
    _moe("hidden_act_scaling_factor", _ANY_NUMBER, 1.0),
    _moe("hidden_act_bias", _ANY_NUMBER, 0.0),
    *_clamps(MOE),
    _moe("use_index_calc_kernel", Flag(), False, cpu=NO_KERNELS),
    _moe("early_expert_affinity_modulation", Flag(), False),
    # NxD Inference's code takes the opposite only, and loses the value that it wrote itself.
    _moe(
        "normalize_top_k_affinities",
        Flag(),
        True,
        aliases=(Alias("disable_normalize_top_k_affinities", negated=True),),
    ),
    _moe("fused_shared_experts", Flag(), False),
    _moe("shared_experts_sequence_parallel_enabled", Flag(), False),
    _moe("transpose_shared_experts_weights", Flag(), False),
    _moe("routed_experts_mlp_ops_config", Table("RoutedExpertsMLPOpsConfig")),
    _moe("moe_fused_tkg_config", Table("MoEFusedTKGConfig"), {}),
)

ROUTER_CONFIG: Final = ConfigTable(
    "RouterConfig",
    (
        Attribute(name="act_fn", domain=Choice(("softmax", "sigmoid")), default="softmax", section=ROUTER, cpu=LATER),
        Attribute(name="dtype", domain=DTYPES, default="float32", section=ROUTER, cpu=LATER),
    ),
)


def _routed(name: str, domain: Domain, default: Any = None, **columns: Any) -> Attribute:
    return Attribute(name=name, domain=domain, default=default, section=ROUTED_EXPERTS, **{"cpu": LATER} | columns)


ROUTED_EXPERTS_MLP_OPS_CONFIG: Final = ConfigTable(
    "RoutedExpertsMLPOpsConfig",
    (
        *(_routed(name, Integer(1)) for name in ("num_experts", "hidden_size", "intermediate_size", "top_k")),
        _routed("hidden_act", Text()),
        _routed(
            "glu_mlp",
            Flag(),
            lambda values: values["outer"]["glu_mlp"],
            derivation="glu_mlp of MoENeuronConfig",
        ),
        _routed("bias", Flag(), False),
        _routed("glu_type", _GLU, "glu"),
        _routed("hidden_act_scaling_factor", _ANY_NUMBER, 1.0),
        _routed("hidden_act_bias", _ANY_NUMBER, 0.0),
        _routed("capacity_factor", Number(0, positive=True)),
        _routed("use_index_calc_kernel", Flag(), False, cpu=NO_KERNELS),
        *_clamps(ROUTED_EXPERTS),
        _routed("normalize_top_k_affinities", Flag(), False),
        _routed("early_expert_affinity_modulation", Flag(), False),
        _routed("input_layer_init_method", Text(), cpu=_NOTHING_INITIALIZED, neuron=_NOTHING_INITIALIZED),
        _routed("output_layer_init_method", Text(), cpu=_NOTHING_INITIALIZED, neuron=_NOTHING_INITIALIZED),
        _routed("enable_spmd_rank", Flag(), False, cpu=_RANK_FROM_TENSOR),
        _routed("is_prefill", Flag(), cpu=_BOTH_PHASES),
    ),
)


def _blockwise(name: str, domain: Domain, default: Any = None, **columns: Any) -> Attribute:
    return Attribute(
        name=name, domain=domain, default=default, section=BLOCKWISE_MATMUL, **{"cpu": NO_KERNELS} | columns
    )


BLOCKWISE_MATMUL_CONFIG: Final = ConfigTable(
    "BlockwiseMatmulConfig",
    (
        _blockwise("block_size", Integer(1), 512),
        _blockwise("use_block_parallel", Flag(), False),
        _blockwise("block_sharding_strategy", Choice(("HI_LO", "PING_PONG"), prefix="BlockShardStrategy."), "HI_LO"),
        _blockwise("skip_dma_token", Flag(), False),
        _blockwise("skip_dma_weight", Flag(), False),
        _blockwise(
            "logical_nc_config",
            Integer(1, 2),
            lambda values: values["outer"]["logical_nc_config"],
            derivation="logical_nc_config of NeuronConfig",
        ),
        _blockwise("blockwise_nki_autograd_cls", Text()),
        _blockwise("use_torch_block_wise", Flag(), False),
        _blockwise("parallelize_token_to_block_mapping", Flag(), True),
        _blockwise("optimized_block_to_token_mapping", Flag(), False),
        _blockwise("always_augment_inputs_for_blockwise_matmul", Flag(), False),
        _blockwise("use_shard_on_intermediate_dynamic_while", Flag(), False),
        _blockwise("use_shard_on_block_dynamic_while", Flag(), False),
        _blockwise("num_static_blocks", Integer(0)),
    ),
)

MOE_FUSED_TKG_CONFIG: Final = ConfigTable(
    "MoEFusedTKGConfig",
    (
        Attribute(name="quantized", domain=Flag(), default=False, section=MOE_FUSED_TKG, cpu=LATER),
        *(
            Attribute(name=name, domain=Flag(), section=MOE_FUSED_TKG, cpu=NO_KERNELS)
            for name in (
                "moe_fused_kernel_enabled",
                "router_topk_kernel_enabled",
                "expert_mlp_kernel_enabled",
                "shared_mlp_kernel_enabled",
            )
        ),
    ),
)

HYBRID_SHARDING_CONFIG: Final = ConfigTable(
    "HybridShardingConfig",
    tuple(
        _degree(name, HYBRID_SHARDING)
        for name in ("moe_cte_tp_degree", "moe_cte_ep_degree", "moe_tkg_tp_degree", "moe_tkg_ep_degree")
    ),
)
