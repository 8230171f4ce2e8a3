"""The weight plan: every tensor of a rank shard, its source in the checkpoint and its division among ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, cast

from bundle.abi.tensor import DType
from bundle.errors import FieldViolation
from bundle.manifest import DTYPE_SIZES_BYTES, WeightShard, WeightTensor
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.divisions import Evenly
from compiler_svc.models.parameters import ParameterSpec
from compiler_svc.models.sources import StoredSource
from compiler_svc.models.storage import AS_DESCRIBED, rename_slices
from compiler_svc.sharding.errors import ShardingNotServed
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.headers import TensorHeader

CastType = Literal["config", "as-declared"]

#: Dtypes of checkpoint tensors that can be cast to a computation dtype.
CASTABLE_DTYPES: Final = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of every rank shard.

    Attributes:
        dtype: Dtype in the shard.
    """

    spec: ParameterSpec
    dtype: DType
    tp_degree: int

    @property
    def name(self) -> str:
        """Name of the tensor in the shard, and of the model's parameter."""
        return self.spec.name

    @cached_property
    def rank_shape(self) -> tuple[int, ...]:
        """Shape of each rank's part; equal for all ranks."""
        return self.spec.rank_shape(self.tp_degree)

    @property
    def rank_size_bytes(self) -> int:
        """Bytes of each rank's part."""
        return math.prod(self.rank_shape) * DTYPE_SIZES_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightPlan:
    """All tensors of a model's shards, in the order of the model."""

    tp_degree: int
    tensors: tuple[PlannedTensor, ...]

    @property
    def shard_size_bytes(self) -> int:
        """Bytes of the tensors of one rank's shard."""
        return sum(tensor.rank_size_bytes for tensor in self.tensors)

    def describe_shard(self, rank: int, blob: str | None, size_bytes: int) -> WeightShard:
        """Describes a shard file for the manifest.

        Args:
            blob: Digest of the file; None if it does not exist yet.
            size_bytes: Size of the file; 0 if it does not exist yet.
        """
        tensors = (
            WeightTensor(name=one.name, dtype=one.dtype, shape=one.rank_shape, layout=one.spec.layout)
            for one in self.tensors
        )
        ordered = tuple(sorted(tensors, key=lambda tensor: tensor.name))
        return WeightShard(rank=rank, blob=blob, size_bytes=size_bytes, tensors=ordered)


def plan_weights(
    description: ModelDescription, checkpoint: Checkpoint, *, dtype: DType, cast_type: CastType, tp_degree: int
) -> WeightPlan:
    """Plans the shards of a checkpoint from its headers.

    Args:
        dtype: Dtype of the computation.
        cast_type: `config` stores weights in `dtype`, `as-declared` in the checkpoint's own dtypes.

    Raises:
        CheckpointInvalid: Names each tensor that is missing, unexpected, or of the wrong shape or dtype.
        ShardingNotServed: `tp_degree` is too large for the model.
    """
    check_tp_degree(description, tp_degree)
    checkpoint, stored_names = _name_as_described(description, checkpoint)
    _check_tensors(description, checkpoint)

    def plan(spec: ParameterSpec) -> PlannedTensor:
        stored: str = spec.dtype or dtype
        if cast_type == "as-declared" and isinstance(spec.source, StoredSource):
            # A parameter that joins several tensors takes the dtype of the first one.
            declared = checkpoint.tensors[spec.source.slices[0].tensor].dtype
            stored = declared if declared in DTYPE_SIZES_BYTES else dtype
        if stored_names and isinstance(spec.source, StoredSource):
            spec = replace(spec, source=rename_slices(spec.source, stored_names))
        return PlannedTensor(spec, cast("DType", stored), tp_degree)

    return WeightPlan(tp_degree, tuple(map(plan, description.parameters(tp_degree))))


def check_tp_degree(description: ModelDescription, tp_degree: int) -> None:
    """Checks that each of `tp_degree` ranks gets a part of every axis. Heads are padded if needed.

    Raises:
        ShardingNotServed: A rank would get only padding.
    """
    for axis in dict.fromkeys(description.axes()):
        if isinstance(axis.division, Evenly) and axis.length < tp_degree:
            raise ShardingNotServed(tp_degree, axis.attribute, axis.length)


def find_tied_tensors(description: ModelDescription, checkpoint: Checkpoint) -> tuple[str, str]:
    """Names under which a checkpoint may store the matrix of a tied head, and the embedding's table.

    The checkpoint need not hold the first one.
    """
    _, stored_names = _name_as_described(description, checkpoint)
    head, table = (stored_names.get(name, name) for name in _name_tied_tensors(description))
    return head, table


def _name_as_described(description: ModelDescription, checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint under the names of the description, and the names that it has itself, by those.

    A checkpoint with a tied head may store the matrix under the head's name alone, as transformers takes it, too.
    """
    names: dict[str, str] = {}
    if description.storage != AS_DESCRIBED:
        head = (description.stored_name(one.name) for one in description.head.parameters())
        known = {*description.checkpoint_tensors(), *description.redundant, *head}
        names = dict(description.storage.find_other_names(known, checkpoint.tensors))
    described = {names.get(name, name): name for name in checkpoint.tensors}
    head_name, table = _name_tied_tensors(description)
    if description.is_tied and table not in described and head_name in described:
        names[described[head_name]] = table
    if not names:
        return checkpoint, {}
    tensors = {names.get(name, name): header for name, header in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors), {name: stored for stored, name in names.items()}


def _name_tied_tensors(description: ModelDescription) -> tuple[str, str]:
    """Names that checkpoints usually give the matrix of the head and the embedding's table."""
    head, table = (description.stored_name(f"{one.name}.weight") for one in (description.head, description.embedding))
    return head, table


def _check_tensors(description: ModelDescription, checkpoint: Checkpoint) -> None:
    expected = description.checkpoint_tensors()
    violations = [
        FieldViolation(name, *mistake)
        for name, shape in expected.items()
        if (mistake := _find_mistake(checkpoint.tensors.get(name), shape)) is not None
    ]
    head = (description.stored_name(one.name) for one in description.head.parameters())
    redundant = description.redundant.union(head if description.is_tied else ())
    violations += [
        FieldViolation(name, "unexpected", "only tensors that config.json accounts for")
        for name in checkpoint.tensors
        if name not in expected and name not in redundant and description.find_left_out(name) is None
    ]
    if violations:
        raise CheckpointInvalid.listing(checkpoint.path, violations)


def _find_mistake(header: TensorHeader | None, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """What is wrong with a tensor, and what would be accepted."""
    if header is None:
        return "missing", f"a tensor of shape {list(shape)}"
    if header.shape != shape:
        return f"shape {list(header.shape)}", f"shape {list(shape)}, as config.json says"
    if header.dtype not in CASTABLE_DTYPES:
        return f"dtype {header.dtype}", f"one of {', '.join(CASTABLE_DTYPES)}"
    return None
