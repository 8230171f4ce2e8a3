"""Attributes under the names that families give them, and what families refuse."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest

from compiler_svc.models.errors import ModelConfigInvalid
from compiler_svc.models.registry import describe_model, list_attributes, list_families
from tests.unit.compiler_svc.models.sizes import SIZES

GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 64,
    "n_head": 8,
    "n_layer": 2,
}
#: What `config.json` of bigscience/bloom-560m says, by its names.
BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "vocab_size": 250880,
    "n_embed": 1024,
    "n_layer": 24,
    "num_attention_heads": 16,
    "n_inner": None,
}
NEOX, LLAMA = (SIZES | {"architectures": [name]} for name in ("GPTNeoXForCausalLM", "LlamaForCausalLM"))


def test_the_names_of_checkpoints_on_the_hub() -> None:
    description = describe_model(BLOOM)
    assert (description.hidden_size, len(description.layers)) == (1024, 24)
    assert description.layers[0].attention.heads.num_query_heads == 16
    shapes = description.checkpoint_tensors()
    assert shapes["transformer.h.23.mlp.dense_h_to_4h.weight"] == (4096, 1024)
    assert shapes["transformer.h.0.self_attention.query_key_value.bias"] == (3072,)


def test_other_names_that_transformers_takes_mean_the_same() -> None:
    other = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
    renamed = {name: value for name, value in GPT2.items() if not name.startswith("n_")} | other
    assert describe_model(renamed) == describe_model(GPT2)
    assert describe_model(GPT2 | other) == describe_model(GPT2)


@pytest.mark.parametrize("architecture", sorted(list_families()))
def test_every_name_that_transformers_maps_is_read(architecture: str) -> None:
    """`attribute_map` of its configuration's class: another name, and the attribute that it sets."""
    family = list_families()[architecture]
    aliases: dict[str, str] = resolve_name(family.reference).config_class.attribute_map
    counting = {alias: name for alias, name in aliases.items() if name in family.attributes}
    assert counting.keys() <= family.attributes
    assert all(alias in family.names.list_synonyms(name) for alias, name in counting.items())
    if architecture in {"GPT2LMHeadModel", "GPTJForCausalLM", "BloomForCausalLM"}:
        assert len(counting) >= 2


def test_two_names_with_two_values_are_a_mistake() -> None:
    with pytest.raises(ModelConfigInvalid) as caught:
        describe_model(GPT2 | {"hidden_size": 32})
    (violation,) = caught.value.violations
    assert str(violation) == "hidden_size: got 32; accepted: 64, which n_embd says: both name one attribute"


@pytest.mark.parametrize(
    ("architecture", "family", "names"),
    [
        ("GPT2LMHeadModel", "GPT-2", ["n_embd", "n_head", "vocab_size", "n_layer"]),
        ("LlamaForCausalLM", "Llama", sorted(SIZES.keys() - {"ffn_dim", "num_key_value_heads"})),
    ],
)
def test_all_missing_attributes_at_once_by_the_family_s_names(architecture: str, family: str, names: list[str]) -> None:
    with pytest.raises(ModelConfigInvalid, match=f"the configuration of a {family} model must define ") as caught:
        describe_model({"architectures": [architecture], "hidden_act": None, "rope_scaling": {"type": "linear"}})
    assert caught.value.metadata["family"] == family
    assert sorted(caught.value.metadata["missing"].split(", ")) == sorted(names)
    mistakes = {"rope_scaling.factor"} if family == "Llama" else set()
    assert {one.field for one in caught.value.violations} == {*names} | mistakes


def test_all_mistakes_at_once() -> None:
    changes = {"hidden_size": "64", "num_key_value_heads": 0, "rms_norm_eps": 0, "mlp_bias": 1}
    with pytest.raises(ModelConfigInvalid) as caught:
        describe_model(LLAMA | changes | {"rope_scaling": {"rope_type": "linear"}})
    assert {violation.field: violation.accepted for violation in caught.value.violations} == {
        "hidden_size": "an integer from 1 to 1048576",
        "num_key_value_heads": "an integer from 1 to 1024",
        "rms_norm_eps": "a number above 0",
        "rope_scaling.factor": "a number above 0",
        "mlp_bias": "true or false",
    }
    assert "hidden_size: got '64'; accepted: an integer from 1 to 1048576" in str(caught.value)


def test_rotary_attributes_of_older_checkpoints() -> None:
    """`rotary_pct` and `rotary_emb_base` of Pythia's files mean what `rope_parameters` says today."""
    today = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    older = describe_model(NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 5000})
    assert older == describe_model(NEOX | {"rope_parameters": today})
    assert older.ropes[0].rotary_dim == 4
    assert describe_model(NEOX).ropes[0].rotary_dim == 2


def test_the_attributes_of_any_family_count_if_the_model_is_unknown() -> None:
    unknown = list_attributes({"architectures": ["Unknown"]})
    assert unknown == list_attributes({})
    assert unknown > list_attributes(LLAMA)
    assert {"mlp_bias", "sliding_window"} <= unknown


@pytest.mark.parametrize("architectures", [None, [], ["a", "b"], "LlamaForCausalLM", [3]])
def test_no_single_architecture(architectures: object) -> None:
    with pytest.raises(ModelConfigInvalid, match="architectures"):
        describe_model(LLAMA | {"architectures": architectures})


def test_json_tells_configurations_apart() -> None:
    assert describe_model(LLAMA).numeric_config == describe_model(LLAMA | {"torch_dtype": "bfloat16"}).numeric_config
    kinds = ({"rope_scaling": {"type": kind, "factor": 2.0}} for kind in ("linear", "dynamic"))
    variants = [
        describe_model(LLAMA | changes).numeric_config
        for changes in ({}, {"rope_theta": 5.0}, *kinds, {"rms_norm_eps": 1e-5})
    ]
    assert len({str(sorted(variant.items())) for variant in variants}) == len(variants)
