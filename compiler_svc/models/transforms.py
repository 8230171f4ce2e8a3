"""Functions from a description of a model to another one of the same model. They need no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from bundle.abi.tensor import DType
from compiler_svc.models.description import (
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    ModelDescription,
)
from compiler_svc.models.divisions import Axis, Evenly, join_axes
from compiler_svc.models.parameters import MemoryGroup, WeightFormat
from compiler_svc.models.sources import TensorSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChanges:
    """What a configuration changes in the description of a model: all that builds do to it.

    It is data, so that another interpreter does the same.

    Attributes:
        fuses_qkv: See `fuse_qkv`.
        splits_vocabulary: See `split_vocabulary`.
        attention_dtype: See `compute_attention_in`; None for the dtype of everything else.
    """

    fuses_qkv: bool = False
    splits_vocabulary: bool = False
    attention_dtype: DType | None = None

    def apply(self, description: ModelDescription) -> ModelDescription:
        """Describes the model with the changes."""
        if self.fuses_qkv:
            description = fuse_qkv(description)
        if self.splits_vocabulary:
            description = split_vocabulary(description)
        if self.attention_dtype is not None:
            description = compute_attention_in(description, self.attention_dtype)
        return description


#: The changes of a configuration that makes none.
UNCHANGED: Final = ModelChanges()


def fuse_qkv(description: ModelDescription) -> ModelDescription:
    """One projection makes queries, keys and values. Each rank holds its heads of the three, in this order."""
    return replace(
        description,
        layers=tuple(replace(layer, attention=_fuse(layer.attention)) for layer in description.layers),
    )


def split_vocabulary(description: ModelDescription) -> ModelDescription:
    """The embedding is divided along the vocabulary, so that a tied head has the same part of the table."""
    embedding = description.embedding
    vocabulary = Axis(embedding.vocabulary.length, Evenly(), "vocab_size")
    hidden = Axis(embedding.hidden.length, attribute=embedding.hidden.attribute)
    return replace(description, embedding=replace(embedding, vocabulary=vocabulary, hidden=hidden))


def compute_attention_in(description: ModelDescription, dtype: DType) -> ModelDescription:
    """All of attention computes in a dtype of its own, from the projections to the output layer; so keys and values
    have it, too.
    """

    def change(attention: AttentionSpec) -> AttentionSpec:
        return replace(attention, state=replace(attention.state, dtype=dtype))

    return replace(
        description, layers=tuple(replace(layer, attention=change(layer.attention)) for layer in description.layers)
    )


def quantize(
    description: ModelDescription,
    weight_format: WeightFormat,
    skipped: Collection[str],
    *,
    groups: Collection[MemoryGroup] = tuple(MemoryGroup),
) -> ModelDescription:
    """Quantizable linear layers keep their matrices in a quantized format.

    Args:
        skipped: Parts of the names of modules that stay as they are.
        groups: Modules of other groups stay as they are, too.
    """

    def change(linear: LinearSpec) -> LinearSpec:
        is_skipped = linear.group not in groups or any(part in linear.name for part in skipped)
        return linear if is_skipped or not linear.is_quantizable else replace(linear, format=weight_format)

    return _change_linears(description, change)


def _change_linears(description: ModelDescription, change: Callable[[LinearSpec], LinearSpec]) -> ModelDescription:
    return replace(
        description,
        layers=tuple(_change_layer(layer, change) for layer in description.layers),
        head=change(description.head),
    )


def _change_layer(layer: LayerSpec, change: Callable[[LinearSpec], LinearSpec]) -> LayerSpec:
    attention, mlp = layer.attention, layer.mlp
    return replace(
        layer,
        attention=replace(
            attention, projections=tuple(map(change, attention.projections)), output=change(attention.output)
        ),
        mlp=replace(mlp, gate=mlp.gate and change(mlp.gate), up=change(mlp.up), down=change(mlp.down)),
    )


def _fuse(attention: AttentionSpec) -> AttentionSpec:
    if len(attention.projections) == 1:
        return attention
    first = attention.projections[0]
    slices = (
        slices
        for one in attention.projections
        for slices in one.slices or (TensorSlice(one.name, 0, one.outputs.length),)
    )
    fused = replace(
        first,
        name=f"{first.name.rpartition('.')[0]}.qkv_proj",
        outputs=join_axes(*(one.outputs for one in attention.projections)),
        slices=tuple(slices),
    )
    return replace(attention, projections=(fused,))
