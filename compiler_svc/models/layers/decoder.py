"""Causal language models: tokens and KV cache in, logits and KV cache out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from compiler_svc.models.description import RANK_PARAMETER, LayerSpec, ModelDescription
from compiler_svc.models.layers.attention import Attention, CacheStep, KvCache, mask_cache, mask_prompt
from compiler_svc.models.layers.linear import Embedding, Linear, cast
from compiler_svc.models.layers.logits import RankLogits
from compiler_svc.models.layers.mlp import GatedMlp
from compiler_svc.models.layers.norm import RmsNorm
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.layers.rope import RotaryEmbedding

State = Sequence[Tensor]


class PreNormLayer(nn.Module):
    """Attention and feed-forward, each normalized before and added after."""

    def __init__(self, spec: LayerSpec, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(spec.input_norm, ranks)
        self.self_attn = Attention(spec.attention, ranks)
        self.post_attention_layernorm = RmsNorm(spec.post_attention_norm, ranks)
        self.mlp = GatedMlp(spec.mlp, ranks)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: KvCache, step: CacheStep
    ) -> tuple[Tensor, KvCache]:
        """See `Attention.forward`."""
        attended, cache = self.self_attn(self.input_layernorm(hidden), rotation, cache, step)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache


#: Builds a layer; called as `PreNormLayer` is.
MakeLayer = Callable[[LayerSpec, Ranks], nn.Module]


class CausalLm(nn.Module):
    """One rank of a causal language model. Parameters bear the names of the shard's tensors.

    State is k_cache and v_cache of layer 0, of layer 1, …; each [num_slots + 1, kv_heads, max_length, head_dim].
    """

    def __init__(
        self, description: ModelDescription, *, make_layer: MakeLayer, dtype: torch.dtype, ranks: Ranks
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.ranks = ranks
        self.vocab_size = description.vocab_size
        self._windows = tuple(state.window for state in description.states)
        self.model = _Decoder(description, make_layer, ranks)
        self.rope = RotaryEmbedding(description.rope)
        self.lm_head = None if description.shares_table(ranks.tp_degree) else Linear(description.head, ranks)
        self.rank_util = _RankUtil() if ranks.tp_degree > 1 else None

    def encode_context(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        seq_ids: Tensor,
        num_tokens: Tensor,
        state: State,
        *,
        padding_side: Literal["right", "left"] = "right",
    ) -> tuple[RankLogits, list[Tensor]]:
        """Runs prompts; see context_encoding in `bundle.abi`.

        Args:
            padding_side: Where rows are padded. On the right no mask is needed: no token looks ahead.

        Returns:
            Logits after each row's last valid token, and the new state.
        """
        width, device = input_ids.shape[1], input_ids.device
        rows = torch.arange(input_ids.shape[0], dtype=torch.int32, device=device)
        columns = torch.arange(width, dtype=torch.int32, device=device)
        if padding_side == "right":
            last = (num_tokens - 1).clamp(min=0)
            is_valid = columns < num_tokens[:, None]
        else:
            last = torch.full_like(num_tokens, width - 1)
            is_valid = columns >= width - num_tokens[:, None]
        # Padding goes to position 0 of the scratch row, whatever positions it claims.
        scratch = state[0].shape[0] - 1
        positions = torch.where(is_valid, position_ids, 0)
        slots = torch.where(is_valid, seq_ids[:, None], scratch)
        padded = is_valid if padding_side == "left" else None
        steps = {
            window: CacheStep(slots, positions, mask_prompt(positions, padded, window), reads_cache=False)
            for window in dict.fromkeys(self._windows)
        }
        hidden, new_state = self._decode(input_ids, positions, positions[rows, last] + 1, steps, state)
        return self._logits(hidden[rows, last]), new_state

    def generate_token(
        self, input_ids: Tensor, position_ids: Tensor, seq_ids: Tensor, state: State, *, bucket: int
    ) -> tuple[RankLogits, list[Tensor]]:
        """Runs one token a row; see token_generation in `bundle.abi`.

        Args:
            bucket: Positions that are read.

        Returns:
            Logits of each row's next token, and the new state.
        """
        steps = {
            window: CacheStep(
                seq_ids[:, None], position_ids, mask_cache(position_ids, bucket, window), reads_cache=True
            )
            for window in dict.fromkeys(self._windows)
        }
        hidden, new_state = self._decode(input_ids, position_ids, position_ids.squeeze(1) + 1, steps, state)
        return self._logits(hidden.squeeze(1)), new_state

    def _decode(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lengths: Tensor,
        steps: Mapping[int | None, CacheStep],
        state: State,
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs all layers; `steps` has the step of each attention window."""
        rotation = self.rope(positions, lengths, self.dtype)
        hidden = self.model.embed_tokens(input_ids, self.dtype)
        new_state: list[Tensor] = []
        for index, (layer, window) in enumerate(zip(self.model.layers, self._windows, strict=True)):
            cache = KvCache(state[2 * index], state[2 * index + 1])
            hidden, cache = layer(hidden, rotation, cache, steps[window])
            new_state += [cache.keys, cache.values]
        return hidden, new_state

    def _logits(self, hidden: Tensor) -> RankLogits:
        normed = self.model.norm(hidden)
        if self.lm_head is None:
            part = nn.functional.linear(normed, cast(self.model.embed_tokens.weight, normed.dtype))
        else:
            part = self.lm_head(normed)
        rank = None if self.rank_util is None else self.rank_util.rank
        return RankLogits(part=part, rank=rank, vocab_size=self.vocab_size, ranks=self.ranks)


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
        self.norm = RmsNorm(description.norm, ranks)
