"""The BLOOM family: what its `config.json` says, and what a model of it consists of."""

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

_RESIDUAL: Final = "apply_residual_connection_post_layernorm"
_NAMES: Final = AttributeNames(
    {
        **dict.fromkeys(("num_key_value_heads", "head_dim", "hidden_act", *ROPE_ATTRIBUTES), ()),
        **dict.fromkeys(("intermediate_size", "max_position_embeddings"), ()),
        "hidden_size": ("hidden_size", "n_embed"),
        "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "layer_norm_eps": ("layer_norm_epsilon",),
    }
)
_STORAGE: Final = Storage(
    names={
        "model.embed_tokens": "transformer.word_embeddings",
        "model.embed_norm": "transformer.word_embeddings_layernorm",
        "model.norm": "transformer.ln_f",
    },
    layers="transformer.h",
    layer_names={
        "self_attn.query_key_value": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    optional_prefix="transformer.",
)


def parse_config(config: Mapping[str, Any], architecture: str) -> LayerNormConfig:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="BLOOM") as model:
        if model.boolean(_RESIDUAL, False):
            model.note_not_served(_RESIDUAL, True, "false")
        common = read_layer_norm_decoder(
            model,
            architecture,
            names=_NAMES,
            intermediate_ratio=4,
            rope=None,
            hidden_act="gelu_new",
            tie_word_embeddings=True,
        )
        return LayerNormConfig(**common)


def describe(config: LayerNormConfig) -> ModelDescription:
    """Describes a BLOOM model, whose checkpoint has one matrix of each head's query, key and value."""
    traits = DecoderTraits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        is_gated=False,
        normalizes_embedding=True,
        has_slopes=True,
        stored_qkv="query_key_value",
        stores_qkv_by_head=True,
        storage=_STORAGE,
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("BloomForCausalLM",),
    attributes=list_config_attributes(LayerNormConfig, _NAMES).union({_RESIDUAL}),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.bloom.model:build",
    reference="transformers.models.bloom.modeling_bloom:BloomForCausalLM",
    names=_NAMES,
)
