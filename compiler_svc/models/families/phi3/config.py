"""The Phi-3 family: what its `config.json` says, and what a model of it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.decoder_config import SlidingConfig, list_config_attributes, read_decoder, read_window
from compiler_svc.models.decoder_description import DecoderTraits, describe_decoder
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.rope_config import RopeOptions, count_rotated, read_partial_rotary_factor

#: Early checkpoints say `su` or `yarn` for what is LongRoPE.
_ROPE: Final = RopeOptions(
    rotates_partly=True,
    original_max_position_embeddings=4096,
    aliases={"su": "longrope", "yarn": "longrope"},
    kinds=("default", "longrope"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(SlidingConfig):
    """Attributes of a Phi-3 model.

    Attributes:
        partial_rotary_factor: Share of each head's dimensions that is rotated.
    """

    partial_rotary_factor: float


def parse_config(config: Mapping[str, Any], architecture: str) -> Phi3Config:
    """See `Family.parse_config`."""
    with AttributeReader(config, family="Phi-3") as model:
        return Phi3Config(
            **read_decoder(model, architecture, max_position_embeddings=4096, rms_norm_eps=1e-5, rope=_ROPE),
            partial_rotary_factor=read_partial_rotary_factor(model),
            sliding_window=read_window(model, None),
        )


def describe(config: Phi3Config) -> ModelDescription:
    """Describes a Phi-3 model, whose checkpoint stores two fused matrices in each layer."""
    traits = DecoderTraits(
        windows=config.windows,
        rotary_dim=count_rotated(config.head_dim, config.partial_rotary_factor),
        stored_qkv="qkv_proj",
        stored_gate_up="gate_up_proj",
    )
    return describe_decoder(config, traits)


FAMILY: Final = Family(
    architectures=("Phi3ForCausalLM",),
    attributes=list_config_attributes(Phi3Config),
    parse_config=parse_config,
    describe=describe,
    model="compiler_svc.models.families.phi3.model:build",
    reference="transformers.models.phi3.modeling_phi3:Phi3ForCausalLM",
    tokenizer_classes=("LlamaTokenizer",),
)
