"""The Gemma 2 family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, embedding, gated, rms, sandwich
from compiler_svc.models.decoder_config import (
    SlidingLayersConfig,
    list_config_attributes,
    read_decoder,
    read_sliding_layers,
    read_soft_cap,
)
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.gguf import SANDWICH_NORMS, WINDOW, GgufArchitecture
from compiler_svc.models.specs import LayerSpec

_NAMES: Final = AttributeNames({"hidden_act": ("hidden_activation",)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(SlidingLayersConfig):
    """Attributes of a Gemma 2 model."""

    attention_bias: bool
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a Gemma 2 model."""
    with AttributeReader(config_json, family="Gemma 2") as model:
        if model.boolean("use_bidirectional_attention", False):
            model.note_not_served("use_bidirectional_attention", True, "false: tokens attend to earlier ones")
        num_layers = model.integer("num_hidden_layers")
        config = Gemma2Config(
            **read_decoder(
                model,
                num_key_value_heads=4,
                head_dim=256,
                max_position_embeddings=8192,
                hidden_act="gelu_pytorch_tanh",
                names=_NAMES,
                tie_word_embeddings=True,
            ),
            **read_sliding_layers(model, tuple(layer % 2 == 0 for layer in range(num_layers)), window=4096),
            attention_bias=model.boolean("attention_bias", False),
            query_pre_attn_scalar=model.number("query_pre_attn_scalar", 256.0),
            attn_logit_softcapping=read_soft_cap(model, "attn_logit_softcapping", 50.0),
            final_logit_softcapping=read_soft_cap(model, "final_logit_softcapping", 30.0),
        )
    norm = partial(rms, config, offset=1.0, rounds_last=True)

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(
            at,
            config,
            number,
            bias=config.attention_bias,
            window=config.find_window(number),
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping or 0.0,
        )
        return sandwich(at, norm, attends, gated(at, config))

    return decoder(
        config,
        layer,
        norm=norm,
        token_embedding=embedding(config, multiplier=config.hidden_size**0.5, rounds_multiplier=True),
        logit_soft_cap=config.final_logit_softcapping or 0.0,
    )


FAMILY: Final = Family(
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    attributes=list_config_attributes(Gemma2Config, _NAMES) | {"use_bidirectional_attention"},
    describe=describe,
    reference="transformers.models.gemma2.modeling_gemma2:Gemma2ForCausalLM",
    names=_NAMES,
    gguf=GgufArchitecture(
        name="gemma2",
        names=SANDWICH_NORMS,
        keys=WINDOW | {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
        norm_offset=1.0,
        large_layers=46,
    ),
)
