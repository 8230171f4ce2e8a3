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
    "local_rope": ("rope_local_base_freq",),
    "rope": ROPE_ATTRIBUTES,
    "rotated_layers": ("no_rope_layer_interval", "no_rope_layers"),
    "sliding_layers": ("layer_types",),
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
        attributes = {one.name: getattr(self, one.name) for one in fields(self)}
        ropes = {name: rope_to_json(value) for name, value in attributes.items() if isinstance(value, RopeConfig)}
        return attributes | ropes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingLayersConfig(DecoderConfig):
    """The record of families whose layers have one window or none, as `layer_types` says.

    Attributes:
        sliding_window: How many positions up to its own a token of layers that slide attends to.
        sliding_layers: Which layers slide.
    """

    sliding_window: int | None
    sliding_layers: tuple[bool, ...]

    @property
    def windows(self) -> Windows:
        """The window of each layer."""
        return tuple(self.sliding_window if slides else None for slides in self.sliding_layers)


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
    hidden_act: str = "silu",
    act_attribute: str = "hidden_act",
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """Reads what the families have in common; mistakes are noted in `model`.

    Attributes that shape the weights are required; others take transformers' defaults, which the arguments give where
    families differ. `pad_token_id` is `read_token_ids`' matter.

    Args:
        num_key_value_heads: Default; None: as many as attention heads.
        head_dim: Default; None: the hidden size divided among the attention heads.
        rope: How the family reads its rotary embedding.
        act_attribute: The attribute that names the activation.

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
        "hidden_act": model.choice(act_attribute, hidden_act, HIDDEN_ACTS),
        "max_position_embeddings": positions,
        "rms_norm_eps": model.number("rms_norm_eps", rms_norm_eps),
        "rope": read_rope(model, head_dim=dim, max_position_embeddings=positions, options=rope),
        "tie_word_embeddings": model.boolean("tie_word_embeddings", tie_word_embeddings),
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
    slides = _read_layer_types(model, tuple(layer >= first for layer in range(num_layers)))
    return tuple(window if is_sliding else None for is_sliding in slides)


def read_sliding_layers(model: AttributeReader, by_default: tuple[bool, ...], *, window: int | None) -> dict[str, Any]:
    """Reads the window of families whose `layer_types` says which layers have it.

    Args:
        by_default: Which layers slide if it does not say; as many as there are layers.
        window: Default of `sliding_window`.

    Returns:
        Fields of `SlidingLayersConfig`, by name.
    """
    size, slides = read_window(model, window), _read_layer_types(model, by_default)
    if size is None and any(slides):
        model.note_invalid("sliding_window", None, f"an integer, as layers are {_SLIDING}")
    return {"sliding_window": size, "sliding_layers": slides}


def read_soft_cap(model: AttributeReader, name: str, default: float | None) -> float | None:
    """Reads the bound of values that are capped; null says that they are not."""
    return None if name in model.values and model.values[name] is None else model.optional_number(name) or default


def _read_layer_types(model: AttributeReader, by_default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether each layer slides."""
    num_layers, types = len(by_default), model.values.get("layer_types")
    if types is None:
        return by_default
    if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= {_FULL, _SLIDING}:
        model.note_invalid("layer_types", types, f"{num_layers} times {_FULL} or {_SLIDING}")
        return (False,) * num_layers
    return tuple(kind == _SLIDING for kind in types)


def read_window(model: AttributeReader, default: int | None) -> int | None:
    """Reads the window of families all of whose layers slide; null says that none does."""
    if "sliding_window" in model.values and model.values["sliding_window"] is None:
        return None
    if default is None and "sliding_window" not in model.values:
        return None
    return model.integer("sliding_window", default)
