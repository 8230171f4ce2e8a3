"""Attributes by which layers of one model differ, as transformers 4 and 5 spell them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from compiler_svc.models.description import ModelDescription
from compiler_svc.models.errors import ModelConfigInvalid, ModelNotServed
from compiler_svc.models.registry import describe_model

REQUIRED: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}


def describe(architecture: str, **attributes: Any) -> ModelDescription:
    return describe_model(REQUIRED | {"architectures": [architecture]} | attributes)


def windows(description: ModelDescription) -> list[int | None]:
    return [state.window for state in description.states]


def ropes(description: ModelDescription) -> list[str | None]:
    return [layer.attention.rope for layer in description.layers]


SMOLLM3 = "SmolLM3ForCausalLM"


def test_every_fourth_layer_does_not_rotate_unless_the_layers_are_listed() -> None:
    assert ropes(describe(SMOLLM3)) == ["rope", "rope", "rope", None] * 2
    assert ropes(describe(SMOLLM3, no_rope_layer_interval=2)) == ["rope", None] * 4
    # transformers takes a list that is longer than the model.
    listed = describe(SMOLLM3, no_rope_layers=[0, 1, 1, 1, 1, 1, 1, 0, 1, 0])
    assert ropes(listed) == [None, *["rope"] * 6, None]
    assert describe(SMOLLM3, no_rope_layers=[0] * 8).ropes == ()


def test_layers_that_do_not_rotate_slide() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 16}
    reference = transformers.SmolLM3Config(**REQUIRED, **sliding)
    by_default = describe(SMOLLM3, **sliding)
    assert windows(by_default) == [16 if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert windows(by_default) == [None, None, None, 16] * 2
    types = ["sliding_attention", *["full_attention"] * 7]
    assert windows(describe(SMOLLM3, **sliding, layer_types=types)) == [16, *[None] * 7]
    assert windows(describe(SMOLLM3, sliding_window=16)) == [None] * 8


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"no_rope_layers": [2] * 8}, "no_rope_layers"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"layer_types": ["sliding_attention"] * 8, "sliding_window": 16}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"] * 8, "use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["chunked_attention"] * 8, "use_sliding_window": True}, "layer_types"),
    ],
)
def test_layers_that_cannot_be_are_refused(attributes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelConfigInvalid) as caught:
        describe(SMOLLM3, **attributes)
    assert [violation.field for violation in caught.value.violations] == [field]


GEMMA2 = "Gemma2ForCausalLM"


def test_every_other_layer_slides_unless_layer_types_says_which() -> None:
    reference = transformers.Gemma2Config(**REQUIRED)
    expected = [4096 if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert windows(describe(GEMMA2)) == expected == [4096, None] * 4
    full = ["full_attention"] * 8
    assert windows(describe(GEMMA2, layer_types=full, sliding_window=None)) == [None] * 8
    with pytest.raises(ModelConfigInvalid, match="sliding_window"):
        describe(GEMMA2, sliding_window=None)


def test_caps_are_what_the_attributes_say() -> None:
    description = describe(GEMMA2)
    assert (description.layers[0].attention.soft_cap, description.logit_soft_cap) == (50.0, 30.0)
    uncapped = describe(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.layers[0].attention.soft_cap, uncapped.logit_soft_cap) == (0.0, 0.0)
    with pytest.raises(ModelConfigInvalid, match="final_logit_softcapping"):
        describe(GEMMA2, final_logit_softcapping=0)


def test_the_activation_has_a_name_of_its_own() -> None:
    """Checkpoints have both names, and transformers reads one of them."""
    assert describe(GEMMA2, hidden_act="relu", hidden_activation="gelu").layers[0].mlp.act == "gelu"


@pytest.mark.parametrize("architecture", [GEMMA2])
def test_attention_to_later_tokens_is_refused(architecture: str) -> None:
    with pytest.raises(ModelNotServed, match="use_bidirectional_attention"):
        describe(architecture, use_bidirectional_attention=True)
