"""Attributes by which layers of one model differ, as transformers 4 and 5 spell them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from compiler_svc.models.description import ModelDescription
from compiler_svc.models.errors import ModelConfigInvalid
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
