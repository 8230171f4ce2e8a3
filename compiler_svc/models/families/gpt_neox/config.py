"""The GPT-NeoX family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import LayerNormConfig, list_config_attributes, read_layer_norm_decoder
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import RopeOptions, count_rotated, read_partial_rotary_factor
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
    """Attributes of a GPT-NeoX model.

    Attributes:
        attention_bias: Whether the linear layers of attention have biases.
        use_parallel_residual: Whether the MLP takes the layer's input, as attention does.
        partial_rotary_factor: Share of each head's dimensions that is rotated.
    """

    attention_bias: bool
    use_parallel_residual: bool
    partial_rotary_factor: float


def parse_config(config: Mapping[str, Any], architecture: str) -> GptNeoxConfig:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="GPT-NeoX") as model:
        return GptNeoxConfig(
            **read_layer_norm_decoder(model, architecture, names=_NAMES, rope=_ROPE, hidden_act="gelu"),
            attention_bias=model.boolean("attention_bias", True),
            use_parallel_residual=model.boolean("use_parallel_residual", True),
            partial_rotary_factor=read_partial_rotary_factor(model, _ROPE),
        )


def describe(config: GptNeoxConfig) -> ModelDescription:
    """Describes a GPT-NeoX model, whose checkpoint has one matrix of each head's query, key and value."""
    traits = DecoderTraits(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=True,
        norm_bias=True,
        is_gated=False,
        residual="parallel" if config.use_parallel_residual else "sequential",
        rotary_dim=count_rotated(config.head_dim, config.partial_rotary_factor, config.rope),
        stored_qkv="query_key_value",
        stores_qkv_by_head=True,
        storage=_STORAGE,
        redundant_in_layers=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("GPTNeoXForCausalLM",),
    attributes=list_config_attributes(GptNeoxConfig, _NAMES),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.gpt_neox.model:build",
    reference="transformers.models.gpt_neox.modeling_gpt_neox:GPTNeoXForCausalLM",
    names=_NAMES,
)
