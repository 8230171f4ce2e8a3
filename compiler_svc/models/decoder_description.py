"""Descriptions of decoder-only models whose layers have attention and an MLP, with norms before or after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from compiler_svc.models.decoder_config import DecoderConfig, LayerNormConfig, Windows
from compiler_svc.models.description import (
    AttentionSpec,
    EmbeddingSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelDescription,
    NormSpec,
    Residual,
    RopeSpec,
)
from compiler_svc.models.divisions import Axis, ByHeads, Evenly
from compiler_svc.models.parameters import MemoryGroup
from compiler_svc.models.rope_config import NoRope, RopeConfig
from compiler_svc.models.sources import TensorSlice
from compiler_svc.models.state import StateSpec
from compiler_svc.models.storage import AS_DESCRIBED, Storage

_EMBEDDING: Final = "model.embed_tokens"
_ROPE: Final = "rope"
_LOCAL_ROPE: Final = "local_rope"

#: Older checkpoints store what the configuration says already, in the model or in each layer.
_STORED_FREQUENCIES: Final = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """How the layers of families differ.

    Attributes:
        qkv_bias: Whether queries, keys and values have biases; `output_bias`: the attended heads' layer.
        mlp_bias: Whether the layers of the MLP have biases.
        normalizes_heads: Whether each query and key head is normalized before its rotation.
        normalizes_projections: Whether queries and keys are, all heads as one.
        norms: Where each layer normalizes: what attention and feed-forward take, what they add, or both.
        norm_offset: What is added to the scales of all norms.
        norms_round_last: Whether scales multiply in float32.
        windows: How many positions each layer attends to; empty: all layers attend to all.
        rotary_dim: Dimensions of each head that are rotated, the first ones; 0: all.
        rotates_in_float32: Whether heads are rotated in float32.
        rotated_layers: Which layers rotate queries and keys; empty: all.
        local_rope: The rotary embedding of layers with a window; None: that of all.
        embedding_multiplier: Multiplies token embeddings; `rounds_embedding_multiplier`: after it is rounded to the
            dtype of the computation.
        attention_scale: Multiplies the products of queries and keys; None: 1 / sqrt(head_dim).
        attention_soft_cap: Bound of attention's scores; 0: none.
        residual_multiplier: Multiplies what attention and feed-forward add.
        logits_divisor: Divides logits.
        logit_soft_cap: Bound of logits; 0: none.
        norm_bias: Whether norms that subtract the mean have biases; `norm_scale`: scales.
        normalizes_each_head: Whether each query and key head is normalized with scales of its own.
        is_gated: Whether the MLP has a gate.
        residual: What attention and feed-forward take, and what they are added to.
        shares_norm: Whether attention and feed-forward of a parallel layer take the same normalized input.
        has_final_norm: Whether the last hidden state is normalized.
        normalizes_embedding: Whether token embeddings are.
        head_bias: Whether the output layer has biases.
        embedding_size: Items of a token's embedding and of what the output layer takes; None: the hidden size.
        first_position: Row of the first position in the table of learned positions; None: none are learned.
        has_slopes: Whether attention falls with the distance, as ALiBi's slopes say.
        pairs_neighbours: Whether dimensions of heads are rotated against their neighbours.
        storage: How checkpoints store what is described.
        redundant: Names of tensors that checkpoints may hold and the model does not take; `redundant_in_layers`: below
            each layer, as the checkpoint names it.
        stored_qkv: Checkpoint module that stores queries, keys and values as one matrix, below `self_attn`; empty:
            three modules do.
        stores_qkv_by_head: Whether that matrix has query, key and value of one head after another.
        stored_gate_up: Checkpoint module that stores gate and up as one matrix, below `mlp`; empty: two modules do.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    normalizes_heads: bool = False
    normalizes_projections: bool = False
    norms: Literal["before", "after", "both"] = "before"
    norm_offset: float = 0.0
    norms_round_last: bool = False
    windows: Windows = ()
    rotary_dim: int = 0
    rotates_in_float32: bool = False
    rotated_layers: tuple[bool, ...] = ()
    local_rope: RopeConfig | None = None
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logit_soft_cap: float = 0.0
    norm_bias: bool = False
    norm_scale: bool = True
    normalizes_each_head: bool = False
    is_gated: bool = True
    residual: Residual = "sequential"
    shares_norm: bool = False
    has_final_norm: bool = True
    normalizes_embedding: bool = False
    head_bias: bool = False
    embedding_size: int | None = None
    first_position: int | None = None
    has_slopes: bool = False
    pairs_neighbours: bool = False
    storage: Storage = AS_DESCRIBED
    redundant: tuple[str, ...] = ()
    redundant_in_layers: tuple[str, ...] = ()
    stored_qkv: str = ""
    stores_qkv_by_head: bool = False
    stored_gate_up: str = ""


