"""One description of a model: every parameter and every state tensor, and all that planning, sharding, quantization,
LoRA and tracing need to know of them. Needs no torch.

Modules in `layers` are built from these records, so that a module's parameters and its description cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from bundle.manifest import TensorLayout
from compiler_svc.models.divisions import Axis, ByHeads
from compiler_svc.models.parameters import RANK_PARAMETER, MemoryGroup, ParameterSpec, WeightFormat
from compiler_svc.models.rope_config import LongRope, RopeConfig
from compiler_svc.models.sources import RopeSource, SlopeSource, StoredSource, TensorSlice
from compiler_svc.models.state import StateSpec
from compiler_svc.models.storage import AS_DESCRIBED, Storage

#: How a layer adds what attention and feed-forward compute. `sequential`: to what each of them takes. `parallel`: both
#: take the layer's input, and it gets both results. `normalized`: as `sequential`, and norms follow the sums.
Residual = Literal["sequential", "parallel", "normalized"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """A linear layer: a matrix [outputs, inputs], and maybe a bias [outputs].

    If `outputs` is divided, each rank computes its part of them. If `inputs` is divided, each rank contributes to all
    outputs, partial results are summed over ranks, and the bias is added once.

    Attributes:
        name: Path of the module.
        slices: What of the checkpoint's modules the outputs are, in order; none: the module of the same name.
        is_quantizable: Whether quantization applies to it.
        is_adaptable: Whether LoRA adapters may change it.
    """

    name: str
    inputs: Axis
    outputs: Axis
    group: MemoryGroup
    has_bias: bool = False
    slices: tuple[TensorSlice, ...] = ()
    is_quantizable: bool = True
    is_adaptable: bool = True
    format: WeightFormat = WeightFormat.DENSE
    layout: TensorLayout = "row_major"

    @property
    def module(self) -> str:
        """The last part of the name, such as `q_proj`, by which LoRA and quantization configurations select it."""
        return self.name.rpartition(".")[2]

    def parameters(self) -> Iterator[ParameterSpec]:
        """Matrix, then bias."""
        matrix = ("weight", (self.outputs, self.inputs), self.format, self.layout)
        bias = ("bias", (self.outputs,), WeightFormat.DENSE, "row_major")
        for kind, axes, weight_format, layout in (matrix, bias) if self.has_bias else (matrix,):
            yield ParameterSpec(
                name=f"{self.name}.{kind}",
                axes=axes,
                source=self._source(kind),
                group=self.group,
                format=weight_format,
                layout=layout,  # type: ignore[arg-type]
            )

    def _source(self, kind: str) -> StoredSource:
        slices = self.slices or (TensorSlice(self.name, 0, self.outputs.length),)
        return StoredSource(tuple(TensorSlice(f"{one.tensor}.{kind}", one.start, one.length) for one in slices))


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Root mean square normalization over the last axis; over the parts of all ranks if it is divided.

    Attributes:
        name: Path of the module.
        offset: What is added to each scale.
        rounds_last: Whether scales multiply in float32, and only their products are rounded.
        is_centered: Whether the mean is subtracted first, which makes it layer normalization. Then scales multiply and
            biases add in float32.
        has_scale: Whether it has scales.
        has_bias: Whether it has biases.
        heads: The heads, if each has scales of its own.
    """

    name: str
    axis: Axis
    eps: float
    offset: float = 0.0
    rounds_last: bool = False
    is_centered: bool = False
    has_scale: bool = True
    has_bias: bool = False
    heads: Axis | None = None

    def parameters(self) -> Iterator[ParameterSpec]:
        """Scale, then bias."""
        axes = (self.axis,) if self.heads is None else (self.heads, self.axis)
        for kind, is_there in (("weight", self.has_scale), ("bias", self.has_bias)):
            if is_there:
                yield _stored(f"{self.name}.{kind}", axes, MemoryGroup.NORM)


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Embeddings of tokens [vocabulary, hidden], or of positions.

    If `hidden` is divided, ranks join their parts of each row. If `vocabulary` is, one of them has the row.

    Attributes:
        name: Path of the module.
        multiplier: Multiplies what the table holds.
        rounds_multiplier: Whether the multiplier is rounded to the dtype of the computation first.
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
    """A rotary embedding, whose frequencies are weights.

    Attributes:
        name: Path of the module.
        rotary_dim: Dimensions of a head that are rotated, the first ones.
        is_wide: Whether heads are rotated in float32.
    """

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
        output: Linear layer from the attended heads to the hidden size.
        query_norm: Normalization of each query head before its rotation, or of all heads as one if their axis is
            divided; `key_norm` of KV heads.
        state: Its keys and values.
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
        yield from _parameters_of(*self.projections, self.output, *norms)
        if self.has_slopes:
            count = self.heads.num_query_heads
            yield ParameterSpec(
                name=f"{self.output.name.rpartition('.')[0]}.slopes",
                axes=(Axis(count, ByHeads("query", count, self.heads.num_kv_heads, 1)),),
                source=SlopeSource(count),
                group=MemoryGroup.DERIVED,
                dtype="float32",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """A feed-forward layer: `down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate.

    Attributes:
        act: Hugging Face's name of the activation.
    """

    act: str
    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec

    def linears(self) -> tuple[LinearSpec, ...]:
        """Gate, if it has one, up, down."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    def parameters(self) -> Iterator[ParameterSpec]:
        """In the order of the linear layers."""
        return _parameters_of(*self.linears())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: attention and feed-forward, whose results are added to what they take.

    Attributes:
        input_norm: Normalization of what attention takes; None: it takes it as it is.
        post_attention_norm: Of what the feed-forward takes; None in a parallel layer: what attention takes.
        attention_output_norm: Of what attention adds; `mlp_output_norm` of what the feed-forward adds.
        residual_multiplier: Multiplies what each of them adds.
        residual: What they take, and what they are added to. If sums are normalized, `input_norm` is of the first one
            and `post_attention_norm` of the second.
    """

    input_norm: NormSpec | None
    attention: AttentionSpec
    post_attention_norm: NormSpec | None
    mlp: MlpSpec
    attention_output_norm: NormSpec | None = None
    mlp_output_norm: NormSpec | None = None
    residual_multiplier: float = 1.0
    residual: Residual = "sequential"

    def parameters(self) -> Iterator[ParameterSpec]:
        """Norms of what is taken among attention and feed-forward, then norms of what is added."""
        before, after = (self.input_norm,), (self.post_attention_norm, self.attention_output_norm, self.mlp_output_norm)
        specs = (*before, self.attention, self.mlp, *after)
        return _parameters_of(*(spec for spec in specs if spec is not None))

    def linears(self) -> tuple[LinearSpec, ...]:
        """Its linear layers."""
        return (*self.attention.projections, self.attention.output, *self.mlp.linears())


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A causal language model.

    Attributes:
        architecture: Hugging Face's name.
        numeric_config: Every attribute that enters the arithmetic, as JSON: the numeric part of the graph ABI.
        max_position_embeddings: Positions that the model was trained for.
        norm: Of the last hidden state; None: the head takes it as it is.
        head: From the hidden size to the vocabulary.
        is_tied: Whether the head's matrix is the embedding's table. One rank then stores it once; several ranks store
            both, unless the embedding is divided along the vocabulary, as the head is.
        rope: The rotary embedding of most layers; `local_rope` of layers that name it.
        logits_divisor: Divides the logits.
        logit_soft_cap: Logits become `logit_soft_cap * tanh(logit / logit_soft_cap)`; 0: they stay.
        embedding_norm: Of token embeddings.
        positions: Embeddings that are learned for positions, and added to those of tokens; None: it has none.
        first_position: The row of the first position.
        input_projection: From token embeddings to the hidden size, where they have another one; `output_projection`
            goes back, to what the head takes.
        storage: How checkpoints store what is described here.
        redundant: Names of tensors that a checkpoint may hold and the model does not take.
        left_out: Modules of the checkpoint that are no part of this model, such as those that take images.
    """

    architecture: str
    numeric_config: Mapping[str, Any]
    max_position_embeddings: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    head: LinearSpec
    is_tied: bool
    rope: RopeSpec
    local_rope: RopeSpec | None = None
    logits_divisor: float = 1.0
    logit_soft_cap: float = 0.0
    embedding_norm: NormSpec | None = None
    positions: EmbeddingSpec | None = None
    first_position: int = 0
    input_projection: LinearSpec | None = None
    output_projection: LinearSpec | None = None
    storage: Storage = AS_DESCRIBED
    redundant: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.embedding.vocabulary.length

    @property
    def hidden_size(self) -> int:
        """Items of a token's hidden state."""
        return self.head.inputs.length if self.input_projection is None else self.input_projection.outputs.length

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """State of every layer, in calling order."""
        return tuple(layer.attention.state for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings that layers name."""
        named = {layer.attention.rope for layer in self.layers}
        return tuple(rope for rope in (self.rope, self.local_rope) if rope is not None and rope.name in named)

    def shares_table(self, tp_degree: int) -> bool:
        """Whether the head reads the embedding's own table, so that the shard holds no matrix of the head."""
        return self.is_tied and (tp_degree == 1 or self.embedding.vocabulary.is_divided)

    def linears(self) -> tuple[LinearSpec, ...]:
        """Every linear layer."""
        projections = (one for one in (self.input_projection, self.output_projection) if one is not None)
        return (*chain.from_iterable(layer.linears() for layer in self.layers), *projections, self.head)

    def parameters(self, tp_degree: int) -> tuple[ParameterSpec, ...]:
        """All tensors of every rank's shard, in the order of the model."""
        head = () if self.shares_table(tp_degree) else (self.head,)
        before = (self.embedding, self.embedding_norm, self.input_projection, self.positions)
        specs = (*before, *self.layers, self.norm, self.output_projection, *head, *self.ropes)
        named = _parameters_of(*(spec for spec in specs if spec is not None))
        if self.storage != AS_DESCRIBED:
            named = self._locate(named)
        return (*named, *([RANK_PARAMETER] if tp_degree > 1 else []))

    def _locate(self, parameters: Iterator[ParameterSpec]) -> Iterator[ParameterSpec]:
        """The parameters with the checkpoint's names."""
        matrices = {f"{linear.name}.weight" for linear in self.linears()}
        for one in parameters:
            if isinstance(one.source, StoredSource):
                yield replace(one, source=self.storage.locate(one.source, is_matrix=one.name in matrices))
            else:
                yield one

    def stored_name(self, name: str) -> str:
        """What most checkpoints call a tensor that this description calls `name`."""
        stored = self.storage.locate(StoredSource((TensorSlice(name, 0, 1),)), is_matrix=False)
        return stored.slices[0].tensor

    def find_left_out(self, tensor: str) -> str | None:
        """The module among `left_out` that a tensor of the checkpoint belongs to; None if it belongs to none."""
        return next((module for module in self.left_out if tensor.startswith(f"{module}.")), None)

    def axes(self) -> Iterator[Axis]:
        """Every axis of every parameter, parts of joined axes apart."""
        for parameter in self.parameters(2):
            for axis in parameter.axes:
                yield from axis.parts or (axis,)

    def checkpoint_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that the checkpoint must hold, by name."""
        shapes: dict[str, list[int]] = {}
        for parameter in self.parameters(1):
            if isinstance(parameter.source, StoredSource):
                axis, own = parameter.source.axis, list(parameter.shape)
                if parameter.source.is_transposed:
                    axis, own = 1 - axis, own[::-1]
                for one in parameter.source.slices:
                    shape = shapes.setdefault(one.tensor, [*own[:axis], 0, *own[axis + 1 :]])
                    shape[axis] = max(shape[axis], one.start + one.length)
        return {name: tuple(shape) for name, shape in shapes.items()}


_Named = LinearSpec | NormSpec | EmbeddingSpec | RopeSpec | AttentionSpec | MlpSpec | LayerSpec


def _parameters_of(*specs: _Named) -> Iterator[ParameterSpec]:
    return chain.from_iterable(spec.parameters() for spec in specs)


def _stored(name: str, axes: tuple[Axis, ...], group: MemoryGroup) -> ParameterSpec:
    source = StoredSource((TensorSlice(name, 0, axes[0].length),))
    return ParameterSpec(name=name, axes=axes, source=source, group=group)
