"""Every rule and every note, by the examples that stand beside it."""

import itertools
import time
from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from bundle.manifest import TargetKind
from compiler_svc.config import Resolution, resolve_config, tables
from compiler_svc.config.model_rules import MODEL_RULES, model_rules
from compiler_svc.config.rule import Note, Rule, broken_rules
from compiler_svc.config.tables import RULES, TABLES
from compiler_svc.errors import ConfigInvalid
from tests.unit.compiler_svc.config.resolving import find_rule_text, resolve

#: The tables around each table that rules are about.
PLACES = {
    "InferenceConfig": (),
    "NeuronConfig": ("neuron_config",),
    "OnDeviceSamplingConfig": ("neuron_config", "on_device_sampling_config"),
    "KVQuantizationConfig": ("neuron_config", "kv_quant_config"),
    "LoraServingConfig": ("neuron_config", "lora_config"),
    "RoutedExpertsMLPOpsConfig": ("neuron_config", "routed_experts_mlp_ops_config"),
    "BlockwiseMatmulConfig": ("neuron_config", "blockwise_matmul_config"),
}
#: What no example can break alone: prefixes are cached in blocks.
BREAK_TOGETHER = {"false beside padding_side left: what lies behind a cached prefix is padded on the right"}

ROWS = [
    pytest.param(table, rule, id=f"{rule.reads[0]}: {rule.accepted[:40]}")
    for table, (rules, _) in RULES.items()
    for rule in rules
]
NOTES = [pytest.param(table, note, id=note.text[:60]) for table, (_, notes) in RULES.items() for note in notes]


def resolve_in(table: str, values: Mapping[str, Any], target: TargetKind) -> Resolution:
    """Resolves a document with these values of a table."""
    document = dict(values)
    if "neuron_config" not in document:
        for name in reversed(PLACES[table]):
            document = {name: document}
    return resolve_config(document, checkpoint_dtype=None, target=target)


@pytest.mark.parametrize(("table", "rule"), ROWS)
def test_a_broken_rule_is_told_with_its_source_and_a_kept_one_is_not(table: str, rule: Rule) -> None:
    target = rule.target or "trn2"
    with pytest.raises(ConfigInvalid) as caught:
        resolve_in(table, rule.breaks, target)
    place = ".".join((*PLACES[table], rule.reads[0]))
    told = [one.accepted for one in caught.value.violations if one.field == place]
    assert find_rule_text(rule, told)
    others = {one.field for one in caught.value.violations} - {place}
    assert bool(others) == (rule.accepted in BREAK_TOGETHER), others
    resolve_in(table, rule.keeps, target)
    document, _, section = rule.section.partition(", ")
    assert document in ("NxD Inference API guide", "NxD Inference feature guide", "NxD Inference", "Kiln")
    assert section


def test_what_a_subject_states_counts() -> None:
    counting = {id(one) for groups in RULES.values() for group in groups for one in group}
    modules = [import_module(file.name) for file in iter_modules(tables.__path__, f"{tables.__name__}.")]
    stated = [one for module in modules for one in vars(module).values() if isinstance(one, tuple)]
    forgotten = [one for group in stated for one in group if isinstance(one, Rule | Note) and id(one) not in counting]
    assert forgotten == []


@pytest.mark.parametrize(("table", "note"), NOTES)
def test_what_does_not_count_is_said(table: str, note: Note) -> None:
    beginning = note.text.partition("{")[0]
    doubtful = resolve_in(table, note.doubtful, note.target).warnings
    assert [warning for warning in doubtful if warning.startswith(beginning) and "{" not in warning]
    plain = resolve_in(table, note.plain, note.target).warnings
    assert not [warning for warning in plain if warning.startswith(beginning)]


def test_all_candidates_are_too_many_only_where_tokens_are_sampled() -> None:
    with pytest.raises(ConfigInvalid, match="from 1 to 1024 where tokens are sampled"):
        resolve(target="trn3", on_device_sampling_config={"dynamic": True, "global_topk": 0})
    resolve(target="trn3", on_device_sampling_config={"global_topk": 0})


