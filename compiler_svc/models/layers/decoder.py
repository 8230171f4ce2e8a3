"""Causal language models: tokens and KV cache in, logits and KV cache out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from bundle.abi.outputs import MAX_PROMPT_CANDIDATES
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.layers.attention import Attention, KvCache
from compiler_svc.models.layers.linear import Embedding, Linear, cast
from compiler_svc.models.layers.logits import RankLogits
from compiler_svc.models.layers.mlp import make_feed_forward
from compiler_svc.models.layers.norm import make_norm
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.layers.rope import RotaryEmbedding
from compiler_svc.models.layers.step import StepKind, StepTokens
from compiler_svc.models.parameters import RANK_PARAMETER
from compiler_svc.models.size_limits import MAX_TOLD_LOGITS
from compiler_svc.models.specs import (
    LayerSpec,
    LinearSpec,
    OutputNormSpec,
    ParallelSpec,
    PostNormSpec,
    PreNormSpec,
)
from execution.dtypes import TORCH_DTYPES

State = Sequence[Tensor]
Rotation = tuple[Tensor, Tensor]


class PreNormLayer(nn.Module):
    """See `PreNormSpec`."""

    def __init__(self, spec: PreNormSpec, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = make_norm(spec.attention_norm, ranks)
        self.self_attn = Attention(spec.attention, ranks)
        self.post_attention_layernorm = make_norm(spec.feed_forward_norm, ranks)
        self.mlp = make_feed_forward(spec.feed_forward, ranks)
        self.multiplier = spec.multiplier

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, cache: KvCache, tokens: StepTokens
    ) -> tuple[Tensor, KvCache]:
        """See `Attention.forward`."""
        attended, cache = self.self_attn(self.input_layernorm(hidden), rotation, cache, tokens)
        hidden = hidden + self._multiply(attended)
        return hidden + self._multiply(self.mlp(self.post_attention_layernorm(hidden), tokens)), cache

    def _multiply(self, added: Tensor) -> Tensor:
        """One adds no operation to the graph."""
        return added if self.multiplier == 1.0 else added * self.multiplier


class OutputNormLayer(nn.Module):
    """See `OutputNormSpec`."""

    def __init__(self, spec: OutputNormSpec, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = make_norm(spec.attention_norm, ranks)
        self.self_attn = Attention(spec.attention, ranks)
        self.post_attention_layernorm = make_norm(spec.attention_output_norm, ranks)
        self.pre_feedforward_layernorm = make_norm(spec.feed_forward_norm, ranks)
        self.mlp = make_feed_forward(spec.feed_forward, ranks)
        self.post_feedforward_layernorm = make_norm(spec.feed_forward_output_norm, ranks)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, cache: KvCache, tokens: StepTokens
    ) -> tuple[Tensor, KvCache]:
        """See `Attention.forward`."""
        attended, cache = self.self_attn(self.input_layernorm(hidden), rotation, cache, tokens)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden), tokens)
        return hidden + self.post_feedforward_layernorm(fed_forward), cache


class PostNormLayer(nn.Module):
    """See `PostNormSpec`."""

    def __init__(self, spec: PostNormSpec, ranks: Ranks) -> None:
        super().__init__()
        self.self_attn = Attention(spec.attention, ranks)
        self.input_layernorm = make_norm(spec.attention_norm, ranks)
        self.mlp = make_feed_forward(spec.feed_forward, ranks)
        self.post_attention_layernorm = make_norm(spec.feed_forward_norm, ranks)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, cache: KvCache, tokens: StepTokens
    ) -> tuple[Tensor, KvCache]:
        """See `Attention.forward`."""
        attended, cache = self.self_attn(hidden, rotation, cache, tokens)
        hidden = self.input_layernorm(hidden + attended)
        return self.post_attention_layernorm(hidden + self.mlp(hidden, tokens)), cache


class ParallelLayer(nn.Module):
    """See `ParallelSpec`."""

    def __init__(self, spec: ParallelSpec, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = make_norm(spec.attention_norm, ranks)
        self.self_attn = Attention(spec.attention, ranks)
        norm = spec.feed_forward_norm
        self.post_attention_layernorm = None if norm is None else make_norm(norm, ranks)
        self.mlp = make_feed_forward(spec.feed_forward, ranks)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, cache: KvCache, tokens: StepTokens
    ) -> tuple[Tensor, KvCache]:
        """See `Attention.forward`."""
        normed = self.input_layernorm(hidden)
        attended, cache = self.self_attn(normed, rotation, cache, tokens)
        taken = normed if self.post_attention_layernorm is None else self.post_attention_layernorm(hidden)
        return hidden + attended + self.mlp(taken, tokens), cache


_MODULES: Final[Mapping[type[LayerSpec], Callable[[Any, Ranks], nn.Module]]] = {
    PreNormSpec: PreNormLayer,
    OutputNormSpec: OutputNormLayer,
    PostNormSpec: PostNormLayer,
    ParallelSpec: ParallelLayer,
}


def make_layer(spec: LayerSpec, ranks: Ranks) -> nn.Module:
    """Makes the module of a layer."""
    return _MODULES[type(spec)](spec, ranks)


#: Builds a layer; called as `make_layer` is.
MakeLayer = Callable[[LayerSpec, Ranks], nn.Module]


class CausalLm(nn.Module):
    """One rank of a causal language model. Parameters bear the names of the shard's tensors.

    State is k_cache and v_cache of layer 0, of layer 1, …; see `attention.KvCache`.
    """

    def __init__(
        self, description: ModelDescription, *, dtype: torch.dtype, ranks: Ranks, make_layer: MakeLayer = make_layer
    ) -> None:
        super().__init__()
        self.dtype = dtype
        attention = description.states[0].dtype
        self.attention_dtype = dtype if attention is None else TORCH_DTYPES[attention]
        self.ranks = ranks
        self.vocab_size = description.vocab_size
        self.model = _Decoder(description, make_layer, ranks)
        self.rope_names = tuple(layer.attention.rope for layer in description.layers)
        for rope in description.ropes:
            self.add_module(rope.name, RotaryEmbedding(rope))
        self.logits_divisor, self.logit_soft_cap = description.logits_divisor, description.logit_soft_cap
        self.lm_head = None if description.shares_table(ranks.tp_degree) else Linear(description.head, ranks)
        self.rank_util = _RankUtil() if ranks.tp_degree > 1 else None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, *, state: State, kind: StepKind, **where: Tensor
    ) -> tuple[RankLogits, list[Tensor]]:
        """Runs one step: R rows of T tokens, ids and positions int32 [rows, tokens]; see `bundle.abi`.

        `where` has the inputs that say where the tokens are, and which adapters change them, by name; see
        `StepTokens.of_inputs`. Returns the logits after each row's last token, and the new state.
        """
        hidden, tokens, new_state = self._run(input_ids, position_ids, state, kind, where)
        return self._logits(self._normalize(tokens.take_last(hidden))), new_state

    def read_prompts(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        state: State,
        kind: StepKind,
        next_ids: Tensor | None = None,
        **where: Tensor,
    ) -> tuple[RankLogits, list[Tensor], dict[str, Tensor]]:
        """Runs one step as `forward` does; returns also what `bundle.abi.outputs` says of prompts, by name: hidden
        states, and log probabilities if the step has `next_ids`, int32 [rows, tokens].
        """
        hidden, tokens, new_state = self._run(input_ids, position_ids, state, kind, where)
        normed = self._normalize(hidden)
        last, wide = tokens.take_last(normed), cast(normed, torch.float32)
        # Of padding, code that skips it leaves any numbers.
        is_token = (tokens.positions >= 0)[:, :, None]
        said = {
            "last_hidden": cast(last, torch.float32),
            "hidden_sum": torch.where(is_token, wide, 0.0).sum(dim=1),
        }
        if next_ids is not None:
            said |= self._tell(normed, next_ids)
        return self._logits(last), new_state, said

    def _tell(self, normed: Tensor, next_ids: Tensor) -> dict[str, Tensor]:
        """Tells how likely tokens of prompts are, a few positions at a time: their logits would fill the memory."""
        rows, width = next_ids.shape
        count = min(MAX_PROMPT_CANDIDATES, self.vocab_size)
        size = max(1, MAX_TOLD_LOGITS // (rows * self.vocab_size))
        pieces = []
        for start in range(0, width, size):
            ids = next_ids[:, start : start + size]
            logits = self._logits(normed[:, start : start + size])
            logits = replace(logits, part=logits.part.flatten(0, 1))
            top, top_ids = logits.tell_likeliest(count)
            pieces.append(
                (
                    logits.tell(ids.flatten()).view(ids.shape),
                    top_ids.view(*ids.shape, count),
                    top.view(*ids.shape, count),
                )
            )
        names = ("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs")
        return {name: torch.cat(parts, dim=1) for name, parts in zip(names, zip(*pieces, strict=True), strict=True)}

    def _run(
        self, input_ids: Tensor, position_ids: Tensor, state: State, kind: StepKind, where: Mapping[str, Tensor]
    ) -> tuple[Tensor, StepTokens, list[Tensor]]:
        """Runs the layers; returns their last hidden state [rows, tokens, hidden_size], the tokens, the new state."""
        tokens = StepTokens.of_inputs(kind, state[0], position_ids, **where)
        rotations = {
            name: self.get_submodule(name)(tokens.positions, tokens.lengths, self.attention_dtype)
            for name in dict.fromkeys(self.rope_names)
            if name is not None
        }
        hidden = self.model.embed(input_ids, tokens.positions, self.dtype, self._rank)
        new_state: list[Tensor] = []
        for layer, rope, keys, values in zip(self.model.layers, self.rope_names, state[::2], state[1::2], strict=True):
            rotation = None if rope is None else rotations[rope]
            hidden, cache = layer(hidden, rotation, KvCache(keys, values), tokens)
            new_state += [cache.keys, cache.values]
        return hidden, tokens, new_state

    def _normalize(self, hidden: Tensor) -> Tensor:
        """What the head takes."""
        normed: Tensor = self.model.project_out(self.model.norm(hidden))
        return normed

    def _logits(self, normed: Tensor) -> RankLogits:
        if self.lm_head is None:
            part = nn.functional.linear(normed, cast(self.model.embed_tokens.weight, normed.dtype))
        else:
            part = self.lm_head(normed)
        part = part if self.logits_divisor == 1.0 else part / self.logits_divisor
        if self.logit_soft_cap:
            part = torch.tanh(part / self.logit_soft_cap) * self.logit_soft_cap
        return RankLogits(part=part, rank=self._rank, vocab_size=self.vocab_size, ranks=self.ranks)

    @property
    def _rank(self) -> Tensor | None:
        return None if self.rank_util is None else self.rank_util.rank


class _RankUtil(nn.Module):
    """Tells a rank which one it is: int32 [1], from its shard, so that one graph serves all."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.zeros(RANK_PARAMETER.shape, dtype=torch.int32), requires_grad=False)


