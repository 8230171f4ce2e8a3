"""The StarCoder2 family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, layer_norm, plain, pre_norm
from compiler_svc.models.decoder_config import (
    LayerNormConfig,
    list_config_attributes,
    read_layer_norm_decoder,
    read_window,
)
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.specs import LayerSpec
from compiler_svc.models.storage import Storage

_NAMES: Final = AttributeNames({"layer_norm_eps": ("norm_epsilon",)})
_STORAGE: Final = Storage(layer_names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Starcoder2Config(LayerNormConfig):
    """Attributes of a StarCoder2 model."""

    use_bias: bool
    sliding_window: int | None


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a StarCoder2 model."""
    with AttributeReader(config_json, family="StarCoder2") as model:
        common = read_layer_norm_decoder(
            model,
            names=_NAMES,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        )
        config = Starcoder2Config(
            **common, use_bias=model.boolean("use_bias", True), sliding_window=read_window(model, None)
        )
    norm, bias = partial(layer_norm, config), config.use_bias

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, bias=bias, window=config.sliding_window)
        return pre_norm(at, norm, attends, plain(at, config, bias=bias))

    return decoder(config, layer, norm=norm, storage=_STORAGE)


FAMILY: Final = Family(
    architectures=("Starcoder2ForCausalLM",),
    model_type="starcoder2",
    attributes=list_config_attributes(Starcoder2Config, _NAMES),
    describe=describe,
    reference="transformers.models.starcoder2.modeling_starcoder2:Starcoder2ForCausalLM",
    names=_NAMES,
)
