"""The Qwen2 family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import (
    LAYER_WINDOW_ATTRIBUTES,
    DecoderConfig,
    Windows,
    list_config_attributes,
    read_decoder,
    read_layer_windows,
)
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Attributes of a Qwen2 model.

    Attributes:
        windows: How many positions up to its own a token of each layer attends to; None: all.
    """

    windows: Windows


def parse_config(config: Mapping[str, Any], architecture: str) -> Qwen2Config:
    """Reads a `config.json`, with a configuration's model attributes in it.

    Raises:
        ModelConfigInvalid: Attributes are missing or impossible; all of them are named.
        ModelNotServed: An activation, rope kind, quantization or partial rotation that is not served.
    """
    model = AttributeReader(config, family="Qwen2")
    common = read_decoder(model, architecture, num_key_value_heads=32, max_position_embeddings=32_768)
    parsed = Qwen2Config(**common, windows=read_layer_windows(model, common["num_hidden_layers"]))
    model.finish()
    return parsed


def describe(config: Qwen2Config) -> ModelDescription:
    """Describes a Qwen2 model."""
    return describe_decoder(config, DecoderTraits(qkv_bias=True, windows=config.windows))


FAMILY: Final = Family(
    architectures=("Qwen2ForCausalLM",),
    attributes=list_config_attributes(Qwen2Config, *LAYER_WINDOW_ATTRIBUTES),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.qwen2.model:build",
    reference="transformers.models.qwen2.modeling_qwen2:Qwen2ForCausalLM",
)
