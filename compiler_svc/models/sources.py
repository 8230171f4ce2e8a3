"""Where the values of a shard's tensors come from: a checkpoint's tensors, the configuration, or the rank."""

from __future__ import annotations

from dataclasses import dataclass

from compiler_svc.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Entries `start` to `start + length` of one axis of a checkpoint's tensor, with all of its other axes."""

    tensor: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredSource:
    """A parameter that the checkpoint stores: slices of its tensors, one after another along an axis.

    Attributes:
        slices: At least one.
        axis: The axis that the slices are of, and along which they are joined.
        is_transposed: Whether the checkpoint's matrices have their axes the other way round; `axis` is the
            parameter's.
    """

    slices: tuple[TensorSlice, ...]
    axis: int = 0
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class RopeSource:
    """Inverse frequencies that are computed from the configuration; see `layers.rope.compute_frequencies`.

    Attributes:
        rotary_dim: Dimensions of a head that are rotated; half as many frequencies.
        is_long: Whether it is the second set of LongRoPE.
    """

    rope: RopeConfig
    rotary_dim: int
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class SlopeSource:
    """The slopes of ALiBi, one for each query head; see `layers.alibi.compute_slopes`."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class RankSource:
    """The number of the rank that a shard is for."""
