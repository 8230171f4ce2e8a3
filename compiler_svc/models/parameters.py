"""The tensors of shards: shape, division among ranks, source, and what plans count them as."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bundle.abi.tensor import DType
from bundle.manifest import TensorLayout
from compiler_svc.models.divisions import Axis
from compiler_svc.models.sources import RankSource, Source

#: Which rank a shard is for, int32 [1]; in shards of several ranks only.
RANK: Final = "rank_util.rank"


class MemoryGroup(StrEnum):
    """What plans count a parameter's bytes as, in the order in which plans list the groups."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    NORM = "norm"
    LM_HEAD = "lm_head"
    DRAFT = "draft"
    DERIVED = "derived"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One tensor of every rank's shard, and the module's parameter of the same name.

    At most one of its axes is divided among ranks. Without a dtype it has the computation's, or the checkpoint's with
    `cast_type` as-declared.
    """

    name: str
    axes: tuple[Axis, ...]
    source: Source
    group: MemoryGroup
    dtype: DType | None = None
    layout: TensorLayout = "row_major"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(axis.length for axis in self.axes)

    def rank_shape(self, tp_degree: int) -> tuple[int, ...]:
        """Shape of each rank's part; equal for all ranks."""
        return tuple(axis.part_length(tp_degree) for axis in self.axes)

    def divided_axis(self) -> int | None:
        """Number of the axis that ranks share; None if every rank holds the whole tensor."""
        return next((number for number, axis in enumerate(self.axes) if axis.is_divided), None)


RANK_PARAMETER: Final = ParameterSpec(
    name=RANK, axes=(Axis(1),), source=RankSource(), group=MemoryGroup.DERIVED, dtype="int32"
)
