"""The Qwen2 family."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, gated, pre_norm, rms
from compiler_svc.models.decoder_config import (
    LayerWindowConfig,
    list_config_attributes,
    read_decoder,
    read_layer_windows,
)
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.gguf import GgufArchitecture
from compiler_svc.models.specs import LayerSpec


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a Qwen2 model."""
    with AttributeReader(config_json, family="Qwen2") as model:
        config = LayerWindowConfig(
            **read_decoder(model, num_key_value_heads=32, max_position_embeddings=32_768),
            windows=read_layer_windows(model),
        )
    norm = partial(rms, config)

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, bias=True, output_bias=False, window=config.windows[number])
        return pre_norm(at, norm, attends, gated(at, config))

    return decoder(config, layer, norm=norm)


FAMILY: Final = Family(
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    attributes=list_config_attributes(LayerWindowConfig),
    describe=describe,
    reference="transformers.models.qwen2.modeling_qwen2:Qwen2ForCausalLM",
    gguf=GgufArchitecture(name="qwen2"),
)
