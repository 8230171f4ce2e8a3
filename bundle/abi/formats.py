"""How linear layers may keep their matrices, if not in the dtype of the shard: as items and scales, a format a row; and
how the rows that they multiply may become such items while a step is computed.

A quantized matrix [outputs, inputs] is its items times its scales. Scales are float32: one for each output, or one for
the matrix; or two for each group of inputs, a factor of the items and what is added to their products. Divisors, bounds
and least scales are those of NxD's observers, with one exception: NxD knows no least scale for float8 with one scale,
and so makes NaN of a matrix of zeros. NxD has no groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bundle.abi.tensor import DTYPES, DType

#: Smallest and largest value of an item. Neuron's float8_e4m3 has exponents for infinity that torch's has not.
ITEM_BOUNDS: Final[Mapping[DType, tuple[float, float]]] = {
    "int8": (-128, 127),
    "float8_e4m3fn": (-240, 240),
    "float8_e5m2": (-57344, 57344),
    "uint8": (0, 15),
}
_TINY: Final = 2.0**-23


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format.

    Attributes:
        item: Dtype of the items.
        is_per_channel: Whether each output has a scale, by its own largest magnitude; otherwise the matrix has one.
        divisor: The scale is the largest magnitude divided by this, but at least `least_scale`. Of a group it is the
            difference of the largest and the smallest weight, where 0 counts as one.
        group: Inputs that share a factor and an offset; 0 if there are no groups. Two items of a group are in a byte:
            of 32 neighbours in 16 bytes, the low bits have the first 16.
    """

    item: DType
    is_per_channel: bool
    divisor: float
    least_scale: float
    group: int = 0

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value of an item."""
        return ITEM_BOUNDS[self.item]

    @property
    def title(self) -> str:
        """What people are told."""
        if self.group:
            return f"int4, two scales for each group of {self.group} inputs"
        return f"{self.item}, {'a scale for each output' if self.is_per_channel else 'one scale'}"


#: Sizes of groups, the best first.
GROUPS: Final = (128, 64, 32)
#: By the name that descriptions give them.
FORMATS: Final[Mapping[str, WeightFormat]] = {
    "int8_per_tensor": WeightFormat("int8", is_per_channel=False, divisor=127.5, least_scale=_TINY),
    "int8_per_channel": WeightFormat("int8", is_per_channel=True, divisor=127, least_scale=_TINY),
    "f8e4m3_per_tensor": WeightFormat("float8_e4m3fn", is_per_channel=False, divisor=240, least_scale=_TINY),
    "f8e4m3_per_channel": WeightFormat("float8_e4m3fn", is_per_channel=True, divisor=240, least_scale=1e-5),
    "f8e5m2_per_tensor": WeightFormat("float8_e5m2", is_per_channel=False, divisor=57344, least_scale=_TINY),
    "f8e5m2_per_channel": WeightFormat("float8_e5m2", is_per_channel=True, divisor=57344, least_scale=1e-5),
    **{
        f"int4_by_{group}": WeightFormat("uint8", is_per_channel=True, divisor=15, least_scale=_TINY, group=group)
        for group in GROUPS
    },
}


def measure_kept(tensors: Iterable[tuple[str, DType, tuple[int, ...]]]) -> Counter[str]:
    """Measures one rank's weights in bytes by what they are kept as: a format's title, scales included, or a dtype.

    Args:
        tensors: Name, dtype and shape of each. A quantized layer's items are its `weight`; its `scale` has the scales.
    """
    described = {name: (dtype, shape) for name, dtype, shape in tensors}
    kept: Counter[str] = Counter()
    for name, (dtype, shape) in described.items():
        layer, _, part = name.rpartition(".")
        row = None
        if part in ("weight", "scale") and f"{layer}.scale" in described:
            item, items_shape = described[f"{layer}.weight"]
            row = _find_format(item, items_shape, described[f"{layer}.scale"][1])
        kept[dtype if row is None else row.title] += math.prod(shape) * DTYPES[dtype].size_bytes
    return kept


def _find_format(item: DType, shape: tuple[int, ...], scales_shape: tuple[int, ...]) -> WeightFormat | None:
    # A byte has two items of a group, and a group two scales. Bundles may have formats that this release does not know.
    group = 4 * shape[1] // scales_shape[1] if len(scales_shape) == 2 else 0
    wanted = (item, scales_shape[0] == shape[0], group)
    return next((row for row in FORMATS.values() if (row.item, row.is_per_channel, row.group) == wanted), None)


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """How a layer quantizes each row that it multiplies, by the row's own largest magnitude.

    Attributes:
        item: Dtype whose values items have; graphs keep them in floats.
        divisor: The scale of a row is its largest magnitude divided by this.
        bounds: Smallest and largest value of an item.
    """

    item: DType
    divisor: float
    bounds: tuple[float, float]

    @property
    def unit(self) -> float:
        """The power of two that no magnitude of an item exceeds."""
        return 2.0 ** math.ceil(math.log2(max(map(abs, self.bounds))))


#: By the name that descriptions give them. Where a name ends in `_whole`, the largest magnitude has the end of the
#: dtype's range, as in compressed-tensors; for int8 that is between the magnitudes of both ends.
ACTIVATION_FORMATS: Final[Mapping[str, ActivationFormat]] = {
    "int8": ActivationFormat("int8", 127, ITEM_BOUNDS["int8"]),
    "int8_whole": ActivationFormat("int8", 127.5, ITEM_BOUNDS["int8"]),
    "f8e4m3": ActivationFormat("float8_e4m3fn", 240, ITEM_BOUNDS["float8_e4m3fn"]),
    "f8e4m3_whole": ActivationFormat("float8_e4m3fn", 448, (-448, 448)),
}
