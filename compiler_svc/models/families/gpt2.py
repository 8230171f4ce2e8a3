"""The GPT-2 family."""

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


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a GPT-2 model."""
    with AttributeReader(config_json, family="GPT-2") as model:
        for name, served in _SERVED.items():
            if model.boolean(name, served) is not served:
                model.note_not_served(name, not served, str(served).lower())
        common = read_layer_norm_decoder(
            model,
            names=_NAMES,
            intermediate_ratio=4,
            max_position_embeddings=1024,
            rope=None,
            hidden_act="gelu_new",
            tie_word_embeddings=True,
        )
        config = LayerNormConfig(**common)
    norm = partial(layer_norm, config)

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, bias=True, rope=None, stored="c_attn")
        return pre_norm(at, norm, attends, plain(at, config, bias=True))

    return decoder(
        config,
        layer,
        norm=norm,
        first_position=0,
        storage=_STORAGE,
    )


FAMILY: Final = Family(
    architectures=("GPT2LMHeadModel",),
    model_type="gpt2",
    attributes=list_config_attributes(LayerNormConfig, _NAMES).union(_SERVED),
    describe=describe,
    reference="transformers.models.gpt2.modeling_gpt2:GPT2LMHeadModel",
    names=_NAMES,
)
