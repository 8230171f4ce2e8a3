"""The Mistral family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import DecoderConfig, list_config_attributes, read_decoder, read_window
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """Attributes of a Mistral model.

    Attributes:
        sliding_window: How many positions up to its own a token attends to; None: all.
    """

    sliding_window: int | None


def parse_config(config: Mapping[str, Any], architecture: str) -> MistralConfig:
    """Reads a `config.json`, with a configuration's model attributes in it.

    Raises:
        ModelConfigInvalid: Attributes are missing or impossible; all of them are named.
        ModelNotServed: An activation, rope kind, quantization or partial rotation that is not served.
    """
    model = AttributeReader(config, family="Mistral")
    common = read_decoder(model, architecture, num_key_value_heads=8, max_position_embeddings=131_072)
    parsed = MistralConfig(**common, sliding_window=read_window(model, 4096))
    model.finish()
    return parsed


def describe(config: MistralConfig) -> ModelDescription:
    """Describes a Mistral model."""
    windows = (config.sliding_window,) * config.num_hidden_layers
    return describe_decoder(config, DecoderTraits(windows=windows))


FAMILY: Final = Family(
    architectures=("MistralForCausalLM",),
    attributes=list_config_attributes(MistralConfig),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.mistral.model:build",
    reference="transformers.models.mistral.modeling_mistral:MistralForCausalLM",
)
