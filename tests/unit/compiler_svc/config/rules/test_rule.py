import itertools
import time
from typing import Any

import pytest

from compiler_svc.config import resolve_config
from compiler_svc.config.rules import RULES, Note, Rule, broken_rules, find_value, notes_on
from compiler_svc.config.tables import TABLES
from compiler_svc.errors import ConfigInvalid

RULE = Rule(("small", "inside.large"), lambda v: v["small"] < v["inside"]["large"], "less than {inside[large]}", "Here")


def broken(small: int, large: int, mistaken: set[str]) -> list[tuple[str, str]]:
    return list(broken_rules((RULE,), {"small": small, "inside": {"large": large}}, mistaken))


def test_a_broken_rule_names_its_first_attribute_and_fills_values_in() -> None:
    assert broken(2, 1, set()) == [("small", "less than 1 (Here)")]
    assert broken(1, 2, set()) == []


@pytest.mark.parametrize("mistaken", ["small", "inside", "inside.large", "inside.large.part"])
def test_a_rule_that_reads_a_mistake_is_left_out(mistaken: str) -> None:
    assert broken(2, 1, {mistaken}) == []


@pytest.mark.parametrize("mistaken", ["smaller", "insider", "inside.larger"])
def test_mistakes_elsewhere_do_not_matter(mistaken: str) -> None:
    assert broken(2, 1, {mistaken}) == [("small", "less than 1 (Here)")]


def test_values_are_found_by_path() -> None:
    assert find_value({"one": {"two": 3}}, "one.two") == 3
    assert find_value({"one": None}, "one.two") is None


def test_notes_fill_values_in() -> None:
    notes = (Note(lambda v: v["n"] > 1, "n is {n}"), Note(lambda v: v["n"] > 9, "n is large"))
    assert list(notes_on(notes, {"n": 5})) == ["n is 5"]


@pytest.mark.parametrize("table", RULES)
def test_rules_read_attributes_that_there_are(table: str) -> None:
    rules, _ = RULES[table]
    for path in {path for rule in rules for path in rule.reads} - {"target"}:
        found = TABLES[table]
        *tables, name = path.split(".")
        for inside in tables:
            domain: Any = found.find(inside).domain
            found = TABLES[domain.of]
        assert found.find(name)


def test_everything_broken_is_told_at_once() -> None:
    neuron_config = {
        "seq_len": 64,
        "max_context_length": 128,
        "max_length": 32,
        "tp_degree": 24,
        "batch_size": 2,
        "max_batch_size": 2,
        "tkg_batch_size": 3,
        "async_mode": True,
        "qkv_kernel_enabled": True,
        "is_prefix_caching": True,
        "quantized": True,
        "speculation_length": 64,
        "lora_config": {"lora_ckpt_json": "a.json", "lora_ckpt_paths": {"a": "a", "b": "b"}},
        "padding_side": "up",
    }
    with pytest.raises(ConfigInvalid) as caught:
        resolve_config({"neuron_config": neuron_config}, checkpoint_dtype=None, target="trn2")
    assert {violation.field.removeprefix("neuron_config.") for violation in caught.value.violations} == {
        "max_context_length",
        "max_length",
        "tp_degree",
        "max_batch_size",
        "spec_batch_size",
        "tkg_batch_size",
        "async_mode",
        "qkv_kernel_enabled",
        "modules_to_not_convert",
        "is_prefix_caching",
        "quantized_checkpoints_path",
        "speculation_length",
        "lora_config.lora_ckpt_json",
        "lora_config.lora_ckpt_paths",
        "padding_side",
    }


def test_a_large_tree_is_validated_at_once() -> None:
    """Takes a second at most. Comparing each path with all others would take minutes."""
    paths = [[one, two, three, four] for one, two, three, four in itertools.product(range(10), repeat=4)]
    medusa = {"is_medusa": True, "num_medusa_heads": 4, "medusa_speculation_length": 2**20, "medusa_tree": paths}
    started = time.process_time()
    with pytest.raises(ConfigInvalid, match="different paths"):
        resolve_config({"neuron_config": medusa | {"seq_len": 2**21}}, checkpoint_dtype=None, target="trn2")
    assert time.process_time() - started < 5
