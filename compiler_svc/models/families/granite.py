"""The Granite family, its dense models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, embedding, gated, pre_norm, rms
from compiler_svc.models.decoder_config import DecoderConfig, list_config_attributes, read_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.specs import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """Attributes of a Granite model."""

    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a Granite model."""
    with AttributeReader(config_json, family="Granite") as model:
        config = GraniteConfig(
            **read_decoder(model),
            attention_bias=model.boolean("attention_bias", False),
            mlp_bias=model.boolean("mlp_bias", False),
            embedding_multiplier=model.number("embedding_multiplier", 1.0),
            attention_multiplier=model.number("attention_multiplier", 1.0),
            residual_multiplier=model.number("residual_multiplier", 1.0),
            logits_scaling=model.number("logits_scaling", 1.0),
        )
    norm, bias = partial(rms, config), config.attention_bias

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, bias=bias, scale=config.attention_multiplier)
        feed_forward = gated(at, config, bias=config.mlp_bias)
        return pre_norm(at, norm, attends, feed_forward, multiplier=config.residual_multiplier)

    return decoder(
        config,
        layer,
        norm=norm,
        token_embedding=embedding(config, multiplier=config.embedding_multiplier),
        logits_divisor=config.logits_scaling,
    )


FAMILY: Final = Family(
    architectures=("GraniteForCausalLM",),
    model_type="granite",
    attributes=list_config_attributes(GraniteConfig),
    describe=describe,
    reference="transformers.models.granite.modeling_granite:GraniteForCausalLM",
    tokenizer_classes=("GPT2Tokenizer",),
)
