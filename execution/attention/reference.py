"""Attention to cached keys and values, in torch: what `kiln::attend` means.

Every shape follows from the arguments' shapes, and every tensor is made on the arguments' device: graphs for XLA run
the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from bundle.abi.formats import ITEM_BOUNDS

#: The most scores of one head that are computed at once. In float32, 16 MiB.
MAX_SCORES: Final = 1 << 22


#: Of caches that keep bytes.
_BOUNDS: Final = {torch.int8: ITEM_BOUNDS["int8"], torch.float8_e4m3fn: ITEM_BOUNDS["float8_e4m3fn"]}


@dataclass(frozen=True, slots=True)
class Step:
    """The tensors of a step, in the order of the operator's arguments; see `execution.attention.operators`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    key_cache: Tensor
    value_cache: Tensor
    positions: Tensor
    block_table: Tensor
    sinks: Tensor | None
    slopes: Tensor | None
    tree_mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Options:
    """How the tokens of a step attend; the operator's arguments of the same names.

    Attributes:
        scale: Multiplies the products of queries and keys.
        window: How many positions, its own included, a token attends to; 0: all.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`; 0: they stay.
    """

    scale: float
    window: int
    soft_cap: float


def keep(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns keys or values as caches of a dtype hold them.

    Those of bytes hold no more than `ITEM_BOUNDS`: larger magnitudes become the largest, so that a graph gives the same
    numbers on every target. Items of int8 are the nearest, and even ones of two.
    """
    bounds = _BOUNDS.get(dtype)
    if bounds is None:
        return tokens.to(dtype)
    clipped = tokens.clamp(*bounds)
    return (clipped if dtype.is_floating_point else clipped.round()).to(dtype)


def write_tokens(cache: Tensor, tokens: Tensor, positions: Tensor, block_table: Tensor) -> Tensor:
    """Returns a cache with the step's tokens; those without a position change nothing.

    A row's blocks are a ring: the position after their last one lies in the first. No token lies at the last place of
    the last block. Shapes are the operator's, and the tokens may be of any float dtype.
    """
    block_tokens, last_block = cache.shape[2], cache.shape[0] - 1
    is_live = positions >= 0
    places = positions.clamp(min=0)
    entries = (places // block_tokens) % block_table.shape[1]
    blocks = torch.where(is_live, block_table.gather(1, entries), last_block)
    offsets = torch.where(is_live, places % block_tokens, block_tokens - 1)
    heads = torch.arange(cache.shape[1], dtype=torch.int32, device=cache.device)
    # What the last place holds is written there again for every token without a position.
    kept = cache[last_block, :, block_tokens - 1]
    tokens = torch.where(is_live[:, :, None, None], keep(tokens, cache.dtype), kept)
    # Without an index of heads, graphs for XLA would transpose the whole cache to bring the other two together.
    places_of_heads = [blocks[:, :, None], heads, offsets[:, :, None]]
    written: Tensor = torch.ops.aten.index_put.default(cache, places_of_heads, tokens)
    return written


@dataclass(frozen=True, slots=True)
class Context:
    """What the tokens of a step can attend to.

    Keys and values are float32 [rows, kv_heads, context, head_dim]. `positions` is int32 [rows, context]: the place in
    the sequence that each key belongs to; negative: to none.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor

    @classmethod
    def of_step(cls, keys: Tensor, values: Tensor, positions: Tensor, dtype: torch.dtype) -> Context:
        """The step's own keys and values [rows, tokens, kv_heads, head_dim], rounded to the caches' dtype."""
        is_live = (positions >= 0)[:, :, None, None]
        live = (torch.where(is_live, tokens, 0) for tokens in (keys, values))
        keys, values = (keep(tokens, dtype).transpose(1, 2).float() for tokens in live)
        return cls(keys, values, positions)

    @classmethod
    def of_cache(
        cls, key_cache: Tensor, value_cache: Tensor, positions: Tensor, block_table: Tensor, max_context: int
    ) -> Context:
        """The cache of each row, up to the row's last position."""
        block_tokens = key_cache.shape[2]
        ring = block_tokens * block_table.shape[1]
        length = min(max_context, ring)
        places = torch.arange(length, dtype=torch.int32, device=positions.device)
        last = positions.amax(1, keepdim=True)
        # The last position that lies at each place of the ring; where the row is shorter, none: a negative number.
        held = last - (last - places) % ring
        blocks = block_table[:, : -(-length // block_tokens)]

        def read(cache: Tensor) -> Tensor:
            # Graphs for XLA would convert the indices of other ways to int64.
            read_blocks = cache.index_select(0, blocks.flatten()).view(*blocks.shape, *cache.shape[1:])
            rows = read_blocks.transpose(1, 2).flatten(2, 3)[:, :, :length].float()
            # Where the row has written nothing, there may be anything, and zero times NaN is NaN.
            return torch.where((held >= 0)[:, None, :, None], rows, 0)

        return cls(read(key_cache), read(value_cache), held)

    def find_visible(self, positions: Tensor, tree_mask: Tensor | None, window: int) -> Tensor:
        """Which keys each token attends to: bool [rows, tokens, context]. A `tree_mask` of None is causal."""
        held, own = self.positions[:, None, :], positions[:, :, None]
        if tree_mask is None:
            visible = held <= own
        else:
            # Which keys are those of each of the step's tokens, then which keys the mask names.
            is_token = (held == own) & (own >= 0)
            named = torch.matmul(tree_mask.float(), is_token.float()) > 0
            visible = (held < positions[:, :1, None]) | named
        if window > 0:
            visible = visible & (held > own - window)
        return visible & (held >= 0)


def attend_to(context: Context, step: Step, options: Options) -> Tensor:
    """Softmax-weighted sums of values: [rows, tokens, heads, head_dim] in the queries' dtype, computed in float32.

    Tokens without a position get zeros. Scores take as much memory however long the context is: so many tokens as that
    gives attend at once, one after another.
    """
    num_tokens, num_at_once = step.queries.shape[1], max(1, MAX_SCORES // max(1, context.positions.shape[1]))
    if step.tree_mask is not None or num_tokens <= num_at_once:
        return _attend_at_once(context, step, options)
    starts = range(0, num_tokens, num_at_once)
    return torch.cat(
        [_attend_at_once(context, _take_tokens(step, start, start + num_at_once), options) for start in starts], dim=1
    )


def _take_tokens(step: Step, start: int, stop: int) -> Step:
    return replace(step, queries=step.queries[:, start:stop], positions=step.positions[:, start:stop])


def _attend_at_once(context: Context, step: Step, options: Options) -> Tensor:
    queries, positions = step.queries, step.positions
    rows, num_tokens, _, head_dim = queries.shape
    kv_heads = context.keys.shape[1]
    # Heads of one KV head side by side: [rows, kv_heads, group, tokens, head_dim].
    grouped = queries.float().view(rows, num_tokens, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(grouped, context.keys[:, :, None].transpose(-1, -2)) * options.scale
    if options.soft_cap > 0:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    if step.slopes is not None:
        distances = context.positions[:, None, :] - positions[:, :, None]
        scores = scores + step.slopes.view(kv_heads, -1, 1, 1) * distances[:, None, None]
    visible = context.find_visible(positions, step.tree_mask, options.window)
    # masked_fill would take the number as float64 in graphs for XLA.
    scores = torch.where(visible[:, None, None], scores, float("-inf"))
    if step.sinks is not None:
        logits = step.sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, logits], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    attended = torch.matmul(weights, context.values[:, :, None]).permute(0, 3, 1, 2, 4).reshape(queries.shape)
    return torch.where((positions >= 0)[:, :, None, None], attended, 0).to(queries.dtype).contiguous()
