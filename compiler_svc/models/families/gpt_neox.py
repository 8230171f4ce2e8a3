"""The GPT-NeoX family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, layer_norm, parallel, plain, pre_norm, rope
from compiler_svc.models.decoder_config import LayerNormConfig, list_config_attributes, read_layer_norm_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import RopeOptions, count_rotated, read_partial_rotary_factor
from compiler_svc.models.specs import LayerSpec
from compiler_svc.models.storage import Storage

_NAMES: Final = AttributeNames(
    {
        "num_key_value_heads": (),
        "head_dim": (),
        "rope_theta": ("rotary_emb_base",),
        "partial_rotary_factor": ("rotary_pct",),
    }
)
_ROPE: Final = RopeOptions(
    rotates_partly=True,
    theta_attribute="rotary_emb_base",
    partial_rotary_factor=0.25,
    partial_attribute="rotary_pct",
)
_STORAGE: Final = Storage(
    names={
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    layers="gpt_neox.layers",
    layer_names={
        "self_attn.query_key_value": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    optional_prefix="gpt_neox.",
    other_names={"lm_head": "embed_out"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptNeoxConfig(LayerNormConfig):
    """Attributes of a GPT-NeoX model."""

    attention_bias: bool
    use_parallel_residual: bool
    partial_rotary_factor: float


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a GPT-NeoX model, whose checkpoint has one matrix of each head's query, key and value."""
    with AttributeReader(config_json, family="GPT-NeoX") as model:
        config = GptNeoxConfig(
            **read_layer_norm_decoder(model, names=_NAMES, rope=_ROPE, hidden_act="gelu"),
            attention_bias=model.boolean("attention_bias", True),
            use_parallel_residual=model.boolean("use_parallel_residual", True),
            partial_rotary_factor=read_partial_rotary_factor(model, _ROPE),
        )
    norm, bias = partial(layer_norm, config), config.attention_bias
    put_together = parallel if config.use_parallel_residual else pre_norm

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, bias=bias, stored="query_key_value", stored_by_head=True)
        return put_together(at, norm, attends, plain(at, config, bias=True))

    rotary_dim = count_rotated(config.head_dim, config.partial_rotary_factor, config.rope)
    return decoder(
        config,
        layer,
        norm=norm,
        ropes=[rope(config, rotary_dim=rotary_dim)],
        storage=_STORAGE,
    )


FAMILY: Final = Family(
    architectures=("GPTNeoXForCausalLM",),
    model_type="gpt_neox",
    attributes=list_config_attributes(GptNeoxConfig, _NAMES),
    describe=describe,
    reference="transformers.models.gpt_neox.modeling_gpt_neox:GPTNeoXForCausalLM",
    names=_NAMES,
)
