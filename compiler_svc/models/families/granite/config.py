"""The Granite family, its dense models: what their `config.json` says, and what a model of it consists of."""

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
class GraniteConfig(DecoderConfig):
    """Attributes of a Granite model.

    Attributes:
        embedding_multiplier: Multiplies token embeddings; `attention_multiplier` the products of queries and keys;
            `residual_multiplier` what attention and feed-forward add.
        logits_scaling: Divides logits.
    """

    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def parse_config(config: Mapping[str, Any], architecture: str) -> GraniteConfig:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="Granite") as model:
        return GraniteConfig(
            **read_decoder(model, architecture),
            attention_bias=model.boolean("attention_bias", False),
            mlp_bias=model.boolean("mlp_bias", False),
            embedding_multiplier=model.number("embedding_multiplier", 1.0),
            attention_multiplier=model.number("attention_multiplier", 1.0),
            residual_multiplier=model.number("residual_multiplier", 1.0),
            logits_scaling=model.number("logits_scaling", 1.0),
        )


def describe(config: GraniteConfig) -> ModelDescription:
    """Describes a Granite model."""
    traits = DecoderTraits(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        embedding_multiplier=config.embedding_multiplier,
        attention_scale=config.attention_multiplier,
        residual_multiplier=config.residual_multiplier,
        logits_divisor=config.logits_scaling,
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("GraniteForCausalLM",),
    attributes=list_config_attributes(GraniteConfig),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.granite.model:build",
    reference="transformers.models.granite.modeling_granite:GraniteForCausalLM",
    tokenizer_classes=("GPT2Tokenizer",),
)
