"""The Phi-3 family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.builders import attention, decoder, gated, pre_norm, rms, rope
from compiler_svc.models.decoder_config import SlidingConfig, list_config_attributes, read_decoder, read_window
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.gguf import WINDOW, GgufArchitecture
from compiler_svc.models.rope_config import RopeOptions, count_rotated, read_partial_rotary_factor
from compiler_svc.models.specs import LayerSpec

#: Early checkpoints say `su` or `yarn` for what is LongRoPE.
_ROPE: Final = RopeOptions(
    rotates_partly=True,
    original_max_position_embeddings=4096,
    aliases={"su": "longrope", "yarn": "longrope"},
    kinds=("default", "longrope"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(SlidingConfig):
    """Attributes of a Phi-3 model."""

    partial_rotary_factor: float


def describe(config_json: Mapping[str, Any]) -> ModelDescription:
    """Describes a Phi-3 model, whose checkpoint stores two fused matrices in each layer."""
    with AttributeReader(config_json, family="Phi-3") as model:
        config = Phi3Config(
            **read_decoder(model, max_position_embeddings=4096, rms_norm_eps=1e-5, rope=_ROPE),
            partial_rotary_factor=read_partial_rotary_factor(model),
            sliding_window=read_window(model, None),
        )
    norm = partial(rms, config)

    def layer(at: str, number: int) -> LayerSpec:
        attends = attention(at, config, number, window=config.sliding_window, stored="qkv_proj")
        return pre_norm(at, norm, attends, gated(at, config, stored="gate_up_proj"))

    rotary_dim = count_rotated(config.head_dim, config.partial_rotary_factor)
    return decoder(config, layer, norm=norm, ropes=[rope(config, rotary_dim=rotary_dim)])


FAMILY: Final = Family(
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    attributes=list_config_attributes(Phi3Config),
    describe=describe,
    reference="transformers.models.phi3.modeling_phi3:Phi3ForCausalLM",
    tokenizer_classes=("LlamaTokenizer",),
    gguf=GgufArchitecture(
        name="phi3", names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, keys=WINDOW
    ),
)
