"""Rotary position embedding as a configuration states it: one record per kind, whatever the file format.

transformers 4 writes `rope_theta` beside `rope_scaling`; transformers 5 writes everything into `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bundle.abi.inputs import PromptLengths
from compiler_svc.models.attributes import AttributeReader


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """Frequencies `theta ** (-2i / head_dim)`."""

    theta: float


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """NTK scaling: beyond `max_position_embeddings` tokens, theta grows with the length of the sequence."""

    theta: float
    factor: float
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN: interpolates low frequencies, keeps high ones, and scales cosine and sine by `attention_scaling`."""

    theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_scaling: float


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE: one factor per frequency, another set beyond `original_max_position_embeddings` tokens."""

    theta: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_scaling: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """The kind `llama3`: divides low frequencies by `factor`, keeps high ones, blends between."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ProportionalRope:
    """Frequencies of whole heads, divided by `factor`; those behind the first `proportion` are zero."""

    theta: float
    factor: float
    proportion: float


@dataclass(frozen=True, slots=True)
class NoRope:
    """No rotation: positions are told otherwise."""


#: Attributes of a `config.json` that the rotary embedding is read from.
ROPE_ATTRIBUTES: Final = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)

#: Kinds by the names of `rope_type`.
ROPE_KINDS: Final = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
#: Those whose frequencies are the same for sequences of all lengths.
FIXED_ROPE_KINDS: Final = tuple(kind for kind in ROPE_KINDS if kind not in ("dynamic", "longrope"))

RopeConfig = DefaultRope | LinearRope | DynamicRope | YarnRope | LongRope | Llama3Rope | ProportionalRope | NoRope


def find_prompt_lengths(rope: RopeConfig) -> PromptLengths | None:
    """Tells how frequencies, and with them keys, depend on the length of a prompt; None if they do not."""
    match rope:
        case LongRope():
            return PromptLengths(limit=rope.original_max_position_embeddings, each=False)
        case DynamicRope():
            return PromptLengths(limit=rope.max_position_embeddings, each=True)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeOptions:
    """How a family reads its rotary embedding.

    Attributes:
        rotates_partly: Whether `partial_rotary_factor` may be less than 1.
        original_max_position_embeddings: Default of that attribute beside the object of other attributes, which counts
            more than the one in it; None: the one in it counts, and is `max_position_embeddings` by default.
        aliases: Kinds by other names that configurations of the family give them.
        theta: Default of the base; `theta_attribute`: its name beside the object of other attributes.
        partial_rotary_factor: Default; `partial_attribute`: its name beside that object.
        layer_type: Layers that have this rotary embedding, if `rope_parameters` has an object for each kind of them;
            empty: all have it.
        scales: Whether `rope_scaling` is of these layers.
    """

    rotates_partly: bool = False
    original_max_position_embeddings: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    theta: float = 10_000.0
    theta_attribute: str = "rope_theta"
    partial_rotary_factor: float = 1.0
    partial_attribute: str = "partial_rotary_factor"
    layer_type: str = ""
    scales: bool = True
    kinds: tuple[str, ...] = ROPE_KINDS


DEFAULT_ROPE_OPTIONS: Final = RopeOptions()

#: YaRN takes the logarithm of the original length over so many turns; the shortest length is 1.
_MAX_TURNS: Final = 1e9


def read_rope(
    model: AttributeReader, *, head_dim: int, max_position_embeddings: int, options: RopeOptions
) -> RopeConfig:
    """Reads the rotary embedding of a model, with transformers' defaults; mistakes are noted in `model`."""
    reader = _nested_reader(model, options)
    said = [value for name in ("rope_type", "type") if (value := reader.values.get(name)) is not None]
    kind = options.aliases.get(str(said[0]), str(said[0])) if said else "default"
    partial = read_partial_rotary_factor(model, options)
    if kind != "proportional":
        _check_partial(reader, head_dim, partial, options)
    rope = _Rope(
        reader=reader,
        theta=reader.optional_number("rope_theta") or model.number(options.theta_attribute, options.theta),
        head_dim=count_rotated(head_dim, partial),
        partial=partial,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=_read_original(model, reader, max_position_embeddings, options),
        truncates=not options.layer_type,
    )
    if kind not in options.kinds:
        reader.note_not_served("rope_type", kind, ", ".join(options.kinds))
        return DefaultRope(rope.theta)
    return _READERS[kind](rope)


