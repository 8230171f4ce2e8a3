"""The Cohere family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import LayerNormConfig, list_config_attributes, read_layer_norm_decoder
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import RopeOptions

_ROPE: Final = RopeOptions(theta=500_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(LayerNormConfig):
    """Attributes of a Cohere model.

    Attributes:
        attention_bias: Whether the linear layers of attention have biases.
        use_qk_norm: Whether each query and key head is normalized, with scales of its own.
        logit_scale: Multiplies logits.
    """

    attention_bias: bool
    use_qk_norm: bool
    logit_scale: float


def parse_config(config: Mapping[str, Any], architecture: str) -> CohereConfig:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="Cohere") as model:
        common = read_layer_norm_decoder(
            model, architecture, max_position_embeddings=8192, rope=_ROPE, tie_word_embeddings=True
        )
        return CohereConfig(
            **common,
            attention_bias=model.boolean("attention_bias", False),
            use_qk_norm=model.boolean("use_qk_norm", False),
            logit_scale=model.number("logit_scale", 0.0625),
        )


def describe(config: CohereConfig) -> ModelDescription:
    """Describes a Cohere model."""
    traits = DecoderTraits(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        normalizes_each_head=config.use_qk_norm,
        residual="parallel",
        shares_norm=True,
        pairs_neighbours=True,
        rotates_in_float32=True,
        logits_divisor=1 / config.logit_scale,
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("CohereForCausalLM",),
    attributes=list_config_attributes(CohereConfig),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.cohere.model:build",
    reference="transformers.models.cohere.modeling_cohere:CohereForCausalLM",
)
