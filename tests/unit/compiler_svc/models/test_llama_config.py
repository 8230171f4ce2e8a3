from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from transformers import LlamaConfig as ReferenceConfig

from compiler_svc.models.errors import ModelConfigInvalid, ModelNotServed
from compiler_svc.models.families.llama.config import LlamaConfig
from compiler_svc.models.registry import describe_model, find_family, list_attributes
from compiler_svc.models.rope_config import DefaultRope, Llama3Rope, LongRope, RopeConfig, YarnRope

REQUIRED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}

# config.json of Llama 3.1 8B as transformers 4 wrote it.
TRANSFORMERS_4 = REQUIRED | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "pretraining_tp": 1,
    "attention_dropout": 0.0,
}


def parse_any(config: Mapping[str, Any]) -> LlamaConfig:
    family = find_family(config)
    describe_model(config)
    parsed = family.parse_config(config, "LlamaForCausalLM")
    assert isinstance(parsed, LlamaConfig)
    return parsed


def parse(**attributes: Any) -> LlamaConfig:
    return parse_any(REQUIRED | attributes)


def test_defaults_are_those_of_transformers() -> None:
    config = parse()
    reference = ReferenceConfig(**{name: value for name, value in REQUIRED.items() if name != "architectures"})
    for name in (field.name for field in fields(config)):
        if name not in {"architecture", "rope"}:
            assert getattr(config, name) == getattr(reference, name), name
    assert reference.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config.rope == DefaultRope(10_000.0)


def test_config_of_transformers_4_and_5() -> None:
    old = parse_any(TRANSFORMERS_4)
    written = ReferenceConfig(**TRANSFORMERS_4).to_dict()
    assert "rope_theta" not in written
    assert parse_any(written) == old
    assert old.rope == Llama3Rope(500_000.0, 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("attributes", "rope"),
    [
        ({"rope_theta": 5.0, "rope_scaling": None}, DefaultRope(5.0)),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, DefaultRope(6.0)),
        ({"rope_theta": 5, "rope_parameters": {"rope_type": "default"}}, DefaultRope(5.0)),
        ({"rope_scaling": {"type": "default"}}, DefaultRope(10_000.0)),
    ],
)
def test_theta_from_either_place(attributes: dict[str, Any], rope: RopeConfig) -> None:
    assert parse(**attributes).rope == rope


def test_yarn_derives_what_is_missing() -> None:
    rope = parse(
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024, "mscale": 0},
    ).rope
    assert isinstance(rope, YarnRope)
    assert (rope.factor, rope.beta_fast, rope.beta_slow, rope.truncate) == (4.0, 32.0, 1.0, True)
    assert rope.attention_scaling == pytest.approx(1.1386294)


def test_original_length_beside_the_rope_parameters_wins() -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = parse(rope_scaling=longrope, max_position_embeddings=4096, original_max_position_embeddings=64).rope
    assert isinstance(rope, LongRope)
    assert rope.original_max_position_embeddings == 64


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ModelConfigInvalid) as caught:
        parse(hidden_size="64", num_key_value_heads=0, rms_norm_eps=0, rope_scaling={"rope_type": "linear"}, mlp_bias=1)
    assert {violation.field: violation.accepted for violation in caught.value.violations} == {
        "hidden_size": "an integer from 1 to 1048576",
        "num_key_value_heads": "an integer from 1 to 1024",
        "rms_norm_eps": "a number above 0",
        "rope_scaling.factor": "a number above 0",
        "mlp_bias": "true or false",
    }
    assert "hidden_size: got '64'; accepted: an integer from 1 to 1048576" in str(caught.value)


@pytest.mark.parametrize("name", [name for name in REQUIRED if name != "architectures"])
def test_required_attributes(name: str) -> None:
    with pytest.raises(ModelConfigInvalid) as caught:
        parse_any({key: value for key, value in REQUIRED.items() if key != name})
    assert caught.value.violations[0].field == name
    assert caught.value.violations[0].value == "nothing"
    assert f"the configuration of a Llama model must define {name}" in str(caught.value)


def test_all_missing_attributes_at_once() -> None:
    with pytest.raises(ModelConfigInvalid) as caught:
        parse_any({"architectures": ["LlamaForCausalLM"], "hidden_act": None, "rope_scaling": {"type": "linear"}})
    missing = {*REQUIRED} - {"architectures"}
    assert {violation.field for violation in caught.value.violations} == missing | {"rope_scaling.factor"}
    assert set(caught.value.metadata["missing"].split(", ")) == missing
    assert caught.value.metadata["family"] == "Llama"


def test_the_attributes_of_any_family_count_if_the_model_is_unknown() -> None:
    unknown = list_attributes({"architectures": ["Unknown"]})
    assert unknown == list_attributes({})
    assert unknown > list_attributes(REQUIRED)
    assert {"mlp_bias", "sliding_window"} <= unknown


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_a_rotary_embedding_may_have_the_theta(name: str) -> None:
    config = {key: value for key, value in REQUIRED.items() if key != "rope_theta"}
    assert parse_any(config | {name: {"rope_type": "default", "rope_theta": 7.0}}).rope == DefaultRope(7.0)


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.factor"),
        ({"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1.0] * 4}},
            "rope_scaling.short_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            "rope_scaling.high_freq_factor",
        ),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": True}}, "rope_parameters.factor"),
    ],
)
def test_impossible_values(attributes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelConfigInvalid) as caught:
        parse(**attributes)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("attributes", "field", "accepted"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures", "LlamaForCausalLM"),
        ({"hidden_act": "quick_gelu"}, "hidden_act", "silu"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_scaling.rope_type", "longrope"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor", "1.0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "unquantized"),
    ],
)
def test_what_is_not_served(attributes: dict[str, Any], field: str, accepted: str) -> None:
    with pytest.raises(ModelNotServed) as caught:
        parse(**attributes)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert accepted in violation.accepted
    assert caught.value.reason == "FEATURE_NOT_SERVED"


@pytest.mark.parametrize("architectures", [None, [], ["a", "b"], "LlamaForCausalLM", [3]])
def test_no_single_architecture(architectures: object) -> None:
    with pytest.raises(ModelConfigInvalid, match="architectures"):
        parse(architectures=architectures)


def test_json_tells_configurations_apart() -> None:
    assert parse().to_json() == parse(torch_dtype="bfloat16").to_json()
    variants = [
        parse(),
        parse(rope_theta=5.0),
        parse(rope_scaling={"type": "linear", "factor": 2.0}),
        parse(rope_scaling={"type": "dynamic", "factor": 2.0}),
        parse(rms_norm_eps=1e-5),
    ]
    assert len({str(sorted(variant.to_json().items())) for variant in variants}) == len(variants)
