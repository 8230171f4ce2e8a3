"""The Qwen3 family, its dense models: what their `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import (
    LayerWindowConfig,
    list_config_attributes,
    read_decoder,
    read_layer_windows,
)
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(LayerWindowConfig):
    """Attributes of a Qwen3 model."""

    attention_bias: bool


def parse_config(config: Mapping[str, Any], architecture: str) -> Qwen3Config:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="Qwen3") as model:
        return Qwen3Config(
            **read_decoder(model, architecture, num_key_value_heads=32, head_dim=128, max_position_embeddings=32_768),
            attention_bias=model.boolean("attention_bias", False),
            windows=read_layer_windows(model),
        )


def describe(config: Qwen3Config) -> ModelDescription:
    """Describes a Qwen3 model."""
    bias = config.attention_bias
    traits = DecoderTraits(qkv_bias=bias, output_bias=bias, normalizes_heads=True, windows=config.windows)
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("Qwen3ForCausalLM",),
    attributes=list_config_attributes(Qwen3Config),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.qwen3.model:build",
    reference="transformers.models.qwen3.modeling_qwen3:Qwen3ForCausalLM",
)
