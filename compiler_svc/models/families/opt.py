"""The OPT family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, embedding, layer_norm, plain, post_norm, pre_norm
from compiler_svc.models.decoder_config import LayerNormConfig, list_config_attributes, read_layer_norm_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import ROPE_ATTRIBUTES
from compiler_svc.models.specs import LayerSpec
from compiler_svc.models.storage import Storage

_KEEPS_NO_NORM: Final = "_remove_final_layer_norm"
_NAMES: Final = AttributeNames(
    {
        **dict.fromkeys(("num_key_value_heads", "head_dim", "layer_norm_eps", *ROPE_ATTRIBUTES), ()),
        "intermediate_size": ("ffn_dim",),
        "hidden_act": ("activation_function",),
        "removes_final_norm": (_KEEPS_NO_NORM,),
    }
)
_STORAGE: Final = Storage(
    names={
        f"model.{name}": f"model.decoder.{stored}"
        for name, stored in {
            "embed_tokens": "embed_tokens",
            "embed_positions": "embed_positions",
            "project_in": "project_in",
            "project_out": "project_out",
            "norm": "final_layer_norm",
        }.items()
    },
    layers="model.decoder.layers",
    layer_names={
        "input_layernorm": "self_attn_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "post_attention_layernorm": "final_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    },
)
#: The table of positions begins with rows that no position has.
_FIRST_POSITION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OptConfig(LayerNormConfig):
    """Attributes of an OPT model."""

    word_embed_proj_dim: int
    do_layer_norm_before: bool
    removes_final_norm: bool
    enable_bias: bool
    layer_norm_elementwise_affine: bool


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes an OPT model."""
    with AttributeReader(config_json, family="OPT") as model:
        common = read_layer_norm_decoder(model, names=_NAMES, rope=None, hidden_act="relu", tie_word_embeddings=True)
        config = OptConfig(
            **common,
            word_embed_proj_dim=model.integer("word_embed_proj_dim", common["hidden_size"]),
            do_layer_norm_before=model.boolean("do_layer_norm_before", True),
            removes_final_norm=model.boolean(_KEEPS_NO_NORM, False),
            enable_bias=model.boolean("enable_bias", True),
            layer_norm_elementwise_affine=model.boolean("layer_norm_elementwise_affine", True),
        )
    bias, is_affine = config.enable_bias, config.layer_norm_elementwise_affine
    norm = partial(layer_norm, config, has_scale=is_affine, has_bias=is_affine)
    put_together = pre_norm if config.do_layer_norm_before else post_norm

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, bias=bias, rope=None)
        return put_together(at, norm, attends, plain(at, config, bias=bias))

    return decoder(
        config,
        layer,
        norm=norm if config.do_layer_norm_before and not config.removes_final_norm else None,
        token_embedding=embedding(config, size=config.word_embed_proj_dim),
        first_position=_FIRST_POSITION,
        storage=_STORAGE,
    )


FAMILY: Final = Family(
    architectures=("OPTForCausalLM",),
    model_type="opt",
    attributes=list_config_attributes(OptConfig, _NAMES),
    describe=describe,
    reference="transformers.models.opt.modeling_opt:OPTForCausalLM",
    names=_NAMES,
)
