"""The Llama family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, gated, pre_norm, rms
from compiler_svc.models.decoder_config import DecoderConfig, list_config_attributes, read_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.gguf import GgufArchitecture
from compiler_svc.models.specs import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Attributes of a Llama model."""

    attention_bias: bool
    mlp_bias: bool


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a Llama model."""
    with AttributeReader(config_json, family="Llama") as model:
        config = LlamaConfig(
            **read_decoder(model),
            attention_bias=model.boolean("attention_bias", False),
            mlp_bias=model.boolean("mlp_bias", False),
        )
    norm, bias = partial(rms, config), config.attention_bias

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, bias=bias)
        return pre_norm(at, norm, attends, gated(at, config, bias=config.mlp_bias))

    return decoder(config, layer, norm=norm)


FAMILY: Final = Family(
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    attributes=list_config_attributes(LlamaConfig),
    describe=describe,
    reference="transformers.models.llama.modeling_llama:LlamaForCausalLM",
    tokenizer_classes=("LlamaTokenizer",),
    gguf=GgufArchitecture(name="llama", turns_neighbours=True),
)
