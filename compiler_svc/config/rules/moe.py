"""Rules on mixtures of experts; `model` has those that depend on the model's own attributes."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.rules.rule import NXDI_CODE, Note, Rule, find_value
from compiler_svc.config.tables.documents import (
    BLOCKWISE_MATMUL,
    HYBRID_SHARDING,
    MOE,
    MOE_FUSED_TKG,
    ROUTED_EXPERTS,
)


def _clamp_rules(section: str) -> tuple[Rule, ...]:
    return tuple(
        _lower_at_most_upper(f"{what}_clamp_lower_limit", f"{what}_clamp_upper_limit", section)
        for what in ("gate", "up")
    )


def _lower_at_most_upper(lower: str, upper: str, section: str) -> Rule:
    return Rule(
        (lower, upper),
        lambda v: v[lower] is None or v[upper] is None or v[lower] <= v[upper],
        f"at most {upper}, which is {{{upper}}}",
        section,
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
    )


_GLU_RULE: Final = Rule(
    ("glu_type", "glu_mlp"),
    lambda v: v["glu_mlp"] or v["glu_type"] == "glu",
    "'glu', the default, because glu_mlp is false",
    MOE,
)

MOE_RULES: Final = (
    Rule(
        ("moe_tp_degree", "moe_ep_degree", "tp_degree"),
        lambda v: v["moe_tp_degree"] * v["moe_ep_degree"] in (1, v["tp_degree"]),
        "tp_degree / moe_ep_degree, which is {tp_degree} / {moe_ep_degree}: every rank has a part of the experts",
        MOE,
    ),
    _GLU_RULE,
    *_clamp_rules(MOE),
    Rule(
        ("shared_experts_sequence_parallel_enabled", "sequence_parallel_enabled"),
        lambda v: not v["shared_experts_sequence_parallel_enabled"] or v["sequence_parallel_enabled"],
        "false, unless sequence_parallel_enabled is true",
        NXDI_CODE,
    ),
    _degrees_give_ranks("cte", "context encoding"),
    _degrees_give_ranks("tkg", "token generation"),
    Rule(
        ("moe_fused_tkg_config.quantized", "quantized"),
        lambda v: v["quantized"] or not find_value(v, "moe_fused_tkg_config.quantized"),
        "false, unless quantized of NeuronConfig is true",
        MOE_FUSED_TKG,
    ),
)

#: Rules on the values of a RoutedExpertsMLPOpsConfig.
ROUTED_EXPERTS_RULES: Final = (
    Rule(
        ("top_k", "num_experts"),
        lambda v: v["top_k"] is None or v["num_experts"] is None or v["top_k"] <= v["num_experts"],
        "at most num_experts, which is {num_experts}",
        ROUTED_EXPERTS,
    ),
    Rule(
        ("early_expert_affinity_modulation", "top_k"),
        lambda v: not v["early_expert_affinity_modulation"] or v["top_k"] in (None, 1),
        "false, because top_k is {top_k}: only the affinity of a single expert can be applied before it",
        NXDI_CODE,
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
    ),
    Rule(
        ("use_shard_on_block_dynamic_while", "use_shard_on_intermediate_dynamic_while"),
        lambda v: not (v["use_shard_on_block_dynamic_while"] and v["use_shard_on_intermediate_dynamic_while"]),
        "false, because use_shard_on_intermediate_dynamic_while is true: there is one kernel",
        BLOCKWISE_MATMUL,
    ),
)

MOE_NOTES: Final = (
    Note(
        lambda v: v["hybrid_sharding_config"] is not None and (v["moe_tp_degree"], v["moe_ep_degree"]) != (1, 1),
        "neuron_config: moe_tp_degree and moe_ep_degree are ignored because hybrid_sharding_config has degrees",
    ),
)

BLOCKWISE_MATMUL_NOTES: Final = (
    Note(
        lambda v: (
            v["num_static_blocks"] is not None
            and not (v["use_shard_on_block_dynamic_while"] or v["use_shard_on_intermediate_dynamic_while"])
        ),
        "neuron_config.blockwise_matmul_config.num_static_blocks: it is ignored because no dynamic kernel is used",
    ),
)
