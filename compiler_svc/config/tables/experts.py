"""MoENeuronConfig and the configurations inside of it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from compiler_svc.config.attribute import LATER, PLANNED, Alias, Derivation, Values, attribute, hint, refused
from compiler_svc.config.domains import LIMIT, choice, integer, number
from compiler_svc.config.rule import NXDI_CODE, Note, Rule, at_most, find_value, needs
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
from compiler_svc.config.tables.quantization import QUANTIZED

GluType = Literal["glu", "swiglu"]
BlockShardStrategy = Literal["HI_LO", "PING_PONG"]

_ANY_NUMBER: Final = number(-math.inf)
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

    act_fn: Literal["softmax", "sigmoid"] = _router(
        default="softmax",
        aliases=(Alias("router_act_fn"),),
        note="the API guide lists more activations; NxD Inference fails with any of them",
    )
    dtype: DType = _router(DTYPES, default="float32", aliases=(Alias("router_dtype"),))


@dataclass(frozen=True, kw_only=True)
class RoutedExpertsMLPOpsConfig:
    """The routed experts; sizes None are the model's. See `kiln.config.v1.RoutedExpertsMLPOpsConfig`."""

    num_experts: int | None = _routed(integer(1))
    hidden_size: int | None = _routed(integer(1))
    intermediate_size: int | None = _routed(integer(1))
    top_k: int | None = _routed(integer(1))
    hidden_act: str | None = _routed()
    glu_mlp: bool = _routed(default=Derivation(lambda values: values["outer"]["glu_mlp"], "glu_mlp of MoENeuronConfig"))
    bias: bool = _routed(default=False)
    glu_type: GluType = _routed(default="glu")
    hidden_act_scaling_factor: float = _routed(_ANY_NUMBER, default=1.0)
    hidden_act_bias: float = _routed(_ANY_NUMBER, default=0.0)
    capacity_factor: float | None = _routed(number(0, positive=True))
    use_index_calc_kernel: bool = _routed(default=False, cpu=NO_KERNELS, note="true by default in NxD Inference")
    gate_clamp_upper_limit: float | None = _routed(LIMIT)
    gate_clamp_lower_limit: float | None = _routed(LIMIT)
    up_clamp_upper_limit: float | None = _routed(LIMIT)
    up_clamp_lower_limit: float | None = _routed(LIMIT)
    normalize_top_k_affinities: bool = _routed(default=False, note="MoENeuronConfig's is true by default")
    early_expert_affinity_modulation: bool = _routed(default=False)
    input_layer_init_method: str | None = _routed(cpu=_NOTHING_INITIALIZED, neuron=_NOTHING_INITIALIZED)
    output_layer_init_method: str | None = _routed(cpu=_NOTHING_INITIALIZED, neuron=_NOTHING_INITIALIZED)
    enable_spmd_rank: bool = _routed(default=False, cpu=_RANK_FROM_TENSOR)
    is_prefill: bool | None = _routed(cpu=_BOTH_PHASES)


@dataclass(frozen=True, kw_only=True)
class BlockwiseMatmulConfig:
    """Blockwise matrix products of experts; `block_size` in tokens. See `kiln.config.v1.BlockwiseMatmulConfig`."""

    block_size: int = _blockwise(
        integer(1), default=512, note="most defaults of the class are NxD Inference's: the API guide states few"
    )
    use_block_parallel: bool = _blockwise(default=False)
    block_sharding_strategy: BlockShardStrategy = _blockwise(
        choice(get_args(BlockShardStrategy), prefix="BlockShardStrategy."), default="HI_LO"
    )
    skip_dma_token: bool = _blockwise(default=False)
    skip_dma_weight: bool = _blockwise(default=False)
    logical_nc_config: int = _blockwise(
        integer(1, 2),
        default=Derivation(lambda values: values["outer"]["logical_nc_config"], "logical_nc_config of NeuronConfig"),
    )
    blockwise_nki_autograd_cls: str | None = _blockwise()
    use_torch_block_wise: bool = _blockwise(default=False)
    parallelize_token_to_block_mapping: bool = _blockwise(default=True)
    optimized_block_to_token_mapping: bool = _blockwise(default=True)
    always_augment_inputs_for_blockwise_matmul: bool = _blockwise(default=False)
    use_shard_on_intermediate_dynamic_while: bool = _blockwise(default=False)
    use_shard_on_block_dynamic_while: bool = _blockwise(default=False)
    num_static_blocks: int | None = _blockwise(integer(0))


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

    moe_cte_tp_degree: int = _hybrid(integer(1), default=1)
    moe_cte_ep_degree: int = _hybrid(integer(1), default=1)
    moe_tkg_tp_degree: int = _hybrid(integer(1), default=1)
    moe_tkg_ep_degree: int = _hybrid(integer(1), default=1)


