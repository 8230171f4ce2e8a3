"""Model attributes in place of a checkpoint's."""

from pathlib import Path
from typing import Any

import pytest

from compiler_svc.models.errors import ModelConfigInvalid
from compiler_svc.models.registry import describe_model
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.overrides import find_changes, override_checkpoint

TRANSFORMERS_4 = {
    "hidden_size": 64,
    "rope_theta": 500000.0,
    "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0},
    "eos_token_id": 2,
}
TRANSFORMERS_5 = {
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
    "eos_token_id": 2,
}


def checkpoint(config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(
        path=Path("/models/tiny"),
        files=(),
        index=None,
        tensors={},
        config=config,
        generation_config={"eos_token_id": [2, 3], "do_sample": True},
        tokenizer_files=(),
        describing_files=(),
        chat_templates={},
        template_files={},
    )


def override(config: dict[str, Any], attribute_map: dict[str, str] | None = None, **attributes: Any) -> Checkpoint:
    return override_checkpoint(checkpoint(config), attributes, attribute_map or {})


def test_an_attribute_is_replaced_and_others_stay() -> None:
    overridden = override(TRANSFORMERS_5, hidden_size=128, rms_norm_eps=1e-5)
    assert overridden.config == TRANSFORMERS_5 | {"hidden_size": 128, "rms_norm_eps": 1e-5}
    assert overridden.generation_config == {"eos_token_id": [2, 3], "do_sample": True}


def test_token_ids_count_in_both_files() -> None:
    overridden = override(TRANSFORMERS_5, eos_token_id=7)
    assert overridden.config["eos_token_id"] == 7
    assert overridden.generation_config == {"eos_token_id": 7, "do_sample": True}


def test_an_alias_in_the_checkpoint() -> None:
    config = {"n_embd": 64, "vocab_size": 10}
    assert override(config, {"n_embd": "hidden_size"}).config == {"hidden_size": 64, "vocab_size": 10}
    assert override(config, {"n_embd": "hidden_size"}, hidden_size=32).config["hidden_size"] == 32
    assert find_changes(checkpoint(config), {"hidden_size": 64}, {"n_embd": "hidden_size"}) == {}


@pytest.mark.parametrize("config", [TRANSFORMERS_4, TRANSFORMERS_5])
@pytest.mark.parametrize(
    ("attributes", "rope"),
    [
        ({"rope_theta": 1e4}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 3.0}},
            {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 5e5},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"rope_type": "default", "rope_theta": 1e4}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        ),
    ],
)
def test_either_form_of_a_rotary_embedding_replaces_the_other(
    config: dict[str, Any], attributes: dict[str, Any], rope: dict[str, Any]
) -> None:
    overridden = override(config, **attributes).config
    assert overridden["rope_parameters"] == rope
    assert overridden.keys().isdisjoint({"rope_theta", "rope_scaling"})
    assert find_changes(checkpoint(config), attributes, {}) == attributes


@pytest.mark.parametrize("config", [TRANSFORMERS_4, TRANSFORMERS_5])
@pytest.mark.parametrize("attributes", [TRANSFORMERS_4, TRANSFORMERS_5, {"pad_token_id": None}, {}])
def test_what_a_checkpoint_says_already_changes_nothing(config: dict[str, Any], attributes: dict[str, Any]) -> None:
    assert find_changes(checkpoint(config), attributes, {}) == {}
    assert override(config).config == config


@pytest.mark.parametrize("attributes", [{"rope_scaling": 3}, {"rope_parameters": "linear"}])
def test_what_is_no_rotary_embedding_stays_visible(attributes: dict[str, Any]) -> None:
    assert override(TRANSFORMERS_5, **attributes).config == TRANSFORMERS_5 | attributes


def test_parts_of_a_rotary_embedding_that_change_nothing_are_dropped() -> None:
    given = {"rope_theta": 1e4, "rope_scaling": TRANSFORMERS_4["rope_scaling"]}
    assert find_changes(checkpoint(TRANSFORMERS_5), given, {}) == {"rope_theta": 1e4}
    both = {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert find_changes(checkpoint(TRANSFORMERS_5), both, {}) == both


def test_changes() -> None:
    attributes = {"hidden_size": 64, "vocab_size": 10, "eos_token_id": [2], "rope_theta": 500000.0}
    assert find_changes(checkpoint(TRANSFORMERS_5), attributes, {}) == {"vocab_size": 10, "eos_token_id": [2]}


GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 64, "n_head": 8, "n_layer": 2}


@pytest.mark.parametrize("name", ["hidden_size", "n_embd"])
def test_an_attribute_takes_the_place_of_its_other_names(name: str) -> None:
    overridden = override(GPT2, **{name: 128}).config
    assert overridden == {key: value for key, value in GPT2.items() if key != "n_embd"} | {name: 128}
    assert describe_model(overridden).hidden_size == 128
    assert find_changes(checkpoint(GPT2), {name: 64}, {}) == {}
    assert find_changes(checkpoint(GPT2), {name: 128}, {}) == {name: 128}


