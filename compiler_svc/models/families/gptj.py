"""The GPT-J family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, layer_norm, parallel, plain, rope
from compiler_svc.models.decoder_config import LayerNormConfig, list_config_attributes, read_layer_norm_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import ROPE_ATTRIBUTES, DefaultRope
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
    names={"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
    layers="transformer.h",
    layer_names={
        "input_layernorm": "ln_1",
        **{f"self_attn.{name}": f"attn.{name}" for name in ("q_proj", "k_proj", "v_proj")},
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
    },
    optional_prefix="transformer.",
)
#: No attribute says it.
_ROPE: Final = DefaultRope(10_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptjConfig(LayerNormConfig):
    """Attributes of a GPT-J model."""

    rotary_dim: int


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a GPT-J model."""
    with AttributeReader(config_json, family="GPT-J") as model:
        common = read_layer_norm_decoder(model, names=_NAMES, intermediate_ratio=4, rope=None, hidden_act="gelu_new")
        rotary_dim = model.integer("rotary_dim", 64, minimum=2)
        if not model.invalid and (rotary_dim > common["head_dim"] or rotary_dim % 2):
            model.note_invalid(
                "rotary_dim", rotary_dim, f"an even number up to {common['head_dim']}, the size of heads"
            )
        if common["tie_word_embeddings"]:
            model.note_not_served("tie_word_embeddings", True, "false: the output layer has biases of its own")
        config = GptjConfig(**common | {"rope": _ROPE}, rotary_dim=rotary_dim)
    norm = partial(layer_norm, config)

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, pairs_neighbours=True)
        return parallel(at, norm, attends, plain(at, config, bias=True), shares_norm=True)

    return decoder(
        config,
        layer,
        norm=norm,
        ropes=[rope(config, rotary_dim=config.rotary_dim)],
        head_bias=True,
        storage=_STORAGE,
    )


FAMILY: Final = Family(
    architectures=("GPTJForCausalLM",),
    model_type="gptj",
    attributes=list_config_attributes(GptjConfig, _NAMES),
    describe=describe,
    reference="transformers.models.gptj.modeling_gptj:GPTJForCausalLM",
    names=_NAMES,
)
