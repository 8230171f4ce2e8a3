"""Grouped-query attention over a functional KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from compiler_svc.models.description import AttentionSpec
from compiler_svc.models.layers.linear import Linear
from compiler_svc.models.layers.norm import RmsNorm
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.layers.rope import rotate


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
        mask: What tokens attend to. If the step reads the cache: bool [rows, 1, 1, bucket], the positions that the one
            token of row r attends to in slot r. Otherwise bool [rows, 1, tokens, tokens] or [tokens, tokens], the
            tokens of the step that each of them attends to; None: all up to itself.
        reads_cache: Whether tokens attend to the cache, or only to each other.
    """

    slots: Tensor
    positions: Tensor
    mask: Tensor | None
    reads_cache: bool

    def write(self, cache: Tensor, tokens: Tensor) -> Tensor:
        """A cache with `tokens` [rows, tokens, kv_heads, head_dim] written."""
        written: Tensor = torch.ops.aten.index_put.default(cache, [self.slots, None, self.positions], tokens)
        return written


class Attention(nn.Module):
    """Projections, rotation, cache and attention of one layer."""

    def __init__(self, spec: AttentionSpec, ranks: Ranks) -> None:
        super().__init__()
        layout = spec.heads.layout(ranks.tp_degree)
        self.head_dim = spec.heads.head_dim
        self.num_heads, self.num_kv_heads = layout.num_query_heads, layout.num_kv_heads
        self._projections = tuple(projection.module for projection in spec.projections)
        for projection in spec.projections:
            self.add_module(projection.module, Linear(projection, ranks))
        self.o_proj = Linear(spec.output, ranks)
        self.q_norm = None if spec.query_norm is None else RmsNorm(spec.query_norm, ranks)
        self.k_norm = None if spec.key_norm is None else RmsNorm(spec.key_norm, ranks)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: KvCache, step: CacheStep
    ) -> tuple[Tensor, KvCache]:
        """Attends, and writes the step's keys and values.

        Args:
            hidden: [rows, tokens, hidden_size].
            rotation: Cosines and sines, [rows, tokens, rotary_dim].
            cache: The layer's cache; left alone.
            step: Where the step's tokens go and what they attend to.

        Returns:
            [rows, tokens, hidden_size], and the new cache.
        """
        queries, keys, values = self._project(hidden)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
        written = KvCache(step.write(cache.keys, keys), step.write(cache.values, values))
        if step.reads_cache:
            assert step.mask is not None, "the cache holds positions that no token may attend to"
            attended = attend_cache(queries, written, step.mask)
        else:
            attended = attend_prompt(queries, keys, values, step.mask)
        return self.o_proj(attended.flatten(2)), written

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [rows, tokens, heads, head_dim], keys and values [rows, tokens, kv_heads, head_dim]."""
        projected = [self.get_submodule(name)(hidden) for name in self._projections]
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        if len(projected) == 1:
            projected = list(projected[0].split([count * self.head_dim for count in counts], dim=-1))
        queries, keys, values = (
            part.view(*part.shape[:-1], count, self.head_dim) for part, count in zip(projected, counts, strict=True)
        )
        return queries, keys, values


def attend_prompt(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention among the tokens of each row.

    Args:
        queries: [rows, tokens, heads, head_dim].
        keys: [rows, tokens, kv_heads, head_dim]; `values` as well.
        mask: bool [rows, 1, tokens, tokens] or [tokens, tokens]; None: causal.

    Returns:
        [rows, tokens, heads, head_dim].
    """
    queries, keys, values = (heads.transpose(1, 2) for heads in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return attended.transpose(1, 2)


def mask_prompt(positions: Tensor, is_valid: Tensor | None, window: int | None) -> Tensor | None:
    """What each token of a prompt attends to: valid tokens up to itself, within the window.

    Padding on the left attends to itself, so that every row of the softmax has something to weigh and nothing becomes
    NaN.

    Args:
        positions: int32 [rows, tokens]; its shape and device count.
        is_valid: bool [rows, tokens]: which tokens count, if rows are padded on the left; None if they are padded on
            the right, where no valid token attends to padding.
        window: How many tokens up to itself a token attends to; None: all.

    Returns:
        bool [rows, 1, tokens, tokens] or [tokens, tokens]; None: all tokens up to itself.
    """
    num_tokens = positions.shape[1]
    window = num_tokens if window is None else window
    if is_valid is None and window >= num_tokens:
        return None
    columns = torch.arange(num_tokens, dtype=torch.int32, device=positions.device)
    distance = columns[:, None] - columns[None, :]
    is_before = (distance > 0) & (distance < window) if window < num_tokens else distance > 0
    if is_valid is None:
        return is_before | (distance == 0)
    return ((is_before & is_valid[:, None]) | (distance == 0))[:, None]


def mask_cache(positions: Tensor, bucket: int, window: int | None) -> Tensor:
    """Which cached positions the one token of each row attends to.

    Args:
        positions: int32 [rows, 1], of the tokens.
        bucket: Positions that are read.
        window: See `mask_prompt`.

    Returns:
        bool [rows, 1, 1, bucket].
    """
    cached = torch.arange(bucket, dtype=torch.int32, device=positions.device)
    mask = cached <= positions
    if window is not None and window < bucket:
        mask = mask & (cached > positions - window)
    return mask[:, None, None]


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
