"""The Qwen3 family, its dense models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, each_head, gated, pre_norm, rms
from compiler_svc.models.decoder_config import (
    LayerWindowConfig,
    list_config_attributes,
    read_decoder,
    read_layer_windows,
)
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.gguf import HEAD_NORMS, GgufArchitecture
from compiler_svc.models.specs import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(LayerWindowConfig):
    """Attributes of a Qwen3 model."""

    attention_bias: bool


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a Qwen3 model."""
    with AttributeReader(config_json, family="Qwen3") as model:
        config = Qwen3Config(
            **read_decoder(model, num_key_value_heads=32, head_dim=128, max_position_embeddings=32_768),
            attention_bias=model.boolean("attention_bias", False),
            windows=read_layer_windows(model),
        )
    norm, bias = partial(rms, config), config.attention_bias

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(
            at,
            config,
            number,
            bias=bias,
            head_norm=each_head(config, norm),
            window=config.windows[number],
        )
        return pre_norm(at, norm, attends, gated(at, config))

    return decoder(config, layer, norm=norm)


FAMILY: Final = Family(
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    attributes=list_config_attributes(Qwen3Config),
    describe=describe,
    reference="transformers.models.qwen3.modeling_qwen3:Qwen3ForCausalLM",
    gguf=GgufArchitecture(name="qwen3", names=HEAD_NORMS),
)