class _Decoder(nn.Module):
    """Holds the parameters that checkpoints keep under `model.`."""

    def __init__(self, description: ModelDescription, make_layer: MakeLayer, ranks: Ranks) -> None:
        super().__init__()
        self.embed_tokens = Embedding(description.embedding, ranks)
        self.layers = nn.ModuleList(make_layer(spec, ranks) for spec in description.layers)
        self.norm = make_norm(description.norm, ranks)
        self.embed_norm = make_norm(description.embedding_norm, ranks)
        self.embed_positions = None if description.positions is None else Embedding(description.positions, ranks)
        self.first_position = description.first_position
        self.project_in = _make_projection(description.input_projection, ranks)
        self.project_out = _make_projection(description.output_projection, ranks)

    def embed(self, input_ids: Tensor, positions: Tensor, dtype: torch.dtype, rank: Tensor | None) -> Tensor:
        """The first hidden state, [rows, tokens, hidden_size]; positions are negative where there is no token."""
        hidden: Tensor = self.project_in(self.embed_norm(self.embed_tokens(input_ids, dtype, rank)))
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions.clamp(min=0) + self.first_position, dtype)
        return hidden


def _make_projection(spec: LinearSpec | None, ranks: Ranks) -> nn.Module:
    return nn.Identity() if spec is None else Linear(spec, ranks)