def _check_partial(reader: AttributeReader, head_dim: int, partial: float, options: RopeOptions) -> None:
    count = count_rotated(head_dim, partial)
    if partial != 1.0 and not options.rotates_partly:
        reader.note_not_served("partial_rotary_factor", partial, "1.0: the whole head is rotated")
    elif partial != 1.0 and (count % 2 or not count):
        accepted = f"a share that makes an even number of {head_dim} dimensions, 2 at least"
        reader.note_not_served("partial_rotary_factor", partial, accepted)


def _read_original(
    model: AttributeReader, reader: AttributeReader, max_position_embeddings: int, options: RopeOptions
) -> int:
    name = "original_max_position_embeddings"
    inside = reader.integer(name, max_position_embeddings)
    # transformers looks beside the object where all layers have one.
    return inside if options.layer_type else model.integer(name, options.original_max_position_embeddings or inside)


def read_partial_rotary_factor(model: AttributeReader, options: RopeOptions = DEFAULT_ROPE_OPTIONS) -> float:
    """Reads the share of each head's dimensions that is rotated; mistakes are noted in `model`."""
    beside = model.number(options.partial_attribute, options.partial_rotary_factor)
    inside = _nested_reader(model, options)
    factor = inside.number("partial_rotary_factor", beside)
    if factor <= 1.0:
        return factor
    if inside.values.get("partial_rotary_factor") is None:
        model.note_invalid(options.partial_attribute, factor, "at most 1.0")
    else:
        inside.note_invalid("partial_rotary_factor", factor, "at most 1.0")
    return 1.0


def count_rotated(head_dim: int, partial_rotary_factor: float, rope: RopeConfig | None = None) -> int:
    """Dimensions of a head that are rotated: the share, or all of those of a `proportional` rotary embedding."""
    return head_dim if isinstance(rope, ProportionalRope) else int(head_dim * partial_rotary_factor)


def _nested_reader(model: AttributeReader, options: RopeOptions) -> AttributeReader:
    """A reader of the object that has the rotary embedding's attributes, whatever the file format calls it."""
    scaling = options.scales and model.values.get("rope_scaling")
    if not options.layer_type:
        reader = _read_object(model, "rope_scaling" if scaling else "rope_parameters", "rope_type")
        for name, value in reader.values.items():
            if isinstance(value, Mapping):
                reader.note_not_served(name, dict(value), "nothing: all layers have one rotary embedding")
        return reader
    reader = _read_object(model, "rope_parameters", options.layer_type)
    if scaling:
        if reader.values.get(options.layer_type):
            model.note_invalid("rope_scaling", scaling, f"nothing beside rope_parameters.{options.layer_type}")
        return _read_object(model, "rope_scaling", "rope_type")
    given = {name: value for name, value in reader.values.items() if value is not None}
    wrong = {name: value for name, value in given.items() if not isinstance(value, Mapping)}
    if wrong and wrong == given:
        model.note_invalid("rope_parameters", given, "an object for each kind of layers")
        return reader.nested(options.layer_type, {})
    for name, value in wrong.items():
        reader.note_invalid(name, value, "an object with rope_type")
    return _read_object(reader, options.layer_type, "rope_type")


def _read_object(reader: AttributeReader, name: str, content: str) -> AttributeReader:
    """A reader of an object inside another, empty where there is none."""
    values = reader.values.get(name)
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        reader.note_invalid(name, values, f"an object with {content}")
        values = {}
    return reader.nested(name, values)


