"""Grouped-query attention over a functional KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from compiler_svc.models.collectives import Ranks
from compiler_svc.models.head_layout import lay_out_heads
from compiler_svc.models.layers import ColumnParallelLinear, RowParallelLinear
from compiler_svc.models.llama_config import LlamaConfig
from compiler_svc.models.rope import rotate


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of one layer: [num_slots + 1, kv_heads, max_length, head_dim] each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class CacheStep:
    """How a step meets the cache.

    Attributes:
        slots: int32 [rows, tokens]: row of the cache that each token is written to.
        positions: int32 [rows, tokens]: position that each token is written to.
        mask: bool [rows, 1, 1, bucket]: positions that the one token of each row attends to, row r reading slot r.
            None: the step's tokens attend to each other, and the cache is not read.
        prompt_mask: bool [rows, 1, tokens, tokens]: tokens that each token attends to; None: those up to itself.
    """

    slots: Tensor
    positions: Tensor
    mask: Tensor | None
    prompt_mask: Tensor | None = None

    def write(self, cache: Tensor, tokens: Tensor) -> Tensor:
        """A cache with `tokens` [rows, tokens, kv_heads, head_dim] written."""
        written: Tensor = torch.ops.aten.index_put.default(cache, [self.slots, None, self.positions], tokens)
        return written


class Attention(nn.Module):
    """Projections, rotation, cache and attention of one layer."""

    def __init__(self, config: LlamaConfig, ranks: Ranks) -> None:
        super().__init__()
        layout = lay_out_heads(config.num_attention_heads, config.num_key_value_heads, ranks.tp_degree)
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = layout.num_query_heads, layout.num_kv_heads
        hidden, bias = config.hidden_size, config.attention_bias
        queries, keys = self.num_heads * config.head_dim, self.num_kv_heads * config.head_dim
        self.q_proj = ColumnParallelLinear(hidden, queries, bias=bias)
        self.k_proj = ColumnParallelLinear(hidden, keys, bias=bias)
        self.v_proj = ColumnParallelLinear(hidden, keys, bias=bias)
        self.o_proj = RowParallelLinear(queries, hidden, bias=bias, ranks=ranks)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: KvCache, step: CacheStep
    ) -> tuple[Tensor, KvCache]:
        """Attends, and writes the step's keys and values.

        Args:
            hidden: [rows, tokens, hidden_size].
            rotation: Cosines and sines, [rows, tokens, head_dim].
            cache: The layer's cache; left alone.
            step: Where the step's tokens go and what they attend to.

        Returns:
            [rows, tokens, hidden_size], and the new cache.
        """
        queries = rotate(self._heads(self.q_proj(hidden), self.num_heads), *rotation)
        keys = rotate(self._heads(self.k_proj(hidden), self.num_kv_heads), *rotation)
        values = self._heads(self.v_proj(hidden), self.num_kv_heads)
        written = KvCache(step.write(cache.keys, keys), step.write(cache.values, values))
        if step.mask is None:
            attended = attend_prompt(queries, keys, values, step.prompt_mask)
        else:
            attended = attend_cache(queries, written, step.mask)
        return self.o_proj(attended.flatten(2)), written

    def _heads(self, projected: Tensor, num_heads: int) -> Tensor:
        return projected.view(*projected.shape[:-1], num_heads, self.head_dim)


def attend_prompt(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention among the tokens of each row.

    Args:
        queries: [rows, tokens, heads, head_dim].
        keys: [rows, tokens, kv_heads, head_dim]; `values` as well.
        mask: bool [rows, 1, tokens, tokens]; None: causal.

    Returns:
        [rows, tokens, heads, head_dim].
    """
    queries, keys, values = (heads.transpose(1, 2) for heads in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return attended.transpose(1, 2)


def mask_left_padding(is_valid: Tensor) -> Tensor:
    """What the tokens of prompts that end their rows attend to: the valid ones up to themselves.

    Padding attends to itself, so that every row of the softmax has something to weigh and nothing becomes NaN.

    Args:
        is_valid: bool [rows, tokens].

    Returns:
        bool [rows, 1, tokens, tokens].
    """
    columns = torch.arange(is_valid.shape[1], dtype=torch.int32)
    is_before = columns[None, :] < columns[:, None]
    return ((is_before & is_valid[:, None]) | (columns[None, :] == columns[:, None]))[:, None]


def attend_cache(queries: Tensor, cache: KvCache, mask: Tensor) -> Tensor:
    """Attention of one token a row to cached positions; row r reads slot r.

    Heads of one KV head are laid side by side where tokens would be, so that keys and values are read once.

    Args:
        queries: [rows, 1, heads, head_dim].
        mask: bool [rows, 1, 1, bucket].

    Returns:
        [rows, 1, heads, head_dim].
    """
    rows, bucket = mask.shape[0], mask.shape[-1]
    keys, values = cache.keys[:rows, :, :bucket], cache.values[:rows, :, :bucket]
    grouped = queries.view(rows, keys.shape[1], -1, queries.shape[-1])
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return attended.reshape(queries.shape)
