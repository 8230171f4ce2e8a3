"""The weight plan: every tensor of a rank shard, its source in the checkpoint and its division among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast

from bundle.abi.tensor import DTYPES, DType
from bundle.manifest import WeightShard, WeightTensor
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.divisions import Evenly, Grouped
from compiler_svc.models.head_layout import PADDING_HEAD, KvSharding
from compiler_svc.models.parameters import ParameterSpec
from compiler_svc.models.sources import list_tensors
from compiler_svc.models.specs import LinearSpec
from compiler_svc.models.storage import rename
from compiler_svc.sharding.errors import ShardingNotServed
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.inventory import name_tied_tensors, take_inventory

CastType = Literal["config", "as-declared"]


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of every rank shard."""

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
        return math.prod(self.rank_shape) * DTYPES[self.dtype].size_bytes


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
        """Describes a shard file for the manifest; one that does not exist yet has no digest and 0 bytes."""
        tensors = (
            WeightTensor(name=one.name, dtype=one.dtype, shape=one.rank_shape, layout=one.spec.layout)
            for one in self.tensors
        )
        ordered = tuple(sorted(tensors, key=lambda tensor: tensor.name))
        return WeightShard(rank=rank, blob=blob, size_bytes=size_bytes, tensors=ordered)


def plan_weights(
    description: ModelDescription, checkpoint: Checkpoint, *, dtype: DType, cast_type: CastType, tp_degree: int
) -> WeightPlan:
    """Plans shards from a checkpoint's headers: in `dtype` with the cast type `config`, otherwise in its own dtypes."""
    check_tp_degree(description, tp_degree)
    inventory = take_inventory(description, checkpoint)
    if inventory.mistakes:
        raise CheckpointInvalid.listing(checkpoint.path, inventory.mistakes)

    def plan(spec: ParameterSpec) -> PlannedTensor:
        stored: str = spec.dtype or dtype
        if cast_type == "as-declared" and spec.dtype is None:
            # A parameter that joins several tensors takes the dtype of the first one.
            declared = inventory.taken[list_tensors(spec.source)[0]].dtype
            stored = declared if declared in DTYPES else dtype
        if inventory.stored_names:
            spec = replace(spec, source=rename(spec.source, inventory.stored_names))
        return PlannedTensor(spec, cast("DType", stored), tp_degree)

    return WeightPlan(tp_degree, tuple(map(plan, description.parameters(tp_degree))))


def check_tp_degree(description: ModelDescription, tp_degree: int) -> None:
    """Checks that each of `tp_degree` ranks gets a part of every axis. Heads are padded if needed, unless what they add
    to a row would count where rows are quantized.
    """
    for axis in dict.fromkeys(description.axes()):
        if isinstance(axis.division, Evenly) and axis.length < tp_degree:
            accepted = f"at most {axis.attribute}, {axis.length}"
            raise ShardingNotServed(tp_degree, axis.attribute, axis.length, accepted)
        if isinstance(axis.division, Grouped) and not axis.division.fits(tp_degree):
            accepted = f"a degree that leaves ranks whole groups of {axis.division.size}; or another quantization_dtype"
            raise ShardingNotServed(tp_degree, axis.attribute, axis.division.base.length, accepted)
    heads = description.states[0].heads
    layout = heads.layout(tp_degree)
    # A head of padding that shares a KV head attends to its values, which would count as a row's largest magnitude.
    pads_groups = layout.sharding is KvSharding.REPLICATE and any(PADDING_HEAD in one for one in layout.query_heads)
    if pads_groups and any(linear.activations for linear in description.linears()):
        accepted = "a degree that pads no query heads; or neuron_config.activation_quantization_type 'none'"
        raise ShardingNotServed(tp_degree, "num_attention_heads", heads.num_query_heads, accepted)


def find_tied_tensors(description: ModelDescription, checkpoint: Checkpoint) -> tuple[str, str]:
    """Names under which a checkpoint may store a tied head's matrix, and stores the embedding's table."""
    stored_names = take_inventory(description, checkpoint).stored_names
    head, table = (stored_names.get(name, name) for name in name_tied_tensors(description))
    return head, table


def find_matrices(description: ModelDescription, checkpoint: Checkpoint) -> Iterator[tuple[LinearSpec, list[str]]]:
    """Every linear layer, and which of the checkpoint's tensors have its matrix; none of a head that shares a table."""
    stored_names = take_inventory(description, checkpoint).stored_names
    sources = {one.name: rename(one.source, stored_names) for one in description.parameters(1)}
    for linear in description.linears():
        source = sources.get(f"{linear.name}.weight")
        yield linear, [] if source is None else list_tensors(source)
