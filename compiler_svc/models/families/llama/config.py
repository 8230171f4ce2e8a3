"""The Llama family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import DecoderConfig, list_config_attributes, read_decoder
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Attributes of a Llama model."""

    attention_bias: bool
    mlp_bias: bool


def parse_config(config: Mapping[str, Any], architecture: str) -> LlamaConfig:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="Llama") as model:
        return LlamaConfig(
            **read_decoder(model, architecture),
            attention_bias=model.boolean("attention_bias", False),
            mlp_bias=model.boolean("mlp_bias", False),
        )


def describe(config: LlamaConfig) -> ModelDescription:
    """Describes a Llama model."""
    traits = DecoderTraits(qkv_bias=config.attention_bias, output_bias=config.attention_bias, mlp_bias=config.mlp_bias)
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("LlamaForCausalLM",),
    attributes=list_config_attributes(LlamaConfig),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.llama.model:build",
    reference="transformers.models.llama.modeling_llama:LlamaForCausalLM",
    tokenizer_classes=("LlamaTokenizer",),
)
