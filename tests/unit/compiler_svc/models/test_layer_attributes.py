"""Attributes by which layers of one model differ, as transformers 4 and 5 spell them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from compiler_svc.models.description import ModelDescription
from compiler_svc.models.registry import describe_model
from compiler_svc.models.rope_config import DefaultRope, LinearRope
from tests.unit.compiler_svc.models.sizes import SIZES


def describe(architecture: str, **attributes: Any) -> ModelDescription:
    return describe_model(SIZES | {"architectures": [architecture]} | attributes)


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
    reference = transformers.SmolLM3Config(**SIZES, **sliding)
    by_default = describe(SMOLLM3, **sliding)
    assert windows(by_default) == [16 if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert windows(by_default) == [None, None, None, 16] * 2
    types = ["sliding_attention", *["full_attention"] * 7]
    assert windows(describe(SMOLLM3, **sliding, layer_types=types)) == [16, *[None] * 7]
    assert windows(describe(SMOLLM3, sliding_window=16)) == [None] * 8


GEMMA2 = "Gemma2ForCausalLM"


def test_every_other_layer_slides_unless_layer_types_says_which() -> None:
    reference = transformers.Gemma2Config(**SIZES)
    expected = [4096 if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert windows(describe(GEMMA2)) == expected == [4096, None] * 4
    full = ["full_attention"] * 8
    assert windows(describe(GEMMA2, layer_types=full, sliding_window=None)) == [None] * 8


def test_caps_are_what_the_attributes_say() -> None:
    description = describe(GEMMA2)
    assert (description.layers[0].attention.soft_cap, description.logit_soft_cap) == (50.0, 30.0)
    uncapped = describe(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.layers[0].attention.soft_cap, uncapped.logit_soft_cap) == (0.0, 0.0)


def test_the_activation_has_a_name_of_its_own() -> None:
    """Checkpoints have both names, and transformers reads one of them."""
    assert describe(GEMMA2, hidden_act="relu", hidden_activation="gelu").layers[0].feed_forward.act == "gelu"


GEMMA3 = "Gemma3ForCausalLM"


def test_the_pattern_says_which_layers_slide_unless_layer_types_does() -> None:
    assert windows(describe(GEMMA3)) == [4096] * 5 + [None] + [4096] * 2
    assert windows(describe(GEMMA3, sliding_window_pattern=2, sliding_window=9)) == [9, None] * 4
    types = ["full_attention", *["sliding_attention"] * 7]
    assert windows(describe(GEMMA3, sliding_window_pattern=2, layer_types=types)) == [None, *[4096] * 7]


@pytest.mark.parametrize(
    "attributes",
    [
        # As transformers 4 wrote it, and as transformers 5 does.
        {
            "rope_theta": 500_000.0,
            "rope_local_base_freq": 20_000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
            }
        },
    ],
)
def test_layers_that_slide_have_a_rope_of_their_own(attributes: dict[str, Any]) -> None:
    description = describe(GEMMA3, **attributes)
    assert {one.name: one.rope for one in description.ropes} == {
        "rope": LinearRope(500_000.0, 8.0),
        "local_rope": DefaultRope(20_000.0),
    }
    assert ropes(description) == ["local_rope"] * 5 + ["rope"] + ["local_rope"] * 2


def test_each_rope_has_its_default() -> None:
    for given in ({}, {"rope_parameters": {"sliding_attention": None}}):
        assert [one.rope for one in describe(GEMMA3, **given).ropes] == [
            DefaultRope(1_000_000.0),
            DefaultRope(10_000.0),
        ]


def test_ropes_that_no_layer_has_are_not_in_the_shard() -> None:
    assert [one.name for one in describe(GEMMA3, num_hidden_layers=2).ropes] == ["local_rope"]
    assert [one.name for one in describe(GEMMA3, layer_types=["full_attention"] * 8).ropes] == ["rope"]
