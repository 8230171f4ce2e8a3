"""Steps of attention: arguments of `kiln::attend`, and what it means for each of them, by loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionStep:
    """A step's arguments, drawn at random.

    Attributes:
        cached: How many positions of each row's sequence the cache holds.
        tokens: How many tokens of each row follow; the step has as many as the longest row, and the others are dead.
        is_joined: Whether queries, keys and values are slices of one tensor, as of a joined projection.
        options: The operator's keyword arguments.
    """

    cached: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    block_tokens: int = 16
    blocks_per_row: int = 2
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    tree_mask: Tensor | None = None
    is_joined: bool = False
    seed: int = 7
    options: dict[str, Any] = field(default_factory=dict)

    def make_positions(self) -> Tensor:
        most = max(self.tokens)
        positions = torch.full((len(self.cached), most), -1, dtype=torch.int32)
        for row, (cached, tokens) in enumerate(zip(self.cached, self.tokens, strict=True)):
            positions[row, :tokens] = torch.arange(cached, cached + tokens)
        return positions

    def make_arguments(self) -> list[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        positions = self.make_positions()
        rows, tokens = positions.shape

        def random(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        blocks = rows * self.blocks_per_row + 1
        cache = (blocks, self.kv_heads, self.block_tokens, self.head_dim)
        table = torch.randperm(blocks - 1, generator=generator).to(torch.int32).view(rows, -1)
        counts = [self.heads, self.kv_heads, self.kv_heads]
        joined = random(rows, tokens, sum(counts), self.head_dim, dtype=self.dtype)
        heads = [part if self.is_joined else part.contiguous() for part in joined.split(counts, 2)]
        return [
            *heads,
            random(*cache, dtype=self.cache_dtype),
            random(*cache, dtype=self.cache_dtype),
            positions,
            table,
            self.sinks,
            self.slopes,
            self.tree_mask,
        ]

    def make_options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5, "max_context": self.block_tokens * self.blocks_per_row, **self.options}


def attend_by_loops(arguments: list[Any], options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token, head by head, position by position."""
    queries, keys, values, key_cache, value_cache, positions, table, sinks, slopes, tree_mask = arguments
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    rows, tokens, heads, _ = queries.shape
    kv_heads, block_tokens = key_cache.shape[1:3]

    def place(row: int, position: int) -> tuple[int, int]:
        return int(table[row, position // block_tokens % table.shape[1]]), position % block_tokens

    for row in range(rows):
        for token in range(tokens):
            if (position := int(positions[row, token])) >= 0:
                block, offset = place(row, position)
                key_cache[block, :, offset] = round_to(keys[row, token], key_cache.dtype)
                value_cache[block, :, offset] = round_to(values[row, token], value_cache.dtype)
    attended = torch.zeros_like(queries)
    window, soft_cap = options.get("window", 0), options.get("soft_cap", 0.0)
    for row in range(rows):
        own = [int(position) for position in positions[row]]
        for token, position in enumerate(own):
            if position < 0:
                continue
            visible = range(position + 1)
            if tree_mask is not None:
                mask = tree_mask[row] if tree_mask.dim() == 3 else tree_mask
                named = [own[other] for other in range(tokens) if mask[token, other] and own[other] >= 0]
                visible = [*range(own[0]), *named]
            seen = [other for other in visible if not window or other > position - window]
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = []
                for other in seen:
                    block, offset = place(row, other)
                    score = float(queries[row, token, head].double() @ key_cache[block, kv_head, offset].double())
                    score *= options["scale"]
                    score = soft_cap * math.tanh(score / soft_cap) if soft_cap else score
                    scores.append(score + (0 if slopes is None else float(slopes[head]) * (other - position)))
                total = sum(map(math.exp, scores)) + (0 if sinks is None else math.exp(sinks[head]))
                blocks = [place(row, other) for other in seen]
                weighed = [
                    math.exp(score) / total * value_cache[block, kv_head, offset].double()
                    for score, (block, offset) in zip(scores, blocks, strict=True)
                ]
                attended[row, token, head] = torch.stack(weighed).sum(0).to(queries.dtype)
    return attended, key_cache, value_cache


def round_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest that a dtype has."""
    return (tensor if dtype.is_floating_point else tensor.round()).to(dtype)


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
DECODE = AttentionStep((0, 5, 31), (1, 1, 1))
CHUNK = AttentionStep((0, 9, 27), (4, 3, 4))
CASES = {
    "decode": DECODE,
    "one row per head": replace(DECODE, heads=2),
    "idle rows": AttentionStep((0, 5, 2), (1, 0, 1)),
    "a chunk": CHUNK,
    "a prompt": AttentionStep((0, 0), (6, 3), options={"reads_cache": False}),
    "a window": replace(CHUNK, options={"window": 3}),
    "a window of a prompt": AttentionStep((0,), (6,), options={"window": 3, "reads_cache": False}),
    "a ring": AttentionStep(
        (0, 9, 27), (4, 3, 4), block_tokens=9, blocks_per_row=1, options={"window": 6, "max_context": 64}
    ),
    "sinks": replace(CHUNK, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    "slopes": replace(CHUNK, slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "a soft cap": replace(CHUNK, options={"soft_cap": 0.7}),
    "a tree": replace(CHUNK, tree_mask=TREE),
    "a tree for each row": replace(CHUNK, tree_mask=torch.stack([TREE, TREE.tril(), torch.eye(4, dtype=torch.bool)])),
    "a tree in a window": replace(CHUNK, tree_mask=TREE, options={"window": 4}),
    "bfloat16": replace(CHUNK, dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
    "a narrower cache": replace(CHUNK, cache_dtype=torch.bfloat16),
    "a prompt in a narrower cache": AttentionStep(
        (0,), (6,), cache_dtype=torch.bfloat16, options={"reads_cache": False}
    ),
    "a float8 cache": replace(CHUNK, cache_dtype=torch.float8_e4m3fn),
    "an int8 cache": replace(CHUNK, cache_dtype=torch.int8),
    "a prompt in a float8 cache": AttentionStep(
        (0,), (6,), cache_dtype=torch.float8_e4m3fn, options={"reads_cache": False}
    ),
    "a bound within a block": AttentionStep((4, 18), (2, 1), options={"max_context": 21}),
}