def test_two_names_of_a_document_with_two_values_are_a_mistake() -> None:
    with pytest.raises(ModelConfigInvalid, match="both name one attribute"):
        describe_model(override(GPT2, hidden_size=128, n_embd=32).config)


FULL, SLIDING = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "sliding_window_pattern": 2,
}
TWO_ROPES = [
    GEMMA3 | {"rope_parameters": {"full_attention": FULL, "sliding_attention": SLIDING}},
    GEMMA3 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
]


@pytest.mark.parametrize("config", TWO_ROPES)
@pytest.mark.parametrize(
    ("attributes", "full", "sliding"),
    [
        ({"rope_theta": 5e5}, FULL | {"rope_theta": 5e5}, SLIDING),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, FULL | {"factor": 2.0}, SLIDING),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e6}, SLIDING),
        ({"rope_local_base_freq": 5e3}, FULL, SLIDING | {"rope_theta": 5e3}),
        ({"rope_parameters": {"full_attention": SLIDING, "sliding_attention": FULL}}, SLIDING, FULL),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 3e3}}}, FULL, SLIDING | {"rope_theta": 3e3}),
    ],
)
def test_either_of_two_rotary_embeddings_is_replaced(
    config: dict[str, Any], attributes: dict[str, Any], full: dict[str, Any], sliding: dict[str, Any]
) -> None:
    overridden = override(config, **attributes).config
    assert overridden["rope_parameters"] == {"full_attention": full, "sliding_attention": sliding}
    assert overridden.keys().isdisjoint({"rope_theta", "rope_scaling", "rope_local_base_freq"})
    assert find_changes(checkpoint(config), attributes, {}) == attributes
    description = describe_model(overridden)
    assert [rope.rope.theta for rope in description.ropes] == [full["rope_theta"], sliding["rope_theta"]]


@pytest.mark.parametrize("attributes", TWO_ROPES)
@pytest.mark.parametrize("config", TWO_ROPES)
def test_what_two_rotary_embeddings_are_already_changes_nothing(config: Any, attributes: Any) -> None:
    assert find_changes(checkpoint(config), attributes, {}) == {}


def test_one_rotary_embedding_for_two_kinds_of_layers_is_a_mistake() -> None:
    with pytest.raises(ModelConfigInvalid, match=r"rope_parameters: .*an object for each kind of layers"):
        describe_model(override(TWO_ROPES[0], rope_parameters=FULL).config)


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_a_rotary_embedding_that_is_no_object_is_named(layer_type: str) -> None:
    # Every layer slides or none does: what no layer has is checked, too.
    for sliding_window_pattern in (1, 100):
        config = TWO_ROPES[0] | {"sliding_window_pattern": sliding_window_pattern, "layer_types": None}
        wrong = config["rope_parameters"] | {layer_type: 3}
        with pytest.raises(ModelConfigInvalid) as caught:
            describe_model(override(config, rope_parameters=wrong).config)
        assert [one.field for one in caught.value.violations] == [f"rope_parameters.{layer_type}"]


_DENSE = {name: value for name, value in GEMMA3.items() if name != "architectures"} | {"num_key_value_heads": 4}
NEOX, PHI3 = (_DENSE | {"architectures": [name]} for name in ("GPTNeoXForCausalLM", "Phi3ForCausalLM"))
PARTLY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
PARTLY_ROTATED = [
    NEOX | PARTLY,
    NEOX | {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    PHI3 | PARTLY,
    PHI3 | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
]


@pytest.mark.parametrize("config", PARTLY_ROTATED)
def test_numbers_of_a_rotary_embedding_in_either_place(config: dict[str, Any]) -> None:
    is_neox = "GPTNeoXForCausalLM" in config["architectures"]
    base, share = ("rotary_emb_base", "rotary_pct") if is_neox else ("rope_theta", "partial_rotary_factor")
    linear = {"rope_type": "linear", "factor": 2.0}
    cases: list[tuple[dict[str, Any], float, int]] = [
        ({base: 5e5}, 5e5, 8),
        ({share: 1.0}, 1e4, 16),
        # transformers' own default of the family.
        ({share: None}, 1e4, 4 if is_neox else 16),
    ]
    if is_neox:  # Phi-3 has no rotary embedding that is scaled by one number.
        cases += [
            ({"rope_scaling": linear}, 1e4, 8),
            ({"rope_parameters": linear | {"partial_rotary_factor": 1.0}}, 1e4, 16),
            ({base: 5e5, share: 1.0, "rope_scaling": linear}, 5e5, 16),
        ]
    for attributes, theta, rotary_dim in cases:
        rope = describe_model(override(config, **attributes).config).ropes[0]
        assert (rope.rope.theta, rope.rotary_dim) == (theta, rotary_dim), attributes
        assert find_changes(checkpoint(config), attributes, {}) == attributes
    assert find_changes(checkpoint(config), {base: 1e4, share: 0.5}, {}) == {}
