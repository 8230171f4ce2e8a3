"""Configurations of decoder-only families: a `config.json` of transformers 4 or 5 as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.rope_config import (
    DEFAULT_ROPE_OPTIONS,
    ROPE_ATTRIBUTES,
    RopeConfig,
    RopeOptions,
    read_rope,
    rope_to_json,
)

#: Activations of the gated MLP, by Hugging Face's names.
HIDDEN_ACTS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")

_FULL, _SLIDING = "full_attention", "sliding_attention"

#: What each layer attends to: every position up to its own (None), or so many of the latest.
Windows = tuple[int | None, ...]

#: The attributes of a `config.json` behind fields of a record that are not attributes themselves.
_READ_FOR: Final[Mapping[str, tuple[str, ...]]] = {
    "architecture": ("architectures",),
    "rope": ROPE_ATTRIBUTES,
    "windows": ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What the families have in common, under Hugging Face's names, with every default filled in."""

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

    def to_json(self) -> dict[str, Any]:
        """Every attribute that enters the arithmetic, as JSON: the numeric part of the graph ABI."""
        attributes = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "rope"}
        return attributes | {"rope": rope_to_json(self.rope)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingConfig(DecoderConfig):
    """The record of families all of whose layers have one window.

    Attributes:
        sliding_window: How many positions up to its own a token attends to; None: all.
    """

    sliding_window: int | None

    @property
    def windows(self) -> Windows:
        """The window of each layer."""
        return (self.sliding_window,) * self.num_hidden_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWindowConfig(DecoderConfig):
    """The record of families some of whose layers have a window.

    Attributes:
        windows: The window of each layer.
    """

    windows: Windows


def list_config_attributes(config: type[DecoderConfig]) -> frozenset[str]:
    """Names of the attributes of a `config.json` that count for a family with this record."""
    names = {name for one in fields(config) for name in _READ_FOR.get(one.name, (one.name,))}
    return frozenset({"quantization_config", *names})


def read_decoder(
    model: AttributeReader,
    architecture: str,
    *,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    max_position_embeddings: int = 2048,
    rms_norm_eps: float = 1e-6,
    rope: RopeOptions = DEFAULT_ROPE_OPTIONS,
) -> dict[str, Any]:
    """Reads what the families have in common; mistakes are noted in `model`.

    Attributes that shape the weights are required; others take transformers' defaults, which the arguments give where
    families differ. `pad_token_id` is `read_token_ids`' matter.

    Args:
        num_key_value_heads: Default; None: as many as attention heads.
        head_dim: Default; None: the hidden size divided among the attention heads.
        rope: How the family reads its rotary embedding.

    Returns:
        Fields of `DecoderConfig`, by name.
    """
    hidden_size = model.integer("hidden_size")
    num_heads = model.integer("num_attention_heads")
    # null says as many as attention heads, whatever the family's default is.
    default_kv_heads = num_heads if "num_key_value_heads" in model.values else num_key_value_heads or num_heads
    num_kv_heads = model.integer("num_key_value_heads", default_kv_heads)
    derived_head_dim = max(1, hidden_size // num_heads)
    dim = model.integer("head_dim", head_dim or derived_head_dim)
    # Values that stand in for mistakes would only cause more of them.
    if not model.invalid:
        _check_dimensions(model, num_heads, num_kv_heads, dim, divides_hidden=head_dim is None)
    if model.values.get("quantization_config"):
        model.note_not_served("quantization_config", model.values["quantization_config"], "an unquantized checkpoint")
    positions = model.integer("max_position_embeddings", max_position_embeddings)
    return {
        "architecture": architecture,
        "vocab_size": model.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": model.integer("intermediate_size"),
        "num_hidden_layers": model.integer("num_hidden_layers"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": dim,
        "hidden_act": model.choice("hidden_act", "silu", HIDDEN_ACTS),
        "max_position_embeddings": positions,
        "rms_norm_eps": model.number("rms_norm_eps", rms_norm_eps),
        "rope": read_rope(model, head_dim=dim, max_position_embeddings=positions, options=rope),
        "tie_word_embeddings": model.boolean("tie_word_embeddings", False),
    }


def _check_dimensions(
    model: AttributeReader, num_heads: int, num_kv_heads: int, head_dim: int, *, divides_hidden: bool
) -> None:
    if num_heads % num_kv_heads:
        model.note_invalid("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
    hidden_size = model.values["hidden_size"]
    if divides_hidden and model.values.get("head_dim") is None and hidden_size % num_heads:
        model.note_invalid("hidden_size", hidden_size, f"a multiple of {num_heads} heads, or head_dim given")
    elif head_dim % 2:
        model.note_invalid("head_dim", head_dim, "an even number: dimensions are rotated in pairs")


def read_layer_windows(model: AttributeReader) -> Windows:
    """Reads the window of each layer of families whose layers slide in part.

    `layer_types` names the kind of each layer. Without it the layers from `max_window_layers` on slide.
    """
    num_layers = model.integer("num_hidden_layers")
    if not model.boolean("use_sliding_window", False):
        return (None,) * num_layers
    window = model.integer("sliding_window", 4096)
    first = model.integer("max_window_layers", 28, minimum=0)
    types: object = model.values.get("layer_types")
    if types is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= {_FULL, _SLIDING}:
        model.note_invalid("layer_types", types, f"{num_layers} times {_FULL} or {_SLIDING}")
        return (None,) * num_layers
    return tuple(window if kind == _SLIDING else None for kind in types)


def read_window(model: AttributeReader, default: int | None) -> int | None:
    """Reads the window of families all of whose layers slide; null says that none does."""
    if "sliding_window" in model.values and model.values["sliding_window"] is None:
        return None
    if default is None and "sliding_window" not in model.values:
        return None
    return model.integer("sliding_window", default)
