"""The Mistral family."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, gated, pre_norm, rms
from compiler_svc.models.decoder_config import SlidingConfig, list_config_attributes, read_decoder, read_window
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family, NestedText
from compiler_svc.models.nested_text import nest_family
from compiler_svc.models.specs import LayerSpec


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a Mistral model."""
    with AttributeReader(config_json, family="Mistral") as model:
        config = SlidingConfig(
            **read_decoder(model, num_key_value_heads=8, max_position_embeddings=131_072),
            sliding_window=read_window(model, 4096),
        )
    norm = partial(rms, config)

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, window=config.sliding_window)
        return pre_norm(at, norm, attends, gated(at, config))

    return decoder(config, layer, norm=norm)


FAMILY: Final = Family(
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    attributes=list_config_attributes(SlidingConfig),
    describe=describe,
    reference="transformers.models.mistral.modeling_mistral:MistralForCausalLM",
    tokenizer_classes=("LlamaTokenizer",),
)

#: Mistral Small 3.1 and 3.2.
WITH_IMAGES: Final = nest_family(
    FAMILY,
    "Mistral3ForConditionalGeneration",
    model_type="mistral3",
    reference="transformers.models.mistral3.modeling_mistral3:Mistral3ForConditionalGeneration",
    nested=NestedText(model_type="mistral"),
)
