"""Builders of specs: a family puts its layers together with them, and they name modules as most checkpoints do.

They take the family's record, and options for what its models do otherwise; `at` is a layer's path. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from compiler_svc.models.decoder_config import CommonConfig, DecoderConfig, LayerNormConfig
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.divisions import Axis, ByHeads, Evenly
from compiler_svc.models.parameters import MemoryGroup
from compiler_svc.models.rope_config import RopeConfig, find_prompt_lengths
from compiler_svc.models.specs import (
    AttentionSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    LayerNormSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModuleSlice,
    NormSpec,
    OutputNormSpec,
    ParallelSpec,
    PostNormSpec,
    PreNormSpec,
    RmsNormSpec,
    RopeSpec,
)
from compiler_svc.models.state import StateSpec
from compiler_svc.models.storage import AS_DESCRIBED, Storage

#: Makes the norm of hidden states that has a path.
MakeNorm = Callable[[str], NormSpec]
#: Makes the norm of query or key heads that has a path; the axis holds all heads.
MakeHeadNorm = Callable[[str, Axis], NormSpec]

_EMBEDDING: Final = "model.embed_tokens"


def rms(
    config: DecoderConfig, name: str, axis: Axis | None = None, *, offset: float = 0.0, rounds_last: bool = False
) -> RmsNormSpec:
    """Root mean square normalization, of hidden states unless another axis is given."""
    return RmsNormSpec(name, axis or _hidden(config), config.rms_norm_eps, offset, rounds_last)


def layer_norm(
    config: LayerNormConfig, name: str, axis: Axis | None = None, *, has_scale: bool = True, has_bias: bool = True
) -> LayerNormSpec:
    """Layer normalization, of hidden states unless another axis is given."""
    return LayerNormSpec(name, axis or _hidden(config), config.layer_norm_eps, has_scale, has_bias)


def each_head(config: CommonConfig, make: MakeHeadNorm) -> MakeHeadNorm:
    """Normalizes each head by itself, with the same scales for all."""
    return lambda name, _: make(name, Axis(config.head_dim))


def own_scales(config: CommonConfig, make: Callable[[str, Axis], LayerNormSpec]) -> MakeHeadNorm:
    """Normalizes each head by itself, with scales of its own."""

    def make_own(name: str, heads: Axis) -> LayerNormSpec:
        assert isinstance(heads.division, ByHeads)
        own = Axis(heads.length // config.head_dim, replace(heads.division, head_dim=1))
        return replace(make(name, Axis(config.head_dim)), heads=own)

    return make_own


def rope(
    config: CommonConfig,
    name: str = "rope",
    kind: RopeConfig | None = None,
    *,
    rotary_dim: int | None = None,
    is_wide: bool = False,
) -> RopeSpec:
    """A rotary embedding that attention may name: the record's, of whole heads, unless it is said otherwise."""
    return RopeSpec(name, kind or config.rope, rotary_dim or config.head_dim, is_wide)


def attention(
    at: str,
    config: CommonConfig,
    layer: int,
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    head_norm: MakeHeadNorm | None = None,
    window: int | None = None,
    rope: str | None = "rope",
    pairs_neighbours: bool = False,
    has_slopes: bool = False,
    scale: float | None = None,
    soft_cap: float = 0.0,
    stored: str = "",
    stored_by_head: bool = False,
) -> AttentionSpec:
    """Attention of layer number `layer`.

    Args:
        bias: Whether its linear layers have biases; `output_bias` whether the last one has; None: as the others.
        head_norm: Of queries and keys, before they are rotated.
        window: How many positions up to its own a token attends to; None: all.
        rope: Name of the rotary embedding that `decoder` gets; None: heads are not rotated.
        stored: Module of the checkpoint that has queries, keys and values as one matrix; empty: three modules have.
        stored_by_head: Whether that matrix has query, key and value of one head after another.
    """
    path = f"{at}.self_attn"
    counts = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    query_heads, kv_heads = ByHeads("query", *counts), ByHeads("kv", *counts)
    queries = Axis(config.num_attention_heads * config.head_dim, query_heads)
    keys = Axis(config.num_key_value_heads * config.head_dim, kv_heads)
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    slices = _slice_stored(path, stored, outputs, config.num_attention_heads if stored_by_head else 1)
    return AttentionSpec(
        projections=tuple(
            LinearSpec(
                name=f"{path}.{name}",
                inputs=_hidden(config),
                outputs=axis,
                group=MemoryGroup.ATTENTION,
                has_bias=bias,
                slices=slices[name],
            )
            for name, axis in outputs.items()
        ),
        output=LinearSpec(
            name=f"{path}.o_proj",
            inputs=queries,
            outputs=_hidden(config),
            group=MemoryGroup.ATTENTION,
            has_bias=bias if output_bias is None else output_bias,
        ),
        query_norm=head_norm and head_norm(f"{path}.q_norm", queries),
        key_norm=head_norm and head_norm(f"{path}.k_norm", keys),
        state=StateSpec(layer=layer, heads=kv_heads, window=window),
        rope=rope,
        scale=scale,
        soft_cap=soft_cap,
        pairs_neighbours=pairs_neighbours,
        has_slopes=has_slopes,
    )


