"""Where the values of a shard's tensors come from: a checkpoint's tensors, the configuration, or the rank.

Sources are trees: leaves are tensors that the checkpoint stores, or what is computed; other nodes say what is done to
them. `sharding.values` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from bundle.abi.formats import FORMATS
from compiler_svc.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor of the checkpoint, by its name."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Written:
    """No checkpoint has it: it is zero until a runtime writes it."""


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix whose axes the checkpoint has the other way round."""

    matrix: Stored


@dataclass(frozen=True, slots=True)
class Sliced:
    """Entries `start` to `start + length` of the first axis, with all of the other axes."""

    whole: Stored | Transposed
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a format of `bundle.abi.formats` makes of a matrix; `shape` is that of the matrix."""

    matrix: Part | Joined
    shape: tuple[int, int]
    format: str


@dataclass(frozen=True, slots=True)
class Items(Quantized):
    """The items, in the shape of the matrix."""

    @property
    def length(self) -> int:
        """Entries of the first axis."""
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class Scales(Quantized):
    """The scales: one for each output; with a format of one scale for the matrix only if that `is_spread`."""

    is_spread: bool = False

    @property
    def length(self) -> int:
        """Entries of the first axis."""
        return self.shape[0] if self.is_spread or FORMATS[self.format].is_per_channel else 1


#: Items of four bits that share an int32.
ITEMS_PER_WORD: Final = 8
#: What a tensor in place of a matrix has of it. The shape is that of the matrix.
CompressedPart = Literal["items", "scales", "zeros", "shape"]


@dataclass(frozen=True, slots=True)
class Compressed(Quantized):
    """One of the tensors that a quantized checkpoint has in place of a matrix. Of groups, items and zero points share
    int32, eight in each, items along inputs and zero points along outputs; other formats have no zero points.
    """

    part: CompressedPart


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts, one after another along the first axis."""

    parts: tuple[Part, ...]


Part = Sliced | Items | Scales


@dataclass(frozen=True, slots=True)
class RopeSource:
    """Inverse frequencies, `rotary_dim / 2` of them, that are computed from the configuration.

    See `layers.rope.compute_frequencies`. With `is_long` they are the second set of LongRoPE.
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


_Derived = RopeSource | SlopeSource | RankSource
Source = Stored | Transposed | Sliced | Items | Scales | Compressed | Joined | _Derived | Written


def join(*parts: Part) -> Part | Joined:
    """Parts along the first axis; a single one is joined to nothing."""
    return parts[0] if len(parts) == 1 else Joined(parts)


def map_stored(source: Source, change: Callable[[Stored], Stored | Transposed]) -> Source:
    """The same tree with other leaves in place of the checkpoint's tensors."""
    mapped: Source = _map(source, change)
    return mapped


def list_shapes(source: Source, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The checkpoint's tensors in a source of a shape, and the least shape that each must have, in order."""
    match source:
        case Stored(tensor):
            yield tensor, shape
        case Transposed(matrix):
            yield from list_shapes(matrix, shape[::-1])
        case Sliced(whole, start, length):
            yield from list_shapes(whole, (start + length, *shape[1:]))
        case Quantized(matrix, own):
            yield from list_shapes(matrix, own)
        case Joined(parts):
            for part in parts:
                yield from list_shapes(part, shape)


def list_tensors(source: Source) -> list[str]:
    """Names of the checkpoint's tensors in a source, in order."""
    return [name for name, _ in list_shapes(source, ())]


def find_place(source: Source, row: int, column: int) -> tuple[str, list[int]]:
    """The tensor of the checkpoint that has an item of a matrix, and the item's place in it."""
    match source:
        case Stored(tensor):
            return tensor, [row, column]
        case Transposed(matrix):
            return find_place(matrix, column, row)
        case Sliced(whole, start):
            return find_place(whole, start + row, column)
        case Joined(parts):
            for part in parts:
                if row < part.length:
                    return find_place(part, row, column)
                row -= part.length
    raise AssertionError(f"no tensor has row {row} of {source}")


def _map(source: Any, change: Callable[[Stored], Stored | Transposed]) -> Any:
    match source:
        case Stored():
            return change(source)
        case Transposed(matrix) | Quantized(matrix):
            return replace(source, matrix=_map(matrix, change))
        case Sliced(whole):
            return replace(source, whole=_map(whole, change))
        case Joined(parts):
            return Joined(tuple(_map(part, change) for part in parts))
    return source