@dataclass(frozen=True, kw_only=True)
class MoENeuronConfig(NeuronConfig):
    """Compile-time options of a mixture of experts. See `kiln.config.v1.NeuronConfig` for each attribute.

    `capacity_factor` None drops no tokens. `hybrid_sharding_config` None has `moe_tp_degree` and `moe_ep_degree` in
    every submodel.
    """

    moe_tp_degree: int = _moe(integer(1), default=1)
    moe_ep_degree: int = _moe(integer(1), default=1)
    hybrid_sharding_config: HybridShardingConfig | None = _table()
    router_config: RouterConfig = _table(default={}, note="an object counts, which NxD Inference replaces by defaults")
    return_expert_index: bool = _moe(default=False)
    return_router_logits: bool = _moe(default=False)
    blockwise_matmul_config: BlockwiseMatmulConfig = _table(default={})
    capacity_factor: float | None = _moe(number(0, positive=True))
    glu_mlp: bool = _moe(
        default=True,
        cpu=_AS_THE_MODEL,
        note="against the documents, which say false: every family with experts has gated units. False is refused for "
        "a dense model whose MLP has gates",
    )
    glu_type: GluType = _moe(default="glu")
    hidden_act_scaling_factor: float = _moe(_ANY_NUMBER, default=1.0)
    hidden_act_bias: float = _moe(_ANY_NUMBER, default=0.0)
    gate_clamp_upper_limit: float | None = _moe(LIMIT)
    gate_clamp_lower_limit: float | None = _moe(LIMIT)
    up_clamp_upper_limit: float | None = _moe(LIMIT)
    up_clamp_lower_limit: float | None = _moe(LIMIT)
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


def _clamp_rules(section: str) -> tuple[Rule, ...]:
    return tuple(
        at_most(f"{what}_clamp_lower_limit", f"{what}_clamp_upper_limit", section=section) for what in ("gate", "up")
    )


def _degrees_give_ranks(phase: str, submodel: str) -> Rule:
    tp_degree, ep_degree = f"moe_{phase}_tp_degree", f"moe_{phase}_ep_degree"

    def give_ranks(values: Values) -> bool:
        sharding = values["hybrid_sharding_config"]
        return sharding is None or bool(sharding[tp_degree] * sharding[ep_degree] == values["tp_degree"])

    return Rule(
        (f"hybrid_sharding_config.{tp_degree}", f"hybrid_sharding_config.{ep_degree}", "tp_degree"),
        give_ranks,
        f"tp_degree / {ep_degree}, which is {{tp_degree}} / {{hybrid_sharding_config[{ep_degree}]}}: every rank has a "
        f"part of the experts in {submodel}",
        HYBRID_SHARDING,
        breaks={"tp_degree": 4, "hybrid_sharding_config": _TP_ALONE | {tp_degree: 2}},
        keeps={"tp_degree": 4, "hybrid_sharding_config": _TP_ALONE | {tp_degree: 2, ep_degree: 2}},
    )


_TP_ALONE: Final = {"moe_cte_tp_degree": 4, "moe_tkg_tp_degree": 4}

_GLU_RULE: Final = Rule(
    ("glu_type", "glu_mlp"),
    lambda v: v["glu_mlp"] or v["glu_type"] == "glu",
    "'glu', the default, because glu_mlp is false",
    MOE,
    breaks={"glu_mlp": False, "glu_type": "swiglu"},
    keeps={"glu_mlp": True, "glu_type": "swiglu"},
)