@dataclass(frozen=True, slots=True)
class _Rope:
    """What every kind may need, where `head_dim` counts the dimensions that are rotated.

    `truncates` says whether YaRN's `truncate` may be false. transformers looks for it where all layers have one.
    """

    reader: AttributeReader
    theta: float
    head_dim: int
    partial: float
    max_position_embeddings: int
    original_max_position_embeddings: int
    truncates: bool

    def read_factor(self) -> float:
        """The factor of kinds that may derive it from the two lengths."""
        return self.reader.number("factor", self.max_position_embeddings / self.original_max_position_embeddings)


def _read_dynamic(rope: _Rope) -> DynamicRope:
    if rope.head_dim <= 2:
        rope.reader.note_invalid("rope_type", "dynamic", f"another kind, as head_dim is {rope.head_dim}")
    return DynamicRope(rope.theta, rope.reader.number("factor"), rope.max_position_embeddings)


def _read_yarn(rope: _Rope) -> YarnRope:
    reader, factor = rope.reader, rope.read_factor()
    if rope.theta == 1.0:
        reader.note_invalid("rope_theta", rope.theta, "another number, as YaRN divides by its logarithm")
    if not rope.truncates and not reader.boolean("truncate", True):
        reader.note_not_served("truncate", False, "true")
    # Zero means unset here.
    mscale, mscale_all_dim = (
        reader.number(name, 0.0) if reader.values.get(name) != 0 else 0.0 for name in ("mscale", "mscale_all_dim")
    )
    default_scaling = _yarn_scale(factor, 1.0)
    if mscale and mscale_all_dim:
        default_scaling = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return YarnRope(
        theta=rope.theta,
        factor=factor,
        original_max_position_embeddings=rope.original_max_position_embeddings,
        beta_fast=_read_turns(reader, "beta_fast", 32.0),
        beta_slow=_read_turns(reader, "beta_slow", 1.0),
        truncate=reader.boolean("truncate", True),
        attention_scaling=reader.number("attention_factor", default_scaling),
    )


def _read_turns(reader: AttributeReader, name: str, default: float) -> float:
    turns = reader.number(name, default)
    if turns > _MAX_TURNS:
        reader.note_invalid(name, turns, f"at most {_MAX_TURNS:g}")
    return turns


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(rope: _Rope) -> LongRope:
    reader, factor, original = rope.reader, rope.read_factor(), rope.original_max_position_embeddings
    default_scaling = 1.0
    if factor > 1 and original > 1:
        default_scaling = math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(
        theta=rope.theta,
        short_factor=reader.numbers("short_factor", rope.head_dim // 2),
        long_factor=reader.numbers("long_factor", rope.head_dim // 2),
        original_max_position_embeddings=original,
        attention_scaling=reader.number("attention_factor", default_scaling),
    )


def _read_llama3(rope: _Rope) -> Llama3Rope:
    reader = rope.reader
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    if low >= high:
        reader.note_invalid("high_freq_factor", high, f"a number above low_freq_factor, {low:g}")
    return Llama3Rope(
        theta=rope.theta,
        factor=reader.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.original_max_position_embeddings,
    )


def _read_proportional(rope: _Rope) -> ProportionalRope:
    return ProportionalRope(rope.theta, rope.reader.number("factor", 1.0), rope.partial)


_READERS: Final[Mapping[str, Callable[[_Rope], RopeConfig]]] = {
    "default": lambda rope: DefaultRope(rope.theta),
    "linear": lambda rope: LinearRope(rope.theta, rope.reader.number("factor")),
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "llama3": _read_llama3,
    "proportional": _read_proportional,
}


def rope_to_json(rope: RopeConfig) -> dict[str, Any]:
    """Kind and numbers of a rotary embedding, as JSON."""
    return {"rope_type": type(rope).__name__} | {name: getattr(rope, name) for name in rope.__slots__}
