"""Overrides of a configuration."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from kiln_client.documents import apply_overrides, parse_override
from kiln_client.errors import OverrideInvalid

DOCUMENT = {"neuron_config": {"seq_len": 128, "lora_config": {"max_loras": 2}, "batch_size": 1}, "rope_theta": 1e4}


def override(*texts: str) -> dict[str, Any]:
    return apply_overrides(DOCUMENT, [parse_override(text) for text in texts])


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("neuron_config.seq_len=256", ("neuron_config", "seq_len"), 256),
        ("rope_theta=1e6", ("rope_theta",), 1e6),
        ("a = [1, 2]", ("a",), [1, 2]),
        ('a={"b": null}', ("a",), {"b": None}),
        ("a=", ("a",), None),
        ("a=b=c", ("a",), "b=c"),
        ("a=yes", ("a",), "yes"),
        ("a=.inf", ("a",), math.inf),
    ],
)
def test_a_value_is_yaml(text: str, path: tuple[str, ...], value: object) -> None:
    parsed = parse_override(text)
    assert (parsed.path, parsed.value) == (path, value)


def test_values_are_replaced_by_path_in_order() -> None:
    before = copy.deepcopy(DOCUMENT)
    assert override("neuron_config.seq_len=256", "neuron_config.seq_len=512", "rope_theta=1e6") == {
        "neuron_config": {"seq_len": 512, "lora_config": {"max_loras": 2}, "batch_size": 1},
        "rope_theta": 1e6,
    }
    assert override("neuron_config.lora_config.max_loras=3")["neuron_config"]["lora_config"] == {"max_loras": 3}
    assert before == DOCUMENT


def test_an_object_is_replaced_as_a_whole() -> None:
    assert override("neuron_config={seq_len: 64}")["neuron_config"] == {"seq_len": 64}


def test_objects_on_the_way_are_made() -> None:
    assert override("fused_spec_config.draft_config.neuron_config.seq_len=64")["fused_spec_config"] == {
        "draft_config": {"neuron_config": {"seq_len": 64}}
    }
    assert apply_overrides({"a": None}, [parse_override("a.b=1")]) == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("neuron_config.seq_len", "accepted: PATH=VALUE"),
        ("=1", "accepted: PATH=VALUE"),
        ("a..b=1", "accepted: PATH=VALUE"),
        ("a=[1", "accepted: a value in YAML or JSON"),
        ("a=.nan", "accepted: a value in YAML or JSON"),
        ("a=!x 1", "accepted: a value in YAML or JSON"),
        ("neuron_config.seq_len.x=1", "got 128 at neuron_config.seq_len; accepted: an object there"),
        ("rope_theta.a.b=1", "got 10000.0 at rope_theta; accepted: an object there"),
    ],
)
def test_what_is_no_override(text: str, accepted: str) -> None:
    with pytest.raises(OverrideInvalid) as caught:
        override(text)
    assert caught.value.reason == "CONFIG_INVALID"
    assert accepted in caught.value.fields[0].description
