"""What a layer keeps of the tokens so far, and for how many positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from bundle.abi.state import KINDS
from bundle.abi.tensor import DType
from compiler_svc.models.divisions import ByHeads

#: Rings have a multiple of this many positions. Heads have an even size, so what belongs to a slot and a head begins
#: with a cache line of 64 bytes if items have at least 2 bytes.
RING_POSITIONS: Final = 16


#: What has a scale of its own.
ScaleKind = Literal["tensor", "head", "channel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAs:
    """How caches keep keys and values: in a dtype, divided by scales first if there are some."""

    dtype: DType
    key_scales: ScaleKind | None = None
    value_scales: ScaleKind | None = None


@dataclass(frozen=True, slots=True)
class StateRow:
    """One tensor of a layer's state: `size` items of one dtype for each position of each KV head."""

    name: str
    dtype: DType
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Keys and values of one layer, which stay from one step to the next.

    A token attends to `window` positions up to its own; None: all. The layer's attention computes in `dtype`; None: in
    that of the whole computation. `kept` says how keys and values are kept; None: in the dtype of attention.
    """

    layer: int
    heads: ByHeads
    window: int | None = None
    dtype: DType | None = None
    kept: KeptAs | None = None

    def rows(self, computed: DType) -> Iterator[StateRow]:
        """Its tensors, in calling order; `computed` is the dtype of the whole computation."""
        dtype = self.dtype or computed if self.kept is None else self.kept.dtype
        for kind in KINDS:
            yield StateRow(f"{kind}.{self.layer}", dtype, self.heads.head_dim)

    def count_positions(self, max_length: int, largest_step: int) -> int:
        """Counts the positions of a slot. Fewer than `max_length`, the longest sequence's, are a ring.

        A step writes all of its tokens, at most `largest_step` a row, before any of them attends. So a ring holds what
        the first one sees, which is a window with itself at the end, and the tokens behind it. If `largest_step` is 0,
        every layer keeps all positions.
        """
        if self.window is None or not largest_step:
            return max_length
        needed = self.window + largest_step - 1
        return min(-(-needed // RING_POSITIONS) * RING_POSITIONS, max_length)
