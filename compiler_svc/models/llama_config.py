"""The Llama family's configuration: a `config.json` of transformers 4 or 5 as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.rope_config import RopeConfig, read_rope, rope_to_json

#: Attributes of a `config.json` that count for a Llama model.
LLAMA_ATTRIBUTES: Final = frozenset(
    (
        "architectures",
        "attention_bias",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "mlp_bias",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    )
)

#: Activations of the gated MLP, by Hugging Face's names.
HIDDEN_ACTS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Attributes of a Llama model under Hugging Face's names, with every default filled in."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    def to_json(self) -> dict[str, Any]:
        """Every attribute that enters the arithmetic, as JSON: the numeric part of the graph ABI."""
        attributes = {name: getattr(self, name) for name in self.__slots__ if name != "rope"}
        return attributes | {"rope": rope_to_json(self.rope)}


def parse_llama_config(config: Mapping[str, Any], architecture: str) -> LlamaConfig:
    """Reads a `config.json`, with a configuration's model attributes in it.

    Attributes that shape the weights are required; others take transformers' defaults, as in the configurations that
    NxD Inference reads. `pad_token_id` is `read_token_ids`' matter.

    Raises:
        ModelConfigInvalid: Attributes are missing or impossible; all of them are named.
        ModelNotServed: An activation, rope kind, quantization or partial rotation that is not served.
    """
    model = AttributeReader(config, family="Llama")
    hidden_size = model.integer("hidden_size")
    num_attention_heads = model.integer("num_attention_heads")
    num_key_value_heads = model.integer("num_key_value_heads", num_attention_heads)
    head_dim = model.integer("head_dim", max(1, hidden_size // num_attention_heads))
    # Values that stand in for mistakes would only cause more of them.
    if not model.invalid:
        _check_dimensions(model, hidden_size, num_attention_heads, num_key_value_heads, head_dim)
    if config.get("quantization_config"):
        model.note_not_served("quantization_config", config["quantization_config"], "an unquantized checkpoint")
    max_position_embeddings = model.integer("max_position_embeddings", 2048)
    parsed = LlamaConfig(
        architecture=architecture,
        vocab_size=model.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=model.integer("intermediate_size"),
        num_hidden_layers=model.integer("num_hidden_layers"),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        hidden_act=model.choice("hidden_act", "silu", HIDDEN_ACTS),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=model.number("rms_norm_eps", 1e-6),
        rope=read_rope(model, head_dim=head_dim, max_position_embeddings=max_position_embeddings),
        tie_word_embeddings=model.boolean("tie_word_embeddings", False),
        attention_bias=model.boolean("attention_bias", False),
        mlp_bias=model.boolean("mlp_bias", False),
    )
    model.finish()
    return parsed


def _check_dimensions(
    model: AttributeReader, hidden_size: int, num_attention_heads: int, num_key_value_heads: int, head_dim: int
) -> None:
    if num_attention_heads % num_key_value_heads:
        model.note_invalid("num_key_value_heads", num_key_value_heads, f"a divisor of {num_attention_heads} heads")
    if model.values.get("head_dim") is None and hidden_size % num_attention_heads:
        model.note_invalid("hidden_size", hidden_size, f"a multiple of {num_attention_heads} heads, or head_dim given")
    elif head_dim % 2:
        model.note_invalid("head_dim", head_dim, "an even number: dimensions are rotated in pairs")