MOE_RULES: Final = (
    Rule(
        ("moe_tp_degree", "moe_ep_degree", "tp_degree"),
        lambda v: v["moe_tp_degree"] * v["moe_ep_degree"] in (1, v["tp_degree"]),
        "tp_degree / moe_ep_degree, which is {tp_degree} / {moe_ep_degree}: every rank has a part of the experts",
        MOE,
        breaks={"tp_degree": 8, "moe_tp_degree": 2, "moe_ep_degree": 2},
        keeps={"tp_degree": 8, "moe_tp_degree": 2, "moe_ep_degree": 4},
    ),
    _GLU_RULE,
    *_clamp_rules(MOE),
    needs("shared_experts_sequence_parallel_enabled", "sequence_parallel_enabled", section=NXDI_CODE),
    _degrees_give_ranks("cte", "context encoding"),
    _degrees_give_ranks("tkg", "token generation"),
    Rule(
        ("moe_fused_tkg_config.quantized", "quantized"),
        lambda v: v["quantized"] or not find_value(v, "moe_fused_tkg_config.quantized"),
        "false, unless quantized of NeuronConfig is true",
        MOE_FUSED_TKG,
        breaks={"moe_fused_tkg_config": {"quantized": True}},
        keeps=QUANTIZED | {"moe_fused_tkg_config": {"quantized": True}},
    ),
)

#: Rules on the values of a RoutedExpertsMLPOpsConfig.
ROUTED_EXPERTS_RULES: Final = (
    at_most("top_k", "num_experts", section=ROUTED_EXPERTS),
    Rule(
        ("early_expert_affinity_modulation", "top_k"),
        lambda v: not v["early_expert_affinity_modulation"] or v["top_k"] in (None, 1),
        "false, because top_k is {top_k}: only the affinity of a single expert can be applied before it",
        NXDI_CODE,
        breaks={"num_experts": 8, "top_k": 2, "early_expert_affinity_modulation": True},
        keeps={"num_experts": 8, "top_k": 1, "early_expert_affinity_modulation": True},
    ),
    _GLU_RULE,
    *_clamp_rules(ROUTED_EXPERTS),
)

#: Rules on the values of a BlockwiseMatmulConfig.
BLOCKWISE_MATMUL_RULES: Final = (
    Rule(
        ("use_block_parallel", "logical_nc_config"),
        lambda v: not v["use_block_parallel"] or v["logical_nc_config"] == 2,
        "false, unless logical_nc_config is 2: blocks are shared out between the two cores of a logical one",
        BLOCKWISE_MATMUL,
        breaks={"use_block_parallel": True, "logical_nc_config": 1},
        keeps={"use_block_parallel": True},
    ),
    Rule(
        ("use_shard_on_block_dynamic_while", "use_shard_on_intermediate_dynamic_while"),
        lambda v: not (v["use_shard_on_block_dynamic_while"] and v["use_shard_on_intermediate_dynamic_while"]),
        "false, because use_shard_on_intermediate_dynamic_while is true: there is one kernel",
        BLOCKWISE_MATMUL,
        breaks={"use_shard_on_block_dynamic_while": True, "use_shard_on_intermediate_dynamic_while": True},
        keeps={"use_shard_on_block_dynamic_while": True},
    ),
)

MOE_NOTES: Final = (
    Note(
        lambda v: v["hybrid_sharding_config"] is not None and (v["moe_tp_degree"], v["moe_ep_degree"]) != (1, 1),
        "neuron_config: moe_tp_degree and moe_ep_degree are ignored because hybrid_sharding_config has degrees",
        doubtful={"tp_degree": 4, "moe_ep_degree": 4, "hybrid_sharding_config": _TP_ALONE},
        plain={"tp_degree": 4, "hybrid_sharding_config": _TP_ALONE},
    ),
)

BLOCKWISE_MATMUL_NOTES: Final = (
    Note(
        lambda v: (
            v["num_static_blocks"] is not None
            and not (v["use_shard_on_block_dynamic_while"] or v["use_shard_on_intermediate_dynamic_while"])
        ),
        "neuron_config.blockwise_matmul_config.num_static_blocks: it is ignored because no dynamic kernel is used",
        doubtful={"num_static_blocks": 2},
        plain={"num_static_blocks": 2, "use_shard_on_block_dynamic_while": True},
    ),
)
