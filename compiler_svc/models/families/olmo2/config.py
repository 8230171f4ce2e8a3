"""The OLMo 2 family: what its `config.json` says, and what a model of it consists of."""

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
class Olmo2Config(DecoderConfig):
    """Attributes of an OLMo 2 model."""

    attention_bias: bool


def parse_config(config: Mapping[str, Any], architecture: str) -> Olmo2Config:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="OLMo 2") as model:
        return Olmo2Config(
            **read_decoder(model, architecture, rms_norm_eps=1e-5),
            attention_bias=model.boolean("attention_bias", False),
        )


def describe(config: Olmo2Config) -> ModelDescription:
    """Describes an OLMo 2 model."""
    traits = DecoderTraits(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        norms="after",
        norms_round_last=True,
        normalizes_projections=True,
        rotates_in_float32=True,
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("Olmo2ForCausalLM",),
    attributes=list_config_attributes(Olmo2Config),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.olmo2.model:build",
    reference="transformers.models.olmo2.modeling_olmo2:Olmo2ForCausalLM",
)
