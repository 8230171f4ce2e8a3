"""Llama 2, 3 and 3.x: tokens and KV cache in, logits and KV cache out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from compiler_svc.models.attention import Attention, CacheStep, KvCache, mask_left_padding
from compiler_svc.models.collectives import Ranks
from compiler_svc.models.layers import ColumnParallelLinear, Embedding, GatedMlp, RmsNorm, cast
from compiler_svc.models.llama_config import LlamaConfig
from compiler_svc.models.logits import RankLogits
from compiler_svc.models.rope import RotaryEmbedding

State = Sequence[Tensor]


class LlamaForCausalLM(nn.Module):
    """One rank of a Llama model. Parameters bear the names of the shard's tensors, which are the checkpoint's.

    State is k_cache and v_cache of layer 0, of layer 1, …; each [num_slots + 1, kv_heads, max_length, head_dim].
    """

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        self.dtype = dtype
        self.ranks = ranks
        self.vocab_size = config.vocab_size
        self.model = _Decoder(config, ranks)
        self.rope = RotaryEmbedding(config.rope, config.head_dim)
        # At tp 1 a tied head is the embedding; otherwise the two are cut differently.
        self.lm_head = (
            None
            if config.tie_word_embeddings and ranks.tp_degree == 1
            else ColumnParallelLinear(config.hidden_size, ranks.share(config.vocab_size), bias=False)
        )
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
        width, prompt_mask = input_ids.shape[1], None
        if padding_side == "right":
            rows, last = torch.arange(input_ids.shape[0]), (num_tokens - 1).clamp(min=0)
            is_valid = torch.arange(width, dtype=torch.int32) < num_tokens[:, None]
        else:
            rows, last = torch.arange(input_ids.shape[0]), torch.full_like(num_tokens, width - 1)
            is_valid = torch.arange(width, dtype=torch.int32) >= width - num_tokens[:, None]
            prompt_mask = mask_left_padding(is_valid)
        # Padding goes to position 0 of the scratch row, whatever positions it claims.
        scratch = state[0].shape[0] - 1
        positions = torch.where(is_valid, position_ids, 0)
        slots = torch.where(is_valid, seq_ids[:, None], scratch)
        step = CacheStep(slots=slots, positions=positions, mask=None, prompt_mask=prompt_mask)
        hidden, new_state = self._decode(input_ids, positions[rows, last] + 1, step, state)
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
        mask = torch.arange(bucket, dtype=torch.int32) <= position_ids
        step = CacheStep(slots=seq_ids[:, None], positions=position_ids, mask=mask[:, None, None])
        hidden, new_state = self._decode(input_ids, position_ids.squeeze(1) + 1, step, state)
        return self._logits(hidden.squeeze(1)), new_state

    def _decode(self, input_ids: Tensor, lengths: Tensor, step: CacheStep, state: State) -> tuple[Tensor, list[Tensor]]:
        rotation = self.rope(step.positions, lengths, self.dtype)
        hidden = self.model.embed_tokens(input_ids, self.dtype)
        new_state: list[Tensor] = []
        for index, layer in enumerate(self.model.layers):
            hidden, cache = layer(hidden, rotation, KvCache(state[2 * index], state[2 * index + 1]), step)
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
        self.rank = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)


class _Decoder(nn.Module):
    """Holds the parameters that checkpoints keep under `model.`."""

    def __init__(self, config: LlamaConfig, ranks: Ranks) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ranks=ranks)
        self.layers = nn.ModuleList(_Layer(config, ranks) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)


class _Layer(nn.Module):
    """Attention and feed-forward, each normalized before and added after."""

    def __init__(self, config: LlamaConfig, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, ranks)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(
            config.hidden_size,
            config.intermediate_size,
            act=config.hidden_act,
            bias=config.mlp_bias,
            ranks=ranks,
        )

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: KvCache, step: CacheStep
    ) -> tuple[Tensor, KvCache]:
        attended, cache = self.self_attn(self.input_layernorm(hidden), rotation, cache, step)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache
