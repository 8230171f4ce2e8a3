"""What a model is made of, as data, up to whole layers. Each spec lists its parameters; modules in `layers` follow it.

Every way to compose a layer is a spec of its own, which has what its module honours and nothing else. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from bundle.abi.formats import FORMATS
from bundle.manifest import TensorLayout
from compiler_svc.models.divisions import Axis, ByHeads, group_axis
from compiler_svc.models.parameters import MemoryGroup, ParameterSpec
from compiler_svc.models.rope_config import LongRope, RopeConfig
from compiler_svc.models.sources import Items, RopeSource, Scales, Sliced, SlopeSource, Stored, Written, join
from compiler_svc.models.state import StateSpec


@dataclass(frozen=True, slots=True)
class ModuleSlice:
    """Outputs `start` to `start + length` of a linear module of the checkpoint."""

    module: str
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """Room for LoRA adapters beside a linear layer: for so many, whose ranks are at most `rank`."""

    slots: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """A linear layer: a matrix [outputs, inputs], and maybe a bias [outputs].

    If `outputs` is divided, each rank computes its part of them. If `inputs` is divided, each rank contributes to all
    outputs, partial results are summed over ranks, and the bias is added once.

    `slices` is what of the checkpoint's modules the outputs are, in order; none: the module of the same name. `parts`
    are the layers instead whose outputs it has one after another, as in a fused projection. With a `format`, a row of
    `bundle.abi.formats`, the matrix is quantized, that of each part by itself; with `activations`, a row of
    `ACTIVATION_FORMATS`, so is each row that it multiplies. LoRA adapters may change the layer if `is_adaptable`,
    and do if there are `adapters`; those of a fused projection change its parts.
    """

    name: str
    inputs: Axis
    outputs: Axis
    group: MemoryGroup
    has_bias: bool = False
    slices: tuple[ModuleSlice, ...] = ()
    is_quantizable: bool = True
    is_adaptable: bool = True
    parts: tuple[LinearSpec, ...] = ()
    format: str = ""
    activations: str = ""
    layout: TensorLayout = "row_major"
    adapters: AdapterSlots | None = None

    @property
    def module(self) -> str:
        """The last part of the name, such as `q_proj`, by which LoRA and quantization configurations select it."""
        return self.name.rpartition(".")[2]

    def parameters(self) -> Iterator[ParameterSpec]:
        """Matrix, its scales if it is quantized, then bias."""
        weight, bias = f"{self.name}.weight", f"{self.name}.bias"
        axes = (self.outputs, self.inputs)
        if not self.format:
            source = join(*self.list_stored("weight"))
            yield ParameterSpec(name=weight, axes=axes, source=source, group=self.group, layout=self.layout)
        else:
            yield from self._quantized(weight, axes)
        if self.has_bias:
            yield ParameterSpec(name=bias, axes=axes[:1], source=join(*self.list_stored("bias")), group=self.group)

    def _quantized(self, weight: str, axes: tuple[Axis, Axis]) -> Iterator[ParameterSpec]:
        """Items and scales: one scale for each output if there is one for each or for each of several parts."""
        row, matrices = FORMATS[self.format], self.parts or (self,)
        are_many = row.is_per_channel or len(matrices) > 1
        scale_axes: tuple[Axis, ...] = (self.outputs if are_many else Axis(1),)
        if row.group:
            axes = (self.outputs, group_axis(self.inputs, row.group, row.group // 2))
            scale_axes = (self.outputs, group_axis(self.inputs, row.group, 2))
        arguments = [
            (join(*one.list_stored("weight")), (one.outputs.length, one.inputs.length), self.format) for one in matrices
        ]
        yield ParameterSpec(
            name=weight,
            axes=axes,
            source=join(*(Items(*one) for one in arguments)),
            group=self.group,
            dtype=row.item,
            layout=self.layout,
        )
        yield ParameterSpec(
            name=f"{self.name}.scale",
            axes=scale_axes,
            source=join(*(Scales(*one, is_spread=are_many) for one in arguments)),
            group=self.group,
            dtype="float32",
        )

    def adapter_parameters(self) -> Iterator[ParameterSpec]:
        """A [slots, rank, inputs] and B [slots, outputs, rank] of the layer's adapters, or of its parts'; they add
        B(A x) to its outputs.
        """
        for part in self.parts or (self,):
            if part.adapters is None:
                continue
            slots, rank = Axis(part.adapters.slots), Axis(part.adapters.rank)
            matrices = {"lora_A": (slots, rank, part.inputs), "lora_B": (slots, part.outputs, rank)}
            for kind, axes in matrices.items():
                yield ParameterSpec(name=f"{part.name}.{kind}", axes=axes, source=Written(), group=part.group)

    def list_stored(self, kind: str) -> Iterator[Sliced]:
        """What its outputs are of the checkpoint's tensors of a kind."""
        if self.parts:
            yield from chain.from_iterable(part.list_stored(kind) for part in self.parts)
        else:
            for one in self.slices or (ModuleSlice(self.name, 0, self.outputs.length),):
                yield Sliced(Stored(f"{one.module}.{kind}"), one.start, one.length)


