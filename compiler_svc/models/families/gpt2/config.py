"""The GPT-2 family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import LayerNormConfig, list_config_attributes, read_layer_norm_decoder
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import ROPE_ATTRIBUTES
from compiler_svc.models.storage import Storage

_NAMES: Final = AttributeNames(
    {
        **dict.fromkeys(("num_key_value_heads", "head_dim", *ROPE_ATTRIBUTES), ()),
        "hidden_size": ("n_embd", "hidden_size"),
        "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "intermediate_size": ("n_inner",),
        "max_position_embeddings": ("n_positions", "max_position_embeddings"),
        "hidden_act": ("activation_function",),
        "layer_norm_eps": ("layer_norm_epsilon",),
    }
)
_STORAGE: Final = Storage(
    names={
        "model.embed_tokens": "transformer.wte",
        "model.embed_positions": "transformer.wpe",
        "model.norm": "transformer.ln_f",
    },
    layers="transformer.h",
    layer_names={
        "input_layernorm": "ln_1",
        "self_attn.c_attn": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    is_transposed=True,
    optional_prefix="transformer.",
)
#: Attributes that change what attention computes, each with the value that is served.
_SERVED: Final = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def parse_config(config: Mapping[str, Any], architecture: str) -> LayerNormConfig:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="GPT-2") as model:
        for name, served in _SERVED.items():
            if model.boolean(name, served) is not served:
                model.note_not_served(name, not served, str(served).lower())
        common = read_layer_norm_decoder(
            model,
            architecture,
            names=_NAMES,
            intermediate_ratio=4,
            max_position_embeddings=1024,
            rope=None,
            hidden_act="gelu_new",
            tie_word_embeddings=True,
        )
        return LayerNormConfig(**common)


def describe(config: LayerNormConfig) -> ModelDescription:
    """Describes a GPT-2 model."""
    traits = DecoderTraits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        is_gated=False,
        first_position=0,
        stored_qkv="c_attn",
        storage=_STORAGE,
        redundant_in_layers=("attn.bias", "attn.masked_bias"),
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("GPT2LMHeadModel",),
    attributes=list_config_attributes(LayerNormConfig, _NAMES).union(_SERVED),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.gpt2.model:build",
    reference="transformers.models.gpt2.modeling_gpt2:GPT2LMHeadModel",
    names=_NAMES,
)
