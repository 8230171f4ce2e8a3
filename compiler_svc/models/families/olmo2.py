"""The OLMo 2 family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, gated, output_norm, rms, rope
from compiler_svc.models.decoder_config import DecoderConfig, list_config_attributes, read_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.specs import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """Attributes of an OLMo 2 model."""

    attention_bias: bool


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes an OLMo 2 model."""
    with AttributeReader(config_json, family="OLMo 2") as model:
        config = Olmo2Config(
            **read_decoder(model, rms_norm_eps=1e-5),
            attention_bias=model.boolean("attention_bias", False),
        )
    norm, bias = partial(rms, config, rounds_last=True), config.attention_bias

    def layer(at: str, number: int) -> LayerSpec:
        # All heads are normalized as one.
        attends = attention(at, config, number, bias=bias, head_norm=norm)
        return output_norm(at, norm, attends, gated(at, config))

    return decoder(config, layer, norm=norm, ropes=[rope(config, is_wide=True)])


FAMILY: Final = Family(
    architectures=("Olmo2ForCausalLM",),
    model_type="olmo2",
    attributes=list_config_attributes(Olmo2Config),
    describe=describe,
    reference="transformers.models.olmo2.modeling_olmo2:Olmo2ForCausalLM",
)