def describe_decoder(config: DecoderConfig | LayerNormConfig, traits: DecoderTraits) -> ModelDescription:
    """Describes a model under the names that its checkpoint has."""
    return _Decoder(config, traits).describe()


class _Decoder:
    """Describes one model."""

    def __init__(self, config: DecoderConfig | LayerNormConfig, traits: DecoderTraits) -> None:
        self._config = config
        self._traits = traits
        # Divided along the hidden axis in the embedding alone; layers take and give all of it.
        self._hidden = Axis(config.hidden_size, attribute="hidden_size")
        self._vocabulary = Axis(config.vocab_size, Evenly(), "vocab_size")

    def describe(self) -> ModelDescription:
        config, traits = self._config, self._traits
        rotary_dim = traits.rotary_dim or config.head_dim
        embedding_size = traits.embedding_size or config.hidden_size
        tied = TensorSlice(_EMBEDDING, 0, config.vocab_size)
        return ModelDescription(
            architecture=config.architecture,
            numeric_config=config.to_json(),
            max_position_embeddings=config.max_position_embeddings,
            embedding=EmbeddingSpec(
                _EMBEDDING,
                Axis(config.vocab_size),
                Axis(embedding_size, Evenly(), "hidden_size"),
                traits.embedding_multiplier,
                traits.rounds_embedding_multiplier,
            ),
            layers=tuple(self._describe_layer(layer) for layer in range(config.num_hidden_layers)),
            norm=self._norm("model.norm") if traits.has_final_norm else None,
            head=LinearSpec(
                name="lm_head",
                inputs=Axis(embedding_size, attribute="hidden_size"),
                outputs=self._vocabulary,
                group=MemoryGroup.LM_HEAD,
                has_bias=traits.head_bias,
                slices=(tied,) if config.tie_word_embeddings else (),
                is_adaptable=False,
            ),
            is_tied=config.tie_word_embeddings,
            rope=RopeSpec(_ROPE, config.rope, rotary_dim, traits.rotates_in_float32),
            local_rope=None
            if traits.local_rope is None
            else RopeSpec(_LOCAL_ROPE, traits.local_rope, rotary_dim, traits.rotates_in_float32),
            logits_divisor=traits.logits_divisor,
            logit_soft_cap=traits.logit_soft_cap,
            embedding_norm=self._norm("model.embed_norm") if traits.normalizes_embedding else None,
            positions=self._describe_positions(),
            first_position=traits.first_position or 0,
            input_projection=self._describe_projection("model.project_in", is_input=True),
            output_projection=self._describe_projection("model.project_out", is_input=False),
            storage=traits.storage,
            redundant=frozenset(self._list_redundant()),
        )

    def _list_redundant(self) -> Iterator[str]:
        yield f"model.{_STORED_FREQUENCIES}"
        yield from self._traits.redundant
        for layer in range(self._config.num_hidden_layers):
            for name in (f"self_attn.{_STORED_FREQUENCIES}", *self._traits.redundant_in_layers):
                yield f"{self._traits.storage.layers}.{layer}.{name}"

    def _describe_positions(self) -> EmbeddingSpec | None:
        """The table, whole on every rank: it is small, and so its rows need no collective."""
        first = self._traits.first_position
        if first is None:
            return None
        return EmbeddingSpec("model.embed_positions", Axis(self._config.max_position_embeddings + first), self._hidden)

    def _describe_projection(self, name: str, *, is_input: bool) -> LinearSpec | None:
        """The layer between token embeddings and hidden states of another size, whole on every rank."""
        size = self._traits.embedding_size
        if size in (None, self._config.hidden_size):
            return None
        inputs, outputs = (Axis(size), self._hidden) if is_input else (self._hidden, Axis(size))
        return LinearSpec(
            name=name,
            inputs=inputs,
            outputs=outputs,
            group=MemoryGroup.EMBEDDING,
            is_quantizable=False,
            is_adaptable=False,
        )

    def _describe_layer(self, layer: int) -> LayerSpec:
        path, traits = f"model.layers.{layer}", self._traits
        normalizes_before, normalizes_after = traits.norms != "after", traits.norms != "before"
        # Checkpoints call the norm behind attention so, whether it is of what attention adds or of what follows.
        after_attention = self._norm(f"{path}.post_attention_layernorm")
        before_mlp = self._norm(f"{path}.pre_feedforward_layernorm") if normalizes_after else after_attention
        return LayerSpec(
            input_norm=self._norm(f"{path}.input_layernorm") if normalizes_before else None,
            attention=self._describe_attention(f"{path}.self_attn", layer),
            post_attention_norm=before_mlp if normalizes_before and not traits.shares_norm else None,
            mlp=self._describe_mlp(f"{path}.mlp"),
            attention_output_norm=after_attention if normalizes_after else None,
            mlp_output_norm=self._norm(f"{path}.post_feedforward_layernorm") if normalizes_after else None,
            residual_multiplier=traits.residual_multiplier,
            residual=traits.residual,
        )

    def _describe_attention(self, path: str, layer: int) -> AttentionSpec:
        config, traits = self._config, self._traits
        counts = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        query_heads, kv_heads = ByHeads("query", *counts), ByHeads("kv", *counts)
        queries = Axis(config.num_attention_heads * config.head_dim, query_heads)
        keys = Axis(config.num_key_value_heads * config.head_dim, kv_heads)
        outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        num_parts = config.num_attention_heads if traits.stores_qkv_by_head else 1
        slices = _slice_stored(path, traits.stored_qkv, outputs, num_parts)
        return AttentionSpec(
            projections=tuple(
                LinearSpec(
                    name=f"{path}.{name}",
                    inputs=self._hidden,
                    outputs=axis,
                    group=MemoryGroup.ATTENTION,
                    has_bias=traits.qkv_bias,
                    slices=slices(name),
                )
                for name, axis in outputs.items()
            ),
            output=LinearSpec(
                name=f"{path}.o_proj",
                inputs=queries,
                outputs=self._hidden,
                group=MemoryGroup.ATTENTION,
                has_bias=traits.output_bias,
            ),
            query_norm=self._head_norm(f"{path}.q_norm", queries),
            key_norm=self._head_norm(f"{path}.k_norm", keys),
            state=StateSpec(layer=layer, heads=kv_heads, window=self._window(layer)),
            rope=self._rope(layer),
            scale=traits.attention_scale,
            soft_cap=traits.attention_soft_cap,
            pairs_neighbours=traits.pairs_neighbours,
            has_slopes=traits.has_slopes,
        )

    def _window(self, layer: int) -> int | None:
        return self._traits.windows[layer] if self._traits.windows else None

    def _rope(self, layer: int) -> str | None:
        traits = self._traits
        if isinstance(self._config.rope, NoRope) or (traits.rotated_layers and not traits.rotated_layers[layer]):
            return None
        return _ROPE if traits.local_rope is None or self._window(layer) is None else _LOCAL_ROPE

    def _describe_mlp(self, path: str) -> MlpSpec:
        intermediate = Axis(self._config.intermediate_size, Evenly(), "intermediate_size")
        slices = _slice_stored(path, self._traits.stored_gate_up, dict.fromkeys(("gate_proj", "up_proj"), intermediate))

        def linear(name: str, inputs: Axis, outputs: Axis) -> LinearSpec:
            return LinearSpec(
                name=f"{path}.{name}",
                inputs=inputs,
                outputs=outputs,
                group=MemoryGroup.MLP,
                has_bias=self._traits.mlp_bias,
                slices=slices(name),
            )

        return MlpSpec(
            act=self._config.hidden_act,
            gate=linear("gate_proj", self._hidden, intermediate) if self._traits.is_gated else None,
            up=linear("up_proj", self._hidden, intermediate),
            down=linear("down_proj", intermediate, self._hidden),
        )

    def _norm(self, name: str, axis: Axis | None = None) -> NormSpec:
        traits = self._traits
        return NormSpec(
            name,
            axis or self._hidden,
            self._config.norm_eps,
            traits.norm_offset,
            traits.norms_round_last,
            is_centered=isinstance(self._config, LayerNormConfig),
            has_scale=traits.norm_scale,
            has_bias=traits.norm_bias,
        )

    def _head_norm(self, name: str, heads: Axis) -> NormSpec | None:
        if self._traits.normalizes_projections:
            return self._norm(name, heads)
        if self._traits.normalizes_each_head:
            assert isinstance(heads.division, ByHeads)
            division = replace(heads.division, head_dim=1)
            own = Axis(heads.length // self._config.head_dim, division)
            return replace(self._norm(name, Axis(self._config.head_dim)), heads=own)
        return self._norm(name, Axis(self._config.head_dim)) if self._traits.normalizes_heads else None


def _slice_stored(
    path: str, stored: str, outputs: dict[str, Axis], num_parts: int = 1
) -> Callable[[str], tuple[TensorSlice, ...]]:
    """For each module, its outputs in the module that stores several as one matrix; none if it is stored by itself.

    Args:
        num_parts: Into how many equal parts the matrix is divided, each with a part of every module's outputs.
    """
    slices: dict[str, list[TensorSlice]] = {}
    start = 0
    for _ in range(num_parts if stored else 0):
        for name, axis in outputs.items():
            length = axis.length // num_parts
            slices.setdefault(name, []).append(TensorSlice(f"{path}.{stored}", start, length))
            start += length

    def find(name: str) -> tuple[TensorSlice, ...]:
        return tuple(slices.get(name, ()))

    return find
