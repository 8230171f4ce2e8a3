"""The tensors of shards: shape, division among ranks, source, and what plans count them as."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bundle.abi.tensor import DType
from bundle.manifest import TensorLayout
from compiler_svc.models.divisions import Axis
from compiler_svc.models.sources import RankSource, RopeSource, SlopeSource, StoredSource

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


class WeightFormat(StrEnum):
    """How the values of a linear layer's matrix are kept."""

    #: In the dtype of the shard.
    DENSE = "dense"
    #: One byte for each value, one float32 scale for the matrix.
    PER_TENSOR = "per_tensor"
    #: One byte for each value, one float32 scale for each output.
    PER_CHANNEL = "per_channel"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One tensor of every rank's shard, which is one parameter of the module.

    Attributes:
        name: Name of the tensor in the shard, and of the module's parameter.
        axes: At most one of them is divided among ranks.
        dtype: None: the computation's, or the checkpoint's with `cast_type` as-declared.
        format: Of a matrix whose values may be quantized.
        layout: How the shard lays its items out.
    """

    name: str
    axes: tuple[Axis, ...]
    source: StoredSource | RopeSource | SlopeSource | RankSource
    group: MemoryGroup
    dtype: DType | None = None
    format: WeightFormat = WeightFormat.DENSE
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
