"""The SmolLM 3 family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import (
    SlidingLayersConfig,
    list_config_attributes,
    read_decoder,
    read_sliding_layers,
)
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import RopeOptions

_ROPE: Final = RopeOptions(theta=2_000_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLm3Config(SlidingLayersConfig):
    """Attributes of a SmolLM 3 model.

    Attributes:
        rotated_layers: Which layers rotate queries and keys.
    """

    attention_bias: bool
    mlp_bias: bool
    rotated_layers: tuple[bool, ...]


def parse_config(config: Mapping[str, Any], architecture: str) -> SmolLm3Config:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="SmolLM 3") as model:
        rotated = _read_rotated_layers(model)
        may_slide = model.boolean("use_sliding_window", False)
        has_window = may_slide and model.values.get("sliding_window") is not None
        sliding = read_sliding_layers(model, tuple(has_window and not rotates for rotates in rotated), window=None)
        if not may_slide and any(sliding["sliding_layers"]):
            model.note_invalid("use_sliding_window", False, "true, as layer_types has layers that slide")
        return SmolLm3Config(
            **read_decoder(
                model,
                architecture,
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


def describe(config: SmolLm3Config) -> ModelDescription:
    """Describes a SmolLM 3 model."""
    traits = DecoderTraits(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        windows=config.windows,
        rotated_layers=config.rotated_layers,
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("SmolLM3ForCausalLM",),
    attributes=list_config_attributes(SmolLm3Config) | {"use_sliding_window"},
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.smollm3.model:build",
    reference="transformers.models.smollm3.modeling_smollm3:SmolLM3ForCausalLM",
)
