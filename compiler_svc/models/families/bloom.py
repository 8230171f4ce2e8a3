"""The BLOOM family."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, layer_norm, plain, pre_norm
from compiler_svc.models.decoder_config import LayerNormConfig, list_config_attributes, read_layer_norm_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import ROPE_ATTRIBUTES
from compiler_svc.models.specs import LayerSpec
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


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a BLOOM model, whose checkpoint has one matrix of each head's query, key and value."""
    with AttributeReader(config_json, family="BLOOM") as model:
        if model.boolean(_RESIDUAL, False):
            model.note_not_served(_RESIDUAL, True, "false")
        common = read_layer_norm_decoder(
            model,
            names=_NAMES,
            intermediate_ratio=4,
            rope=None,
            hidden_act="gelu_new",
            tie_word_embeddings=True,
        )
        config = LayerNormConfig(**common)
    norm = partial(layer_norm, config)

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(
            at,
            config,
            number,
            bias=True,
            rope=None,
            has_slopes=True,
            stored="query_key_value",
            stored_by_head=True,
        )
        return pre_norm(at, norm, attends, plain(at, config, bias=True))

    return decoder(config, layer, norm=norm, embedding_norm=norm, storage=_STORAGE)


FAMILY: Final = Family(
    architectures=("BloomForCausalLM",),
    model_type="bloom",
    attributes=list_config_attributes(LayerNormConfig, _NAMES).union({_RESIDUAL}),
    describe=describe,
    reference="transformers.models.bloom.modeling_bloom:BloomForCausalLM",
    names=_NAMES,
)
