"""Describes all parameters and state tensors of a model, for planning, sharding, quantization, LoRA and tracing.

Modules in `layers` are built from its specs, so that a module and its description cannot differ. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from bundle.abi.inputs import PromptLengths
from compiler_svc.models.divisions import Axis
from compiler_svc.models.parameters import RANK_PARAMETER, ParameterSpec
from compiler_svc.models.sources import list_shapes
from compiler_svc.models.specs import EmbeddingSpec, LayerSpec, LinearSpec, NormSpec, RopeSpec, parameters_of
from compiler_svc.models.state import StateSpec
from compiler_svc.models.storage import AS_DESCRIBED, Storage


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A causal language model.

    Attributes:
        numeric_config: Every attribute that enters the arithmetic, as JSON: the numeric part of the graph ABI.
        max_position_embeddings: Positions that the model was trained for.
        norm: Of the last hidden state; None: the head takes it as it is.
        is_tied: Whether the head's matrix is the embedding's table. One rank then stores it once; several ranks store
            both, unless the embedding is divided along the vocabulary, as the head is.
        logit_soft_cap: Logits become `logit_soft_cap * tanh(logit / logit_soft_cap)`; 0: they stay.
        positions: Embeddings that are learned for positions, from row `first_position` on, and added to those of
            tokens; None: it has none.
        input_projection: From token embeddings to the hidden size, where they have another one; `output_projection`
            goes back, to what the head takes.
        storage: How checkpoints store what is described here.
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
    ropes: tuple[RopeSpec, ...] = ()
    logits_divisor: float = 1.0
    logit_soft_cap: float = 0.0
    embedding_norm: NormSpec | None = None
    positions: EmbeddingSpec | None = None
    first_position: int = 0
    input_projection: LinearSpec | None = None
    output_projection: LinearSpec | None = None
    storage: Storage = AS_DESCRIBED
    left_out: tuple[str, ...] = ()
    prompt_lengths: PromptLengths | None = None

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

    def shares_table(self, tp_degree: int) -> bool:
        """Whether the head reads the embedding's own table, so that the shard holds no matrix of the head.

        Embeddings are not quantized, so a quantized head has a matrix of its own.
        """
        is_whole = tp_degree == 1 or self.embedding.vocabulary.is_divided
        return self.is_tied and not self.head.format and is_whole

    def linears(self) -> tuple[LinearSpec, ...]:
        """Every linear layer."""
        projections = (one for one in (self.input_projection, self.output_projection) if one is not None)
        return (*chain.from_iterable(layer.linears() for layer in self.layers), *projections, self.head)

    def parameters(self, tp_degree: int) -> tuple[ParameterSpec, ...]:
        """All tensors of every rank's shard, in the order of the model."""
        head = () if self.shares_table(tp_degree) else (self.head,)
        before = (self.embedding, self.embedding_norm, self.input_projection, self.positions)
        specs = (*before, *self.layers, self.norm, self.output_projection, *head, *self.ropes)
        named = parameters_of(*(spec for spec in specs if spec is not None))
        if self.storage != AS_DESCRIBED:
            named = self._locate(named)
        return (*named, *([RANK_PARAMETER] if tp_degree > 1 else []))

    def find_module(self, linear: LinearSpec) -> str:
        """What the checkpoint calls the module that has the outputs of a linear layer without parts."""
        modules = {one.module for one in linear.slices} or {linear.name}
        assert len(modules) == 1, f"the outputs of {linear.name} are of several modules"
        return self.storage.find_name(f"{modules.pop()}.weight").removesuffix(".weight")

    def adapter_parameters(self) -> tuple[ParameterSpec, ...]:
        """All tensors of every rank's adapters, in the order of the linear layers."""
        return tuple(chain.from_iterable(one.adapter_parameters() for one in self.linears()))

    def _locate(self, parameters: Iterator[ParameterSpec]) -> Iterator[ParameterSpec]:
        """The parameters with the checkpoint's names."""
        matrices = {f"{linear.name}.{kind}" for linear in self.linears() for kind in ("weight", "scale")}
        for one in parameters:
            yield replace(one, source=self.storage.locate(one.source, is_matrix=one.name in matrices))

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
        shapes: dict[str, tuple[int, ...]] = {}
        for parameter in self.parameters(1):
            for name, shape in list_shapes(parameter.source, parameter.shape):
                shapes[name] = tuple(map(max, shape, shapes.get(name, shape)))
        return shapes