def test_a_draft_model_is_named() -> None:
    target = {"speculation_length": 5, "enable_fused_speculation": True, "on_device_sampling_config": {}}
    draft = {"num_medusa_heads": 2, "on_device_sampling_config": {"top_k": 5}}
    fused_spec_config = {"draft_model_path": "draft", "draft_config": {"neuron_config": draft}}
    document = {"neuron_config": target, "fused_spec_config": fused_spec_config}
    warnings = resolve_config(document, checkpoint_dtype=None, target="trn2").warnings
    place = "fused_spec_config.draft_config.neuron_config"
    assert any(warning.startswith(f"{place}: Medusa's heads") for warning in warnings)
    assert any(warning.startswith(f"{place}.on_device_sampling_config: top_k") for warning in warnings)


RULE = Rule(("small", "inside.large"), lambda v: v["small"] < v["inside"]["large"], "less than {inside[large]}", "Here")


@pytest.mark.parametrize(
    ("mistaken", "is_told"),
    [
        *((name, False) for name in ("small", "inside", "inside.large", "inside.large.part")),
        *((name, True) for name in ("smaller", "insider", "inside.larger")),
    ],
)
def test_a_rule_is_left_out_if_it_reads_a_mistake(mistaken: str, is_told: bool) -> None:
    found = broken_rules((RULE,), {"small": 2, "inside": {"large": 1}}, {mistaken})
    assert list(found) == [("small", "less than 1 (Here)")] * is_told


@pytest.mark.parametrize("table", RULES)
def test_rules_read_attributes_that_there_are(table: str) -> None:
    rules, _ = RULES[table]
    for path in {path for rule in rules for path in rule.reads}:
        found = TABLES[table]
        *inner, name = path.split(".")
        for inside in inner:
            found = TABLES[found.find(inside).domain.table]
        assert found.find(name)


def test_a_large_tree_is_validated_at_once() -> None:
    """Takes a second at most. Comparing each path with all others would take minutes."""
    paths = [[one, two, three, four] for one, two, three, four in itertools.product(range(10), repeat=4)]
    medusa = {"is_medusa": True, "num_medusa_heads": 4, "medusa_speculation_length": 2**20, "medusa_tree": paths}
    started_s = time.process_time()
    with pytest.raises(ConfigInvalid, match="different paths"):
        resolve(target="trn2", seq_len=2**21, **medusa)
    assert time.process_time() - started_s < 5


MODEL: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 4}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "hidden_act": "silu"}


def violations_of(neuron_config: Mapping[str, Any], model: dict[str, Any]) -> dict[str, str]:
    """What is accepted in place of what the model cannot give, by field."""
    config = resolve(target="trn2", **neuron_config).config.neuron_config
    return {one.field: one.accepted for one in model_rules(config, model)}


@pytest.mark.parametrize("rule", MODEL_RULES, ids=lambda rule: rule.reads[0])
def test_a_broken_rule_of_the_model_is_told_and_a_kept_one_is_not(rule: Rule) -> None:
    found = violations_of(rule.breaks, MODEL | EXPERTS)
    assert set(found) == {f"neuron_config.{rule.reads[0]}"}
    assert find_rule_text(rule, found.values())
    assert violations_of(rule.keeps, MODEL | EXPERTS) == {}


def test_a_dense_model_keeps_all_rules_by_default() -> None:
    assert violations_of({"tp_degree": 64}, MODEL) == {}


@pytest.mark.parametrize("count", [None, 0, -1, "8", 8.0, True, []])
def test_a_count_that_is_none_is_left_to_whoever_parses_the_model(count: Any) -> None:
    asks_for_all = {"flash_decoding_enabled": True, "tp_degree": 8, "moe_ep_degree": 8}
    asks_for_all["early_expert_affinity_modulation"] = True
    model = dict.fromkeys(("num_key_value_heads", "num_local_experts", "num_experts_per_tok"), count)
    assert violations_of(asks_for_all, model) == {}