@dataclass(frozen=True, slots=True)
class RmsNormSpec:
    """Root mean square normalization over the last axis; over the parts of all ranks if it is divided.

    `offset` is added to each scale. With `rounds_last` scales multiply in float32, and only their products are rounded.
    """

    name: str
    axis: Axis
    eps: float
    offset: float = 0.0
    rounds_last: bool = False

    def parameters(self) -> Iterator[ParameterSpec]:
        """The scale."""
        yield _stored(f"{self.name}.weight", (self.axis,), MemoryGroup.NORM)


@dataclass(frozen=True, slots=True)
class LayerNormSpec:
    """Layer normalization over the last axis, which ranks do not divide. Scales and biases act in float32.

    `heads` is the axis of the heads, if each has scales of its own.
    """

    name: str
    axis: Axis
    eps: float
    has_scale: bool = True
    has_bias: bool = True
    heads: Axis | None = None

    def parameters(self) -> Iterator[ParameterSpec]:
        """Scale, then bias."""
        axes = (self.axis,) if self.heads is None else (self.heads, self.axis)
        for kind, is_there in (("weight", self.has_scale), ("bias", self.has_bias)):
            if is_there:
                yield _stored(f"{self.name}.{kind}", axes, MemoryGroup.NORM)


NormSpec = RmsNormSpec | LayerNormSpec


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Embeddings of tokens [vocabulary, hidden], or of positions.

    If `hidden` is divided, ranks join their parts of each row. If `vocabulary` is, one of them has the row. With
    `rounds_multiplier`, the multiplier of what the table holds is rounded to the dtype of the computation first.
    """

    name: str
    vocabulary: Axis
    hidden: Axis
    multiplier: float = 1.0
    rounds_multiplier: bool = False

    def parameters(self) -> Iterator[ParameterSpec]:
        """The table."""
        yield _stored(f"{self.name}.weight", (self.vocabulary, self.hidden), MemoryGroup.EMBEDDING)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding of heads' first `rotary_dim` dimensions, in float32 if `is_wide`; frequencies are weights."""

    name: str
    rope: RopeConfig
    rotary_dim: int
    is_wide: bool = False

    def parameters(self) -> Iterator[ParameterSpec]:
        """Inverse frequencies, float32 [rotary_dim / 2]; two sets of LongRoPE's."""
        sets = {"inv_freq": False, "long_inv_freq": True} if isinstance(self.rope, LongRope) else {"inv_freq": False}
        for name, is_long in sets.items():
            yield ParameterSpec(
                name=f"{self.name}.{name}",
                axes=(Axis(self.rotary_dim // 2),),
                source=RopeSource(self.rope, self.rotary_dim, is_long),
                group=MemoryGroup.DERIVED,
                dtype="float32",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer.

    Attributes:
        projections: Linear layers that make queries, keys and values, in this order; a single one makes all three.
        query_norm: Normalization of each query head before its rotation, or of all heads as one if their axis is
            divided; `key_norm` of KV heads.
        rope: Name of the rotary embedding that rotates queries and keys; None: they are not rotated.
        scale: Multiplies the products of queries and keys; None: 1 / sqrt(head_dim).
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`; 0: they stay.
        pairs_neighbours: Whether a dimension is rotated against its neighbour; otherwise the first half of them against
            the second.
        has_slopes: Whether scores fall with the distance, by ALiBi's slope of each query head.
    """

    projections: tuple[LinearSpec, ...]
    output: LinearSpec
    state: StateSpec
    query_norm: NormSpec | None = None
    key_norm: NormSpec | None = None
    rope: str | None = "rope"
    scale: float | None = None
    soft_cap: float = 0.0
    pairs_neighbours: bool = False
    has_slopes: bool = False

    @property
    def heads(self) -> ByHeads:
        """The heads."""
        return self.state.heads

    def parameters(self) -> Iterator[ParameterSpec]:
        """In the order of the projections, then of the norms, then the slopes."""
        norms = (norm for norm in (self.query_norm, self.key_norm) if norm is not None)
        yield from parameters_of(*self.projections, self.output, *norms)
        yield from self._scales()
        if self.has_slopes:
            count = self.heads.num_query_heads
            yield ParameterSpec(
                name=f"{self.output.name.rpartition('.')[0]}.slopes",
                axes=(Axis(count, ByHeads("query", count, self.heads.num_kv_heads, 1)),),
                source=SlopeSource(count),
                group=MemoryGroup.DERIVED,
                dtype="float32",
            )

    def _scales(self) -> Iterator[ParameterSpec]:
        """What keys and values are divided by before they are kept, in the shapes of NxD Inference: [1],
        [KV heads, 1, 1] or [1, 1, head_dim].
        """
        kept, heads = self.state.kept, self.heads
        axes = {
            "tensor": (Axis(1),),
            "head": (Axis(heads.num_kv_heads, replace(heads, head_dim=1)), Axis(1), Axis(1)),
            "channel": (Axis(1), Axis(1), Axis(heads.head_dim)),
        }
        kinds = {} if kept is None else {"k_scale": kept.key_scales, "v_scale": kept.value_scales}
        for name, kind in kinds.items():
            if kind is not None:
                path = f"{self.output.name.rpartition('.')[0]}.{name}"
                yield ParameterSpec(
                    name=path, axes=axes[kind], source=Stored(path), group=MemoryGroup.ATTENTION, dtype="float32"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Feed-forward: `down(act(gate(x)) * up(x))`, `down(act(up(x)))` without a gate; `act` by Hugging Face's name."""

    act: str
    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec

    def linears(self) -> tuple[LinearSpec, ...]:
        """Gate, if it has one, up, down."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    def parameters(self) -> Iterator[ParameterSpec]:
        """In the order of the linear layers."""
        return parameters_of(*self.linears())


#: What a layer does to each token by itself.
FeedForwardSpec = MlpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer; a subclass says how it is put together, and has what that way honours."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    attention_norm: NormSpec | None
    feed_forward_norm: NormSpec | None

    def parameters(self) -> Iterator[ParameterSpec]:
        """Those of attention and feed-forward between those of their norms."""
        specs = (self.attention_norm, self.attention, self.feed_forward, self.feed_forward_norm)
        return parameters_of(*(spec for spec in specs if spec is not None))

    def linears(self) -> tuple[LinearSpec, ...]:
        """Its linear layers."""
        return (*self.attention.projections, self.attention.output, *self.feed_forward.linears())


@dataclass(frozen=True, slots=True, kw_only=True)
class PreNormSpec(LayerSpec):
    """`h + multiplier * attention(norm(h))`, then the same with the feed-forward."""

    multiplier: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputNormSpec(LayerSpec):
    """`h + output_norm(attention(norm(h)))`, then the same with the feed-forward."""

    attention_output_norm: NormSpec
    feed_forward_output_norm: NormSpec

    def parameters(self) -> Iterator[ParameterSpec]:
        """Those of any layer, then those of the norms of outputs."""
        yield from LayerSpec.parameters(self)
        yield from parameters_of(self.attention_output_norm, self.feed_forward_output_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormSpec(LayerSpec):
    """`norm(h + attention(h))`, then the same with the feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec(LayerSpec):
    """`h + attention(norm(h)) + feed_forward(norm(h))`; a feed-forward without a norm takes what attention takes."""


Spec = LinearSpec | NormSpec | EmbeddingSpec | RopeSpec | AttentionSpec | FeedForwardSpec | LayerSpec


def parameters_of(*specs: Spec) -> Iterator[ParameterSpec]:
    """Parameters of several specs, in their order."""
    return chain.from_iterable(spec.parameters() for spec in specs)


def _stored(name: str, axes: tuple[Axis, ...], group: MemoryGroup) -> ParameterSpec:
    return ParameterSpec(name=name, axes=axes, source=Stored(name), group=group)
