"""The Gemma 2 family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import (
    SlidingLayersConfig,
    list_config_attributes,
    read_decoder,
    read_sliding_layers,
    read_soft_cap,
)
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(SlidingLayersConfig):
    """Attributes of a Gemma 2 model.

    Attributes:
        query_pre_attn_scalar: The products of queries and keys are divided by its square root.
        attn_logit_softcapping: Bound of attention's scores; `final_logit_softcapping` of logits. None: there is none.
    """

    attention_bias: bool
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None


def parse_config(config: Mapping[str, Any], architecture: str) -> Gemma2Config:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="Gemma 2") as model:
        if model.boolean("use_bidirectional_attention", False):
            model.note_not_served("use_bidirectional_attention", True, "false: tokens attend to earlier ones")
        num_layers = model.integer("num_hidden_layers")
        return Gemma2Config(
            **read_decoder(
                model,
                architecture,
                num_key_value_heads=4,
                head_dim=256,
                max_position_embeddings=8192,
                hidden_act="gelu_pytorch_tanh",
                act_attribute="hidden_activation",
                tie_word_embeddings=True,
            ),
            **read_sliding_layers(model, tuple(layer % 2 == 0 for layer in range(num_layers)), window=4096),
            attention_bias=model.boolean("attention_bias", False),
            query_pre_attn_scalar=model.number("query_pre_attn_scalar", 256.0),
            attn_logit_softcapping=read_soft_cap(model, "attn_logit_softcapping", 50.0),
            final_logit_softcapping=read_soft_cap(model, "final_logit_softcapping", 30.0),
        )


def describe(config: Gemma2Config) -> ModelDescription:
    """Describes a Gemma 2 model."""
    traits = DecoderTraits(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        norms="both",
        norm_offset=1.0,
        norms_round_last=True,
        windows=config.windows,
        embedding_multiplier=config.hidden_size**0.5,
        rounds_embedding_multiplier=True,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_soft_cap=config.attn_logit_softcapping or 0.0,
        logit_soft_cap=config.final_logit_softcapping or 0.0,
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("Gemma2ForCausalLM",),
    attributes=list_config_attributes(Gemma2Config) - {"hidden_act"}
    | {"hidden_activation", "use_bidirectional_attention"},
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.gemma2.model:build",
    reference="transformers.models.gemma2.modeling_gemma2:Gemma2ForCausalLM",
)
