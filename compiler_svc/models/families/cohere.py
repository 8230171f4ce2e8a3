"""The Cohere family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, gated, layer_norm, own_scales, parallel, rope
from compiler_svc.models.decoder_config import LayerNormConfig, list_config_attributes, read_layer_norm_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import RopeOptions
from compiler_svc.models.specs import LayerSpec

_ROPE: Final = RopeOptions(theta=500_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(LayerNormConfig):
    """Attributes of a Cohere model."""

    attention_bias: bool
    use_qk_norm: bool
    logit_scale: float


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a Cohere model."""
    with AttributeReader(config_json, family="Cohere") as model:
        common = read_layer_norm_decoder(model, max_position_embeddings=8192, rope=_ROPE, tie_word_embeddings=True)
        config = CohereConfig(
            **common,
            attention_bias=model.boolean("attention_bias", False),
            use_qk_norm=model.boolean("use_qk_norm", False),
            logit_scale=model.number("logit_scale", 0.0625),
        )
    norm = partial(layer_norm, config, has_bias=False)
    bias, head_norm = config.attention_bias, own_scales(config, norm) if config.use_qk_norm else None

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, bias=bias, head_norm=head_norm, pairs_neighbours=True)
        return parallel(at, norm, attends, gated(at, config), shares_norm=True)

    return decoder(config, layer, norm=norm, ropes=[rope(config, is_wide=True)], logits_divisor=1 / config.logit_scale)


FAMILY: Final = Family(
    architectures=("CohereForCausalLM",),
    model_type="cohere",
    attributes=list_config_attributes(CohereConfig),
    describe=describe,
    reference="transformers.models.cohere.modeling_cohere:CohereForCausalLM",
)