def gated(at: str, config: CommonConfig, *, bias: bool = False, stored: str = "") -> MlpSpec:
    """An MLP with a gate; `stored` is the module of the checkpoint that has gate and up as one matrix, if one has."""
    path, hidden, intermediate = f"{at}.mlp", _hidden(config), _intermediate(config)
    slices = _slice_stored(path, stored, dict.fromkeys(("gate_proj", "up_proj"), intermediate))
    gate, up = (_mlp_linear(f"{path}.{name}", hidden, intermediate, bias, own) for name, own in slices.items())
    down = _mlp_linear(f"{path}.down_proj", intermediate, hidden, bias)
    return MlpSpec(act=config.hidden_act, gate=gate, up=up, down=down)


def plain(at: str, config: CommonConfig, *, bias: bool = False) -> MlpSpec:
    """An MLP without a gate."""
    hidden, intermediate = _hidden(config), _intermediate(config)
    up = _mlp_linear(f"{at}.mlp.up_proj", hidden, intermediate, bias)
    down = _mlp_linear(f"{at}.mlp.down_proj", intermediate, hidden, bias)
    return MlpSpec(act=config.hidden_act, gate=None, up=up, down=down)


def pre_norm(
    at: str, norm: MakeNorm, attention: AttentionSpec, feed_forward: FeedForwardSpec, *, multiplier: float = 1.0
) -> PreNormSpec:
    """A layer that normalizes what attention and feed-forward take, and multiplies what they add."""
    return PreNormSpec(
        attention=attention,
        feed_forward=feed_forward,
        attention_norm=norm(f"{at}.input_layernorm"),
        feed_forward_norm=norm(f"{at}.post_attention_layernorm"),
        multiplier=multiplier,
    )


def output_norm(at: str, norm: MakeNorm, attention: AttentionSpec, feed_forward: FeedForwardSpec) -> OutputNormSpec:
    """A layer that normalizes what attention and feed-forward add."""
    return OutputNormSpec(
        attention=attention,
        feed_forward=feed_forward,
        attention_norm=None,
        feed_forward_norm=None,
        # Of what attention adds here, of what the feed-forward takes elsewhere: checkpoints have one name for both.
        attention_output_norm=norm(f"{at}.post_attention_layernorm"),
        feed_forward_output_norm=norm(f"{at}.post_feedforward_layernorm"),
    )


def sandwich(at: str, norm: MakeNorm, attention: AttentionSpec, feed_forward: FeedForwardSpec) -> OutputNormSpec:
    """A layer that normalizes what attention and feed-forward take, and what they add."""
    return replace(
        output_norm(at, norm, attention, feed_forward),
        attention_norm=norm(f"{at}.input_layernorm"),
        feed_forward_norm=norm(f"{at}.pre_feedforward_layernorm"),
    )


def post_norm(at: str, norm: MakeNorm, attention: AttentionSpec, feed_forward: FeedForwardSpec) -> PostNormSpec:
    """A layer that normalizes the sums."""
    return PostNormSpec(
        attention=attention,
        feed_forward=feed_forward,
        attention_norm=norm(f"{at}.input_layernorm"),
        feed_forward_norm=norm(f"{at}.post_attention_layernorm"),
    )


def parallel(
    at: str, norm: MakeNorm, attention: AttentionSpec, feed_forward: FeedForwardSpec, *, shares_norm: bool = False
) -> ParallelSpec:
    """A layer whose attention and feed-forward both take its input, normalized for each or once for both."""
    return ParallelSpec(
        attention=attention,
        feed_forward=feed_forward,
        attention_norm=norm(f"{at}.input_layernorm"),
        feed_forward_norm=None if shares_norm else norm(f"{at}.post_attention_layernorm"),
    )


