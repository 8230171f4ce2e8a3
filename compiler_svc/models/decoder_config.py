"""Configurations of decoder-only families: a `config.json` of transformers 4 or 5 as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

from compiler_svc.models.attribute_names import COMMON_NAMES, AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.packings import read_packing
from compiler_svc.models.rope_config import (
    DEFAULT_ROPE_OPTIONS,
    ROPE_ATTRIBUTES,
    NoRope,
    RopeConfig,
    RopeOptions,
    read_rope,
    rope_to_json,
)

#: Activations of the gated MLP, by Hugging Face's names.
HIDDEN_ACTS: Final = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")

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
class CommonConfig:
    """What all families have in common, under Hugging Face's names, with every default filled in."""

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
    rope: RopeConfig
    tie_word_embeddings: bool

    def to_json(self) -> dict[str, Any]:
        """Every attribute that enters the arithmetic, as JSON: the numeric part of the graph ABI."""
        attributes = {one.name: getattr(self, one.name) for one in fields(self)}
        ropes = {name: rope_to_json(value) for name, value in attributes.items() if isinstance(value, RopeConfig)}
        return attributes | ropes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(CommonConfig):
    """The record of families with root mean square norms."""

    rms_norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormConfig(CommonConfig):
    """The record of families with layer normalization."""

    layer_norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingConfig(DecoderConfig):
    """The record of families all of whose layers have one window, in positions up to a token's own; None: all."""

    sliding_window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWindowConfig(DecoderConfig):
    """The record of families some of whose layers have a window."""

    windows: Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingLayersConfig(DecoderConfig):
    """The record of families whose layers have one window or none, as `layer_types` says."""

    sliding_window: int | None
    sliding_layers: tuple[bool, ...]

    def find_window(self, layer: int) -> int | None:
        """The window of a layer."""
        return self.sliding_window if self.sliding_layers[layer] else None


def list_config_attributes(config: type[CommonConfig], names: AttributeNames = COMMON_NAMES) -> frozenset[str]:
    """Names of the attributes of a `config.json` that count for a family with this record."""
    common = {name for one in fields(config) for name in _READ_FOR.get(one.name, (one.name,))}
    return frozenset({"quantization_config"}.union(*map(names.list_names, common)))


def read_decoder(model: AttributeReader, *, rms_norm_eps: float = 1e-6, **options: Any) -> dict[str, Any]:
    """Reads the fields of `DecoderConfig`; `options` are those of `read_common`."""
    return read_common(model, **options) | {"rms_norm_eps": model.number("rms_norm_eps", rms_norm_eps)}


def read_layer_norm_decoder(
    model: AttributeReader, *, names: AttributeNames = COMMON_NAMES, layer_norm_eps: float = 1e-5, **options: Any
) -> dict[str, Any]:
    """Reads the fields of `LayerNormConfig`; `options` are those of `read_common`."""
    common = read_common(model, names=names, **options)
    if names.has("layer_norm_eps"):
        layer_norm_eps = model.number(names.find(model, "layer_norm_eps"), layer_norm_eps)
    return common | {"layer_norm_eps": layer_norm_eps}


def read_common(
    model: AttributeReader,
    *,
    names: AttributeNames = COMMON_NAMES,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_ratio: int | None = None,
    max_position_embeddings: int = 2048,
    rope: RopeOptions | None = DEFAULT_ROPE_OPTIONS,
    hidden_act: str = "silu",
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """Reads the fields of `CommonConfig`, by name; mistakes are noted in `model`.

    Attributes that shape the weights are required; others take transformers' defaults, which the arguments give where
    families differ. `pad_token_id` is `read_token_ids`' matter.

    Args:
        num_key_value_heads: Default; None: as many as attention heads.
        head_dim: Default; None: the hidden size divided among the attention heads.
        intermediate_ratio: Default of the intermediate size, as a multiple of the hidden size; None: it is required.
        rope: How the family reads its rotary embedding; None: it has none.
    """

    def read(name: str, default: int | None = None) -> int:
        if default is not None and not names.has(name):
            return default
        return model.integer(names.find(model, name), default)

    hidden_size = read("hidden_size")
    num_heads = read("num_attention_heads")
    # null says as many as attention heads, whatever the family's default is.
    is_null = names.has("num_key_value_heads") and "num_key_value_heads" in model.values
    num_kv_heads = read("num_key_value_heads", num_heads if is_null else num_key_value_heads or num_heads)
    dim = read("head_dim", head_dim or max(1, hidden_size // num_heads))
    # Values that stand in for mistakes would only cause more of them.
    if not model.invalid:
        _check_dimensions(model, names, (hidden_size, num_heads, num_kv_heads, dim), divides_hidden=head_dim is None)
    read_packing(model)
    if names.has("hidden_act"):
        hidden_act = model.choice(names.find(model, "hidden_act"), hidden_act, HIDDEN_ACTS)
    positions = read("max_position_embeddings", max_position_embeddings)
    read_kind = partial(read_rope, model, head_dim=dim, max_position_embeddings=positions)
    return {
        "architecture": model.values["architectures"][0],
        "vocab_size": read("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": read("intermediate_size", intermediate_ratio and intermediate_ratio * hidden_size),
        "num_hidden_layers": read("num_hidden_layers"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": dim,
        "hidden_act": hidden_act,
        "max_position_embeddings": positions,
        "rope": NoRope() if rope is None else read_kind(options=rope),
        "tie_word_embeddings": model.boolean("tie_word_embeddings", tie_word_embeddings),
    }


def _check_dimensions(
    model: AttributeReader, names: AttributeNames, sizes: tuple[int, int, int, int], *, divides_hidden: bool
) -> None:
    hidden_size, num_heads, num_kv_heads, head_dim = sizes
    if num_heads % num_kv_heads:
        model.note_invalid("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
    is_derived = not names.has("head_dim") or model.values.get("head_dim") is None
    hidden_name = names.find(model, "hidden_size")
    if divides_hidden and is_derived and hidden_size % num_heads:
        other = ", or head_dim given" if names.has("head_dim") else ""
        model.note_invalid(hidden_name, hidden_size, f"a multiple of {num_heads} heads{other}")
    elif head_dim % 2:
        if names.has("head_dim"):
            model.note_invalid("head_dim", head_dim, "an even number: dimensions are rotated in pairs")
        else:
            model.note_invalid(hidden_name, hidden_size, f"a multiple of {2 * num_heads}: heads have an even size")


def read_layer_windows(model: AttributeReader) -> Windows:
    """Reads the window of each layer of families whose layers slide in part.

    `layer_types` names the kind of each layer. Without it the layers from `max_window_layers` on slide, if there is a
    window: if `use_sliding_window` is true, and `sliding_window` not null.
    """
    num_layers, may_slide = model.integer("num_hidden_layers"), model.boolean("use_sliding_window", False)
    window = read_window(model, 4096) if may_slide else None
    first = num_layers if window is None else model.integer("max_window_layers", 28, minimum=0)
    slides = _read_layer_types(model, tuple(layer >= first for layer in range(num_layers)))
    if window is None and any(slides):
        accepted = f"as layer_types has layers that are {_SLIDING}"
        if may_slide:
            model.note_invalid("sliding_window", None, f"an integer, {accepted}")
        else:
            model.note_invalid("use_sliding_window", False, f"true, {accepted}")
    return tuple(window if is_sliding else None for is_sliding in slides)


def read_sliding_layers(model: AttributeReader, by_default: tuple[bool, ...], *, window: int | None) -> dict[str, Any]:
    """Reads the fields of `SlidingLayersConfig`; `by_default` says which layers slide if `layer_types` does not."""
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
