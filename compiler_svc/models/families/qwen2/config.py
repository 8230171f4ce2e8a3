"""The Qwen2 family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
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


def parse_config(config: Mapping[str, Any], architecture: str) -> LayerWindowConfig:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="Qwen2") as model:
        return LayerWindowConfig(
            **read_decoder(model, architecture, num_key_value_heads=32, max_position_embeddings=32_768),
            windows=read_layer_windows(model),
        )


def describe(config: LayerWindowConfig) -> ModelDescription:
    """Describes a Qwen2 model."""
    return describe_decoder(config, DecoderTraits(qkv_bias=True, windows=config.windows))


FAMILY: Final = Family(
    architectures=("Qwen2ForCausalLM",),
    attributes=list_config_attributes(LayerWindowConfig),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.qwen2.model:build",
    reference="transformers.models.qwen2.modeling_qwen2:Qwen2ForCausalLM",
)