def embedding(
    config: CommonConfig, *, size: int | None = None, multiplier: float = 1.0, rounds_multiplier: bool = False
) -> EmbeddingSpec:
    """The embedding of tokens: of the hidden size, or of another one, which then needs projections."""
    hidden = Axis(size or config.hidden_size, Evenly(), "hidden_size")
    return EmbeddingSpec(_EMBEDDING, Axis(config.vocab_size), hidden, multiplier, rounds_multiplier)


def decoder(
    config: CommonConfig,
    make_layer: Callable[[str, int], LayerSpec],
    *,
    norm: MakeNorm | None,
    token_embedding: EmbeddingSpec | None = None,
    embedding_norm: MakeNorm | None = None,
    first_position: int | None = None,
    ropes: Sequence[RopeSpec] | None = None,
    head_bias: bool = False,
    logits_divisor: float = 1.0,
    logit_soft_cap: float = 0.0,
    storage: Storage = AS_DESCRIBED,
) -> ModelDescription:
    """A decoder-only model. Options that `ModelDescription` has too mean what they mean there.

    `norm` makes the norm of the last hidden state; None: it is not normalized. `first_position` is the row of the first
    position in a table of learned positions, if there is one.
    """
    tokens = token_embedding or embedding(config)
    size, hidden = tokens.hidden.length, _hidden(config)
    layers = tuple(make_layer(f"model.layers.{number}", number) for number in range(config.num_hidden_layers))
    usable = tuple(ropes or (rope(config),))
    named = {layer.attention.rope for layer in layers} - {None}
    assert named <= {one.name for one in usable}, f"layers name ropes that the model does not have: {named}"
    projects = size != config.hidden_size
    return ModelDescription(
        architecture=config.architecture,
        numeric_config=config.to_json(),
        max_position_embeddings=config.max_position_embeddings,
        embedding=tokens,
        embedding_norm=embedding_norm and embedding_norm("model.embed_norm"),
        # The table is whole on every rank: it is small, and so its rows need no collective.
        positions=None
        if first_position is None
        else EmbeddingSpec("model.embed_positions", Axis(config.max_position_embeddings + first_position), hidden),
        first_position=first_position or 0,
        input_projection=_projection("model.project_in", Axis(size), hidden) if projects else None,
        layers=layers,
        norm=norm and norm("model.norm"),
        output_projection=_projection("model.project_out", hidden, Axis(size)) if projects else None,
        head=LinearSpec(
            name="lm_head",
            inputs=Axis(size, attribute="hidden_size"),
            outputs=Axis(config.vocab_size, Evenly(), "vocab_size"),
            group=MemoryGroup.LM_HEAD,
            has_bias=head_bias,
            slices=(ModuleSlice(_EMBEDDING, 0, config.vocab_size),) if config.tie_word_embeddings else (),
            is_adaptable=False,
        ),
        is_tied=config.tie_word_embeddings,
        ropes=tuple(one for one in usable if one.name in named),
        # Also if no layer rotates: the input is part of the graph ABI.
        prompt_lengths=find_prompt_lengths(config.rope),
        logits_divisor=logits_divisor,
        logit_soft_cap=logit_soft_cap,
        storage=storage,
    )


def _hidden(config: CommonConfig) -> Axis:
    """Divided in the embedding alone: layers take and give all of it."""
    return Axis(config.hidden_size, attribute="hidden_size")


def _intermediate(config: CommonConfig) -> Axis:
    return Axis(config.intermediate_size, Evenly(), "intermediate_size")


def _mlp_linear(name: str, inputs: Axis, outputs: Axis, bias: bool, slices: tuple[ModuleSlice, ...] = ()) -> LinearSpec:
    return LinearSpec(name=name, inputs=inputs, outputs=outputs, group=MemoryGroup.MLP, has_bias=bias, slices=slices)


def _projection(name: str, inputs: Axis, outputs: Axis) -> LinearSpec:
    """Between token embeddings and hidden states of another size, whole on every rank."""
    return LinearSpec(
        name=name,
        inputs=inputs,
        outputs=outputs,
        group=MemoryGroup.EMBEDDING,
        is_quantizable=False,
        is_adaptable=False,
    )


def _slice_stored(
    path: str, stored: str, outputs: dict[str, Axis], num_parts: int = 1
) -> dict[str, tuple[ModuleSlice, ...]]:
    """Each module's outputs in `stored`, a matrix of `num_parts` equal parts that each have some of every module."""
    slices: dict[str, tuple[ModuleSlice, ...]] = dict.fromkeys(outputs, ())
    start = 0
    for _ in range(num_parts if stored else 0):
        for name, axis in outputs.items():
            length = axis.length // num_parts
            slices[name] += (ModuleSlice(f"{path}.{stored}", start, length),)
            start += length
    return slices
