"""Attributes under the names that families give them, and what families refuse."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest

from compiler_svc.models.errors import ModelConfigInvalid, ModelNotServed
from compiler_svc.models.registry import describe_model, list_families

GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 64,
    "n_head": 8,
    "n_layer": 2,
}
GPTJ = GPT2 | {"architectures": ["GPTJForCausalLM"], "rotary_dim": 4}
#: What `config.json` of bigscience/bloom-560m says, by its names.
BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "vocab_size": 250880,
    "n_embed": 1024,
    "n_layer": 24,
    "num_attention_heads": 16,
    "n_inner": None,
}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_dim": 100,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
}
NEOX = OPT | {"architectures": ["GPTNeoXForCausalLM"], "intermediate_size": 100}


def find_violations(config: dict[str, Any], error: type[ModelConfigInvalid | ModelNotServed]) -> list[str]:
    with pytest.raises(error) as caught:
        describe_model(config)
    return [str(one) for one in caught.value.violations]


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
    assert find_violations(GPT2 | {"hidden_size": 32}, ModelConfigInvalid) == [
        "hidden_size: got 32; accepted: 64, which n_embd says: both name one attribute"
    ]


def test_all_missing_attributes_at_once_by_the_family_s_names() -> None:
    missing = find_violations({"architectures": ["GPT2LMHeadModel"]}, ModelConfigInvalid)
    assert [one.partition(":")[0] for one in missing] == ["n_embd", "n_head", "vocab_size", "n_layer"]
    with pytest.raises(ModelConfigInvalid, match="the configuration of a GPT-2 model must define n_embd, n_head, "):
        describe_model({"architectures": ["GPT2LMHeadModel"]})


@pytest.mark.parametrize(
    ("config", "changes", "violation"),
    [
        (GPT2, {"n_embd": 60}, "n_embd: got 60; accepted: a multiple of 8 heads"),
        (GPT2, {"n_embd": 40}, "n_embd: got 40; accepted: a multiple of 16: heads have an even size"),
        (GPT2, {"n_inner": 0}, "n_inner: got 0; accepted: an integer from 1 to 1048576"),
        (GPT2, {"n_positions": 1 << 28}, "n_positions: got 268435456; accepted: an integer from 1 to 134217728"),
        (GPTJ, {"rotary_dim": 5}, "rotary_dim: got 5; accepted: an even number up to 8, the size of heads"),
        (GPTJ, {"rotary_dim": None}, "rotary_dim: got 64; accepted: an even number up to 8, the size of heads"),
        (OPT, {"word_embed_proj_dim": 0}, "word_embed_proj_dim: got 0; accepted: an integer from 1 to 1048576"),
        (NEOX, {"rotary_pct": 2.0}, "rotary_pct: got 2.0; accepted: at most 1.0"),
    ],
)
def test_impossible_values(config: dict[str, Any], changes: dict[str, Any], violation: str) -> None:
    assert find_violations(config | changes, ModelConfigInvalid) == [violation]


@pytest.mark.parametrize(
    ("config", "changes", "violation"),
    [
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights: got False; accepted: true"),
        (
            GPT2,
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx: got True; accepted: false",
        ),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention: got True; accepted: false"),
        (
            GPTJ,
            {"tie_word_embeddings": True},
            "tie_word_embeddings: got True; accepted: false: the output layer has biases of its own",
        ),
        (
            BLOOM,
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm: got True; accepted: false",
        ),
    ],
)
def test_what_is_not_served(config: dict[str, Any], changes: dict[str, Any], violation: str) -> None:
    assert find_violations(config | changes, ModelNotServed) == [violation]


def test_rotary_attributes_of_older_checkpoints() -> None:
    """`rotary_pct` and `rotary_emb_base` of Pythia's files mean what `rope_parameters` says today."""
    today = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    older = describe_model(NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 5000})
    assert older == describe_model(NEOX | {"rope_parameters": today})
    assert older.rope.rotary_dim == 4
    assert describe_model(NEOX).rope.rotary_dim == 2
