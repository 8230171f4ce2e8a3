"""The Gemma 3 family, its text models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, each_head, embedding, gated, rms, rope, sandwich
from compiler_svc.models.decoder_config import (
    SlidingLayersConfig,
    list_config_attributes,
    read_decoder,
    read_sliding_layers,
    read_soft_cap,
)
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family, NestedText
from compiler_svc.models.gguf import HEAD_NORMS, SANDWICH_NORMS, WINDOW, GgufArchitecture
from compiler_svc.models.nested_text import nest_family
from compiler_svc.models.rope_config import FIXED_ROPE_KINDS, RopeConfig, RopeOptions, read_rope
from compiler_svc.models.specs import LayerSpec

_NAMES: Final = AttributeNames({"hidden_act": ("hidden_activation",), "original_max_position_embeddings": ()})
_GLOBAL_ROPE: Final = RopeOptions(theta=1_000_000.0, layer_type="full_attention")
_LOCAL_ROPE: Final = RopeOptions(
    theta=10_000.0,
    theta_attribute="rope_local_base_freq",
    layer_type="sliding_attention",
    scales=False,
    kinds=FIXED_ROPE_KINDS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(SlidingLayersConfig):
    """Attributes of a Gemma 3 text model."""

    local_rope: RopeConfig
    attention_bias: bool
    query_pre_attn_scalar: float
    final_logit_softcapping: float | None


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a Gemma 3 text model."""
    with AttributeReader(config_json, family="Gemma 3") as model:
        if model.boolean("use_bidirectional_attention", False):
            model.note_not_served("use_bidirectional_attention", True, "false: tokens attend to earlier ones")
        if model.optional_number("attn_logit_softcapping") is not None:
            cap = model.values["attn_logit_softcapping"]
            model.note_not_served("attn_logit_softcapping", cap, "null: scores are not capped")
        num_layers, pattern = model.integer("num_hidden_layers"), model.integer("sliding_window_pattern", 6)
        common = read_decoder(
            model,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=131_072,
            rope=_GLOBAL_ROPE,
            hidden_act="gelu_pytorch_tanh",
            names=_NAMES,
            tie_word_embeddings=True,
        )
        config = Gemma3Config(
            **common,
            **read_sliding_layers(model, tuple((layer + 1) % pattern != 0 for layer in range(num_layers)), window=4096),
            local_rope=read_rope(
                model,
                head_dim=common["head_dim"],
                max_position_embeddings=common["max_position_embeddings"],
                options=_LOCAL_ROPE,
            ),
            attention_bias=model.boolean("attention_bias", False),
            query_pre_attn_scalar=model.number("query_pre_attn_scalar", 256.0),
            final_logit_softcapping=read_soft_cap(model, "final_logit_softcapping", None),
        )
    norm = partial(rms, config, offset=1.0, rounds_last=True)

    def layer(at: str, number: int) -> LayerSpec:
        window = config.find_window(number)
        attends = attention(
            at,
            config,
            number,
            bias=config.attention_bias,
            head_norm=each_head(config, norm),
            window=window,
            rope="rope" if window is None else "local_rope",
            scale=config.query_pre_attn_scalar**-0.5,
        )
        return sandwich(at, norm, attends, gated(at, config))

    return decoder(
        config,
        layer,
        norm=norm,
        token_embedding=embedding(config, multiplier=config.hidden_size**0.5, rounds_multiplier=True),
        ropes=[rope(config), rope(config, "local_rope", config.local_rope)],
        logit_soft_cap=config.final_logit_softcapping or 0.0,
    )


FAMILY: Final = Family(
    architectures=("Gemma3ForCausalLM",),
    model_type="gemma3_text",
    attributes=list_config_attributes(Gemma3Config, _NAMES)
    | {"attn_logit_softcapping", "sliding_window_pattern", "use_bidirectional_attention"},
    describe=describe,
    reference="transformers.models.gemma3.modeling_gemma3:Gemma3ForCausalLM",
    names=_NAMES,
    gguf=GgufArchitecture(
        name="gemma3",
        names=SANDWICH_NORMS | HEAD_NORMS,
        keys=WINDOW | {"rope.freq_base_swa": "rope_local_base_freq"},
        norm_offset=1.0,
        large_layers=62,
    ),
)

#: The models of 4B parameters and more. The file of 4B leaves out what is as in transformers' defaults.
WITH_IMAGES: Final = nest_family(
    FAMILY,
    "Gemma3ForConditionalGeneration",
    model_type="gemma3",
    reference="transformers.models.gemma3.modeling_gemma3:Gemma3ForConditionalGeneration",
    nested=NestedText(model_type="gemma3_text", defaults={"vocab_size": 262_208, "num_attention_heads": 8}),
)
