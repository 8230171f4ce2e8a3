"""The Mistral family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import SlidingConfig, list_config_attributes, read_decoder, read_window
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family, NestedText
from compiler_svc.models.nested_text import nest_family


def parse_config(config: Mapping[str, Any], architecture: str) -> SlidingConfig:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="Mistral") as model:
        return SlidingConfig(
            **read_decoder(model, architecture, num_key_value_heads=8, max_position_embeddings=131_072),
            sliding_window=read_window(model, 4096),
        )


def describe(config: SlidingConfig) -> ModelDescription:
    """Describes a Mistral model."""
    return describe_decoder(config, DecoderTraits(windows=config.windows))


FAMILY: Final = Family(
    architectures=("MistralForCausalLM",),
    attributes=list_config_attributes(SlidingConfig),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.mistral.model:build",
    reference="transformers.models.mistral.modeling_mistral:MistralForCausalLM",
    tokenizer_classes=("LlamaTokenizer",),
)

#: Mistral Small 3.1 and 3.2.
WITH_IMAGES: Final = nest_family(
    FAMILY,
    "Mistral3ForConditionalGeneration",
    reference="transformers.models.mistral3.modeling_mistral3:Mistral3ForConditionalGeneration",
    nested=NestedText(model_type="mistral"),
)
