"""The StarCoder2 family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attribute_names import AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import (
    LayerNormConfig,
    Windows,
    list_config_attributes,
    read_layer_norm_decoder,
    read_window,
)
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.storage import Storage

_NAMES: Final = AttributeNames({"layer_norm_eps": ("norm_epsilon",)})
_STORAGE: Final = Storage(layer_names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Starcoder2Config(LayerNormConfig):
    """Attributes of a StarCoder2 model.

    Attributes:
        use_bias: Whether the linear layers have biases.
        sliding_window: How many positions up to its own a token attends to; None: all.
    """

    use_bias: bool
    sliding_window: int | None

    @property
    def windows(self) -> Windows:
        """The window of each layer."""
        return (self.sliding_window,) * self.num_hidden_layers


def parse_config(config: Mapping[str, Any], architecture: str) -> Starcoder2Config:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="StarCoder2") as model:
        common = read_layer_norm_decoder(
            model,
            architecture,
            names=_NAMES,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        )
        return Starcoder2Config(
            **common, use_bias=model.boolean("use_bias", True), sliding_window=read_window(model, None)
        )


def describe(config: Starcoder2Config) -> ModelDescription:
    """Describes a StarCoder2 model."""
    bias = config.use_bias
    traits = DecoderTraits(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm_bias=True,
        is_gated=False,
        windows=config.windows,
        storage=_STORAGE,
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("Starcoder2ForCausalLM",),
    attributes=list_config_attributes(Starcoder2Config, _NAMES),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.starcoder2.model:build",
    reference="transformers.models.starcoder2.modeling_starcoder2:Starcoder2ForCausalLM",
    names=_NAMES,
)
