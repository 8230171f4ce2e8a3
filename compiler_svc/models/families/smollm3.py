"""The SmolLM 3 family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, gated, pre_norm, rms
from compiler_svc.models.decoder_config import (
    SlidingLayersConfig,
    list_config_attributes,
    read_decoder,
    read_sliding_layers,
)
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import RopeOptions
from compiler_svc.models.specs import LayerSpec

_ROPE: Final = RopeOptions(theta=2_000_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLm3Config(SlidingLayersConfig):
    """Attributes of a SmolLM 3 model."""

    attention_bias: bool
    mlp_bias: bool
    rotated_layers: tuple[bool, ...]


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a SmolLM 3 model."""
    with AttributeReader(config_json, family="SmolLM 3") as model:
        rotated = _read_rotated_layers(model)
        may_slide = model.boolean("use_sliding_window", False)
        has_window = may_slide and model.values.get("sliding_window") is not None
        sliding = read_sliding_layers(model, tuple(has_window and not rotates for rotates in rotated), window=None)
        if not may_slide and any(sliding["sliding_layers"]):
            model.note_invalid("use_sliding_window", False, "true, as layer_types has layers that slide")
        config = SmolLm3Config(
            **read_decoder(
                model,
                num_key_value_heads=4,
                max_position_embeddings=32_768,
                rope=_ROPE,
                tie_word_embeddings=True,
            ),
            **sliding,
            attention_bias=model.boolean("attention_bias", False),
            mlp_bias=model.boolean("mlp_bias", False),
            rotated_layers=rotated,
        )
    norm, bias = partial(rms, config), config.attention_bias

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(
            at,
            config,
            number,
            bias=bias,
            window=config.find_window(number),
            rope="rope" if config.rotated_layers[number] else None,
        )
        return pre_norm(at, norm, attends, gated(at, config, bias=config.mlp_bias))

    return decoder(config, layer, norm=norm)


def _read_rotated_layers(model: AttributeReader) -> tuple[bool, ...]:
    """`no_rope_layers` has 1 for layers that rotate; without it, all but every `no_rope_layer_interval`-th do."""
    num_layers, interval = model.integer("num_hidden_layers"), model.integer("no_rope_layer_interval", 4)
    said: object = model.values.get("no_rope_layers")
    if said is None:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(said, list) or len(said) < num_layers or not all(one in (0, 1) for one in said):
        model.note_invalid("no_rope_layers", said, f"{num_layers} times 0 or 1")
        return (True,) * num_layers
    return tuple(bool(one) for one in said[:num_layers])


FAMILY: Final = Family(
    architectures=("SmolLM3ForCausalLM",),
    model_type="smollm3",
    attributes=list_config_attributes(SmolLm3Config) | {"use_sliding_window"},
    describe=describe,
    reference="transformers.models.smollm3.modeling_smollm3:SmolLM3ForCausalLM",
)
