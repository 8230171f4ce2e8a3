"""Rules on what a configuration demands of the model.

Heads need no rule: they are replicated and padded until every rank has as many. Whether each rank gets a part of every
other axis is checked when weights are planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from bundle.errors import FieldViolation
from compiler_svc.config.attribute import Values
from compiler_svc.config.domains import show
from compiler_svc.config.rule import NXDI_CODE, Rule, broken_rules
from compiler_svc.config.tables.documents import FEATURE_GUIDE, HYBRID_SHARDING, MOE, ROUTED_EXPERTS
from compiler_svc.config.tables.neuron_config import NeuronConfig

#: Names of the number of experts, by family.
_EXPERT_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


def _find_count(values: Values, *names: str) -> int | None:
    """The first of these attributes that the model has as a count; the model's parser refuses other values."""
    counts = (values["model"].get(name) for name in names)
    return next((count for count in counts if type(count) is int and count > 0), None)


def _ranks_by_kv_head(values: Values) -> int | None:
    """Ranks that share a KV head; 0 if heads cannot have equally many ranks, None if the model has no heads."""
    heads = _find_count(values, "num_key_value_heads", "num_attention_heads", "n_head")
    if heads is None:
        return None
    ranks, rest = divmod(values["tp_degree"], heads)
    return 0 if rest else ranks


def _splits_positions_evenly(values: Values) -> bool:
    ranks = _ranks_by_kv_head(values)
    return not ranks or values["max_length"] % ranks == 0


def _shares_out_experts(values: Values, *degrees: int) -> bool:
    experts = _find_count(values, *_EXPERT_COUNTS)
    return experts is None or all(experts % degree == 0 for degree in degrees)


def _shares_out_experts_by_submodel(values: Values) -> bool:
    sharding = values["hybrid_sharding_config"]
    return sharding is None or _shares_out_experts(values, sharding.moe_cte_ep_degree, sharding.moe_tkg_ep_degree)


def _repeats_model(values: Values) -> bool:
    routed, model = values["routed_experts_mlp_ops_config"], values["model"]
    if routed is None:
        return True
    own = {
        "num_experts": _find_count(values, *_EXPERT_COUNTS),
        "top_k": model.get("num_experts_per_tok"),
        "hidden_size": model.get("hidden_size"),
        "hidden_act": model.get("hidden_act"),
    }
    return all(
        mine is None or getattr(routed, name) is None or getattr(routed, name) == mine for name, mine in own.items()
    )


#: The examples are for a model with 32 query heads, 4 KV heads and 8 experts, of which each token has 2.
MODEL_RULES: Final = (
    Rule(
        ("flash_decoding_enabled", "tp_degree"),
        lambda v: not v["flash_decoding_enabled"] or _ranks_by_kv_head(v) != 0,
        "false, unless tp_degree, which is {tp_degree}, is a multiple of the model's KV heads: each head's positions "
        "are split over ranks of its own",
        f"{FEATURE_GUIDE}, Grouped-query attention (GQA) support",
        breaks={"flash_decoding_enabled": True, "tp_degree": 2},
        keeps={"flash_decoding_enabled": True, "tp_degree": 8},
    ),
    Rule(
        ("max_length", "flash_decoding_enabled", "tp_degree"),
        lambda v: not v["flash_decoding_enabled"] or _splits_positions_evenly(v),
        "a multiple of the ranks that share a KV head, because flash_decoding_enabled is true",
        NXDI_CODE,
        breaks={"flash_decoding_enabled": True, "tp_degree": 16, "seq_len": 1026},
        keeps={"flash_decoding_enabled": True, "tp_degree": 16, "seq_len": 1028},
    ),
    Rule(
        ("moe_ep_degree",),
        lambda v: _shares_out_experts(v, v["moe_ep_degree"]),
        "a divisor of the model's number of experts",
        MOE,
        breaks={"tp_degree": 16, "moe_ep_degree": 16},
        keeps={"tp_degree": 8, "moe_ep_degree": 8},
    ),
    Rule(
        ("hybrid_sharding_config",),
        _shares_out_experts_by_submodel,
        "degrees of expert parallelism that are divisors of the model's number of experts",
        HYBRID_SHARDING,
        breaks={"tp_degree": 16, "hybrid_sharding_config": {"moe_cte_tp_degree": 16, "moe_tkg_ep_degree": 16}},
        keeps={"tp_degree": 8, "hybrid_sharding_config": {"moe_cte_tp_degree": 8, "moe_tkg_ep_degree": 8}},
    ),
    Rule(
        ("early_expert_affinity_modulation",),
        lambda v: not v["early_expert_affinity_modulation"] or _find_count(v, "num_experts_per_tok") in (None, 1),
        "false, because the model has several experts for each token: only the affinity of a single one can be "
        "applied before it",
        NXDI_CODE,
        breaks={"early_expert_affinity_modulation": True},
        keeps={"early_expert_affinity_modulation": False, "moe_tp_degree": 1},
    ),
    Rule(
        ("routed_experts_mlp_ops_config",),
        _repeats_model,
        "the model's own num_experts, top_k, hidden_size and hidden_act, or none of them",
        ROUTED_EXPERTS,
        breaks={"routed_experts_mlp_ops_config": {"num_experts": 16}},
        keeps={"routed_experts_mlp_ops_config": {"num_experts": 8, "top_k": 2}},
    ),
)


def model_rules(config: NeuronConfig, model: Mapping[str, Any]) -> tuple[FieldViolation, ...]:
    """Checks that a model, by the attributes of its `config.json`, can give what a configuration asks for."""
    values = {field.name: getattr(config, field.name) for field in fields(config)} | {"model": model}
    known = tuple(rule for rule in MODEL_RULES if values.keys() >= set(rule.reads))
    return tuple(
        FieldViolation(f"neuron_config.{name}", show(values[name]), accepted)
        for name, accepted in broken_rules(known, values, ())
    )
