"""Rules on what a configuration demands of the model.

Heads need no rule: they are replicated and padded until every rank has as many. That each rank gets a part of every
other axis is checked where weights are planned, which knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from bundle.errors import FieldViolation
from compiler_svc.config.attribute import Values
from compiler_svc.config.domains import show
from compiler_svc.config.neuron_config import NeuronConfig
from compiler_svc.config.rules.rule import NXDI_CODE, Rule, broken_rules
from compiler_svc.config.tables.documents import FEATURE_GUIDE, MOE, ROUTED_EXPERTS

#: Names of the number of experts, by family.
_EXPERT_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


def _kv_heads(values: Values) -> int:
    model = values["model"]
    heads: int = model.get("num_key_value_heads") or model.get("num_attention_heads") or 1
    return heads


def _num_experts(values: Values) -> int | None:
    return next((values["model"][name] for name in _EXPERT_COUNTS if values["model"].get(name)), None)


def _splits_positions_evenly(values: Values) -> bool:
    """Whether the ranks of a KV head have equally many positions; undecided where heads do not allow it at all."""
    ranks: int = values["tp_degree"] // _kv_heads(values)
    return ranks == 0 or values["max_length"] % ranks == 0


def _shares_out_experts(values: Values, degree: int) -> bool:
    experts = _num_experts(values)
    return experts is None or experts % degree == 0


def _repeats_model(values: Values) -> bool:
    routed, model = values["routed_experts_mlp_ops_config"], values["model"]
    if routed is None:
        return True
    own = {
        "num_experts": _num_experts(values),
        "top_k": model.get("num_experts_per_tok"),
        "hidden_size": model.get("hidden_size"),
        "hidden_act": model.get("hidden_act"),
    }
    return all(
        mine is None or getattr(routed, name) is None or getattr(routed, name) == mine for name, mine in own.items()
    )


MODEL_RULES: Final = (
    Rule(
        ("flash_decoding_enabled", "tp_degree"),
        lambda v: not v["flash_decoding_enabled"] or v["tp_degree"] % _kv_heads(v) == 0,
        "false, unless tp_degree, which is {tp_degree}, is a multiple of the model's KV heads: each head's positions "
        "are split over ranks of its own",
        f"{FEATURE_GUIDE}, Grouped-query attention (GQA) support",
    ),
    Rule(
        ("max_length", "flash_decoding_enabled", "tp_degree"),
        lambda v: not v["flash_decoding_enabled"] or _splits_positions_evenly(v),
        "a multiple of the ranks that share a KV head, because flash_decoding_enabled is true",
        NXDI_CODE,
    ),
    Rule(
        ("moe_ep_degree",),
        lambda v: _shares_out_experts(v, v["moe_ep_degree"]),
        "a divisor of the model's number of experts",
        MOE,
    ),
    Rule(
        ("early_expert_affinity_modulation",),
        lambda v: not v["early_expert_affinity_modulation"] or v["model"].get("num_experts_per_tok", 1) == 1,
        "false, because the model has several experts for each token: only the affinity of a single one can be "
        "applied before it",
        NXDI_CODE,
    ),
    Rule(
        ("routed_experts_mlp_ops_config",),
        _repeats_model,
        "the model's own num_experts, top_k, hidden_size and hidden_act, or none of them",
        ROUTED_EXPERTS,
    ),
)


def model_rules(config: NeuronConfig, model: Mapping[str, Any]) -> tuple[FieldViolation, ...]:
    """What a configuration asks for that the model cannot give.

    Args:
        model: The model's attributes, as its `config.json` names them.

    Returns:
        One violation for each broken rule; none where model and configuration fit.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)} | {"model": model}
    known = tuple(rule for rule in MODEL_RULES if values.keys() >= set(rule.reads))
    return tuple(
        FieldViolation(f"neuron_config.{name}", show(values[name]), accepted)
        for name, accepted in broken_rules(known, values, ())
    )
