"""Functions from a description of a model to another one of the same model. They need no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from bundle.abi.formats import FORMATS, GROUPS
from bundle.abi.tensor import DType
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.divisions import Axis, ByHeads, Evenly, join_axes
from compiler_svc.models.parameters import MemoryGroup
from compiler_svc.models.specs import AdapterSlots, AttentionSpec, LayerSpec, LinearSpec
from compiler_svc.models.state import KeptAs, StateSpec

#: A format whose groups are as large as each layer allows.
INT4: Final = "int4"
#: Names every linear layer that adapters may change, as in PEFT.
ALL_LINEAR: Final = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Linear layers of `groups` keep their matrices in a format, unless `skipped` has a part of their names.

    `format` is a row of `bundle.abi.formats`, or `INT4`. Groups of a row are the largest that a layer may have; `INT4`
    allows all. With `activations`, a row of `ACTIVATION_FORMATS`, these layers quantize what they multiply, too. Layers
    that are not quantizable stay as they are.
    """

    format: str
    activations: str = ""
    groups: tuple[MemoryGroup, ...] = tuple(MemoryGroup)
    skipped: tuple[str, ...] = ()

    @property
    def item(self) -> DType:
        """Dtype of the items of most layers."""
        return FORMATS[f"{INT4}_by_{GROUPS[0]}" if self.format == INT4 else self.format].item


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA adapters may change the linear layers that `targets` name: as PEFT, by whole names or their last parts, or
    all that are adaptable by `ALL_LINEAR`, or by none. Names are the description's, or the checkpoint's.
    """

    slots: AdapterSlots
    targets: tuple[str, ...] = ()

    def may_change(self, linear: LinearSpec, module: str) -> bool:
        """Whether they may change a layer, which is a module of the checkpoint or a part of it."""
        return linear.is_adaptable and (not self.targets or not list_targets(linear, module).isdisjoint(self.targets))


def list_targets(linear: LinearSpec, module: str) -> set[str]:
    """Everything by which adapters may target a layer, which is a module of the checkpoint or a part of it."""
    paths = (linear.name.split("."), module.split("."))
    return {ALL_LINEAR, *(".".join(path[start:]) for path in paths for start in range(len(path)))}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChanges:
    """What a configuration changes in the description of a model: all that plans and builds do to it, by the functions
    below.

    It is data, so that another interpreter does the same. Without an `attention_dtype`, attention computes as all else;
    without `kept`, the KV cache has the dtype of attention.
    """

    fuses_qkv: bool = False
    splits_vocabulary: bool = False
    attention_dtype: DType | None = None
    kept: KeptAs | None = None
    quantization: Quantization | None = None
    adapters: Adapters | None = None

    def apply(self, description: ModelDescription) -> ModelDescription:
        """Describes the model with the changes."""
        if self.fuses_qkv:
            description = fuse_qkv(description)
        if self.splits_vocabulary:
            description = split_vocabulary(description)
        if self.attention_dtype is not None or self.kept is not None:
            description = _change_states(description, self.change_state)
        if self.quantization is not None:
            description = quantize(description, self.quantization)
        if self.adapters is not None:
            description = with_adapters(description, self.adapters)
        return description

    def change_state(self, state: StateSpec) -> StateSpec:
        """Describes a layer's state with the changes: attention computes in one dtype, projections and output layer
        included, and keys and values may be kept in another way.
        """
        return replace(state, dtype=self.attention_dtype or state.dtype, kept=self.kept or state.kept)


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


def quantize(description: ModelDescription, quantization: Quantization) -> ModelDescription:
    """Some linear layers keep their matrices as items and scales. A fused one is skipped with any of its parts."""

    def change(linear: LinearSpec) -> LinearSpec:
        names = [one.name for one in (linear, *linear.parts)]
        is_skipped = any(part in name for part in quantization.skipped for name in names)
        takes = linear.is_quantizable and linear.group in quantization.groups and not is_skipped
        if not takes:
            return linear
        return replace(linear, format=_choose_format(quantization.format, linear), activations=quantization.activations)

    return _change_linears(description, change)


def with_adapters(description: ModelDescription, adapters: Adapters) -> ModelDescription:
    """Some linear layers have room for adapters; of a fused one, those of its parts that they may change."""

    def change(linear: LinearSpec) -> LinearSpec:
        if linear.parts:
            return replace(linear, parts=tuple(map(change, linear.parts)))
        may_change = adapters.may_change(linear, description.find_module(linear))
        return replace(linear, adapters=adapters.slots) if may_change else linear

    return _change_linears(description, change)


def _choose_format(name: str, linear: LinearSpec) -> str:
    """The row of a layer: of groups, the largest that do not reach over heads, and int8 where all of them would."""
    largest = GROUPS[0] if name == INT4 else FORMATS[name].group
    if not largest:
        return name
    inputs = linear.inputs
    unit = inputs.division.head_dim if isinstance(inputs.division, ByHeads) else inputs.length
    group = next((one for one in GROUPS if one <= largest and unit % one == 0), None)
    return "int8_per_channel" if group is None else f"int4_by_{group}"


def _change_states(description: ModelDescription, change: Callable[[StateSpec], StateSpec]) -> ModelDescription:
    def change_layer(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, state=change(layer.attention.state)))

    return replace(description, layers=tuple(map(change_layer, description.layers)))


def _change_linears(description: ModelDescription, change: Callable[[LinearSpec], LinearSpec]) -> ModelDescription:
    return replace(
        description,
        layers=tuple(_change_layer(layer, change) for layer in description.layers),
        head=change(description.head),
    )


def _change_layer(layer: LayerSpec, change: Callable[[LinearSpec], LinearSpec]) -> LayerSpec:
    attention, mlp = layer.attention, layer.feed_forward
    return replace(
        layer,
        attention=replace(
            attention, projections=tuple(map(change, attention.projections)), output=change(attention.output)
        ),
        feed_forward=replace(mlp, gate=mlp.gate and change(mlp.gate), up=change(mlp.up), down=change(mlp.down)),
    )


def _fuse(attention: AttentionSpec) -> AttentionSpec:
    if len(attention.projections) == 1:
        return attention
    first = attention.projections[0]
    fused = replace(
        first,
        name=f"{first.name.rpartition('.')[0]}.qkv_proj",
        outputs=join_axes(*(one.outputs for one in attention.projections)),
        slices=(),
        parts=attention.projections,
    )
    return replace(attention, projections=(fused,))
