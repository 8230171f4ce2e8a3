from dataclasses import dataclass
from typing import Any

import pytest

from compiler_svc.config import resolve_config
from compiler_svc.config.rules.model import MODEL_RULES, model_rules
from compiler_svc.config.rules.rule import Rule

MODEL = {"num_attention_heads": 32, "num_key_value_heads": 4}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "hidden_act": "silu"}


@dataclass(frozen=True)
class ModelCase:
    """A rule on models, with NeuronConfigs that break it and keep it."""

    attribute: str
    accepted: str
    fails: dict[str, Any]
    passes: dict[str, Any]
    model: dict[str, Any]

    @property
    def rule(self) -> Rule:
        (rule,) = (
            rule for rule in MODEL_RULES if rule.reads[0] == self.attribute and rule.accepted.startswith(self.accepted)
        )
        return rule

    def __str__(self) -> str:
        return self.attribute


CASES = (
    ModelCase(
        "flash_decoding_enabled",
        "false, unless tp_degree",
        fails={"flash_decoding_enabled": True, "tp_degree": 2},
        passes={"flash_decoding_enabled": True, "tp_degree": 8},
        model=MODEL,
    ),
    ModelCase(
        "max_length",
        "a multiple of the ranks that share a KV head",
        fails={"flash_decoding_enabled": True, "tp_degree": 16, "seq_len": 1026},
        passes={"flash_decoding_enabled": True, "tp_degree": 16, "seq_len": 1028},
        model=MODEL,
    ),
    ModelCase(
        "moe_ep_degree",
        "a divisor of the model's number of experts",
        fails={"tp_degree": 16, "moe_ep_degree": 16},
        passes={"tp_degree": 8, "moe_ep_degree": 8},
        model=EXPERTS,
    ),
    ModelCase(
        "hybrid_sharding_config",
        "degrees of expert parallelism",
        fails={"tp_degree": 16, "hybrid_sharding_config": {"moe_cte_tp_degree": 16, "moe_tkg_ep_degree": 16}},
        passes={"tp_degree": 8, "hybrid_sharding_config": {"moe_cte_tp_degree": 8, "moe_tkg_ep_degree": 8}},
        model=EXPERTS,
    ),
    ModelCase(
        "early_expert_affinity_modulation",
        "false, because the model has several experts for each token",
        fails={"early_expert_affinity_modulation": True},
        passes={"early_expert_affinity_modulation": False, "moe_tp_degree": 1},
        model=EXPERTS,
    ),
    ModelCase(
        "routed_experts_mlp_ops_config",
        "the model's own num_experts",
        fails={"routed_experts_mlp_ops_config": {"num_experts": 16}},
        passes={"routed_experts_mlp_ops_config": {"num_experts": 8, "top_k": 2}},
        model=EXPERTS,
    ),
)


def violations_of(neuron_config: dict[str, Any], model: dict[str, Any]) -> dict[str, str]:
    """What is accepted in place of what the model cannot give, by field."""
    resolution = resolve_config({"neuron_config": neuron_config}, checkpoint_dtype=None, target="trn2")
    return {one.field: one.accepted for one in model_rules(resolution.config.neuron_config, model)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_broken_rule_is_told_and_a_kept_one_is_not(case: ModelCase) -> None:
    found = violations_of(case.fails, case.model)
    assert set(found) == {f"neuron_config.{case.attribute}"}
    text = found[f"neuron_config.{case.attribute}"]
    assert text.startswith(case.accepted)
    assert text.endswith(f" ({case.rule.section})")
    assert violations_of(case.passes, case.model) == {}


def test_every_rule_has_a_case() -> None:
    with_cases = [case.rule for case in CASES]
    assert [rule.accepted for rule in MODEL_RULES if rule not in with_cases] == []


def test_a_dense_model_keeps_all_rules_by_default() -> None:
    assert violations_of({"tp_degree": 64}, MODEL) == {}


@pytest.mark.parametrize("count", [None, 0, -1, "8", 8.0, True, []])
def test_a_count_that_is_none_is_left_to_whoever_parses_the_model(count: Any) -> None:
    asks_for_all = {
        "flash_decoding_enabled": True,
        "tp_degree": 8,
        "moe_ep_degree": 8,
        "early_expert_affinity_modulation": True,
    }
    model = dict.fromkeys(("num_key_value_heads", "num_local_experts", "num_experts_per_tok"), count)
    assert violations_of(asks_for_all, model) == {}
