"""The attention operator's reference against loops over single tokens, and against torch's attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from execution.attention import operators


@dataclass(frozen=True)
class Step:
    """A step's arguments; `next_tokens` of each row stand behind `cached` positions of its sequence."""

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
    options: dict[str, Any] = field(default_factory=dict)

    def make_positions(self) -> Tensor:
        most = max(self.tokens)
        positions = torch.full((len(self.cached), most), -1, dtype=torch.int32)
        for row, (cached, tokens) in enumerate(zip(self.cached, self.tokens, strict=True)):
            positions[row, :tokens] = torch.arange(cached, cached + tokens)
        return positions

    def make_arguments(self) -> list[Any]:
        generator = torch.Generator().manual_seed(7)
        positions = self.make_positions()
        rows, tokens = positions.shape

        def random(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        step, blocks = (rows, tokens, self.kv_heads, self.head_dim), rows * self.blocks_per_row + 1
        cache = (blocks, self.kv_heads, self.block_tokens, self.head_dim)
        table = torch.randperm(blocks - 1, generator=generator).to(torch.int32).view(rows, -1)
        return [
            random(rows, tokens, self.heads, self.head_dim, dtype=self.dtype),
            random(*step, dtype=self.dtype),
            random(*step, dtype=self.dtype),
            random(*cache, dtype=self.cache_dtype),
            random(*cache, dtype=self.cache_dtype),
            positions,
            table,
            self.sinks,
            self.slopes,
            self.tree_mask,
        ]

    def make_options(self) -> dict[str, Any]:
        return {"scale": 0.3, "max_context": self.block_tokens * self.blocks_per_row, **self.options}


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
                key_cache[block, :, offset] = keys[row, token].to(key_cache.dtype)
                value_cache[block, :, offset] = values[row, token].to(value_cache.dtype)
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


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
DECODE = Step((0, 5, 31), (1, 1, 1))
CHUNK = Step((0, 9, 27), (4, 3, 4))
CASES = {
    "decode": DECODE,
    "one row per head": replace(DECODE, heads=2),
    "idle rows": Step((0, 5, 2), (1, 0, 1)),
    "a chunk": CHUNK,
    "a prompt": Step((0, 0), (6, 3), options={"reads_cache": False}),
    "a window": replace(CHUNK, options={"window": 3}),
    "a window of a prompt": Step((0,), (6,), options={"window": 3, "reads_cache": False}),
    "a ring": Step((0, 9, 27), (4, 3, 4), block_tokens=9, blocks_per_row=1, options={"window": 6, "max_context": 64}),
    "sinks": replace(CHUNK, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    "slopes": replace(CHUNK, slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "a soft cap": replace(CHUNK, options={"soft_cap": 0.7}),
    "a tree": replace(CHUNK, tree_mask=TREE),
    "a tree for each row": replace(CHUNK, tree_mask=torch.stack([TREE, TREE.tril(), torch.eye(4, dtype=torch.bool)])),
    "a tree in a window": replace(CHUNK, tree_mask=TREE, options={"window": 4}),
    "bfloat16": replace(CHUNK, dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
    "a narrower cache": replace(CHUNK, cache_dtype=torch.float16),
    "a bound within a block": Step((4, 18), (2, 1), options={"max_context": 21}),
}


@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
def test_reference_does_what_loops_do(step: Step) -> None:
    arguments, options = step.make_arguments(), step.make_options()
    expected = attend_by_loops(arguments, options)
    actual = torch.ops.kiln.attend(*arguments, **options)
    tolerance = 1e-2 if step.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    assert actual[1].equal(expected[1])
    assert actual[2].equal(expected[2])


def test_a_prompt_is_torchs_causal_attention() -> None:
    step = Step((0, 0), (16, 16), options={"reads_cache": False})
    queries, keys, values = step.make_arguments()[:3]
    expected = functional.scaled_dot_product_attention(
        *(heads.transpose(1, 2) for heads in (queries, keys, values)), is_causal=True, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    actual = torch.ops.kiln.attend(*step.make_arguments(), **step.make_options())[0]
    torch.testing.assert_close(actual, expected)
    # The same prompt, read from the cache that it was written to.
    read = torch.ops.kiln.attend(*step.make_arguments(), **{**step.make_options(), "reads_cache": True})[0]
    torch.testing.assert_close(read, expected)


def test_numbers_that_no_token_wrote_reach_no_output() -> None:
    step = replace(DECODE, options={"window": 4})
    arguments = step.make_arguments()
    expected = torch.ops.kiln.attend(*arguments, **step.make_options())[0]
    positions, table = arguments[5], arguments[6]
    held = [
        (int(table[row, position // 16]), position % 16)
        for row in range(3)
        for position in range(int(positions[row, 0]))
    ]
    for cache in arguments[3:5]:
        poisoned = torch.full_like(cache, float("nan"))
        for block, offset in held:
            poisoned[block, :, offset] = cache[block, :, offset]
        cache.copy_(poisoned)
    assert torch.ops.kiln.attend(*arguments, **step.make_options())[0].equal(expected)


@pytest.mark.parametrize("step", [DECODE, CHUNK], ids=["decode", "a chunk"])
def test_the_twin_writes_the_caches_themselves(step: Step) -> None:
    arguments, options = step.make_arguments(), step.make_options()
    attended, keys, values = torch.ops.kiln.attend(*arguments, **options)
    assert torch.ops.kiln.attend_in_place(*arguments, **options).equal(attended)
    assert arguments[3].equal(keys)
    assert arguments[4].equal(values)


class Layer(nn.Module):
    """Calls the operator as a model does."""

    def forward(self, *arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor] = torch.ops.kiln.attend(
            *arguments, None, None, None, scale=0.3, max_context=32
        )
        return results


def test_programs_keep_the_operator() -> None:
    arguments = CHUNK.make_arguments()[:7]
    program = torch.export.export(Layer(), tuple(arguments))
    assert [node.target for node in program.graph.find_nodes(op="call_function", target=torch.ops.kiln.attend.default)]
    for actual, expected in zip(program.module()(*arguments), Layer()(*arguments), strict=True):
        assert actual.equal(expected)


@pytest.mark.parametrize("name", ["attend", "attend_in_place"])
def test_torch_finds_the_operators_consistent(name: str) -> None:
    operator = getattr(torch.ops.kiln, name).default
    step = replace(CHUNK, sinks=torch.zeros(4), tree_mask=TREE)
    torch.library.opcheck(
        operator,
        tuple(step.make_arguments()),
        step.make_options(),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("index", "wrong", "error", "message"),
    [
        (1, torch.zeros(3, 4, 3, 8), ValueError, r"keys of shape \[3, 4, 3, 8\]; accepted: \[3, 4, 2, 8\]"),
        (
            4,
            torch.zeros(7, 2, 16, 8, dtype=torch.float16),
            TypeError,
            "value_cache of torch.float16; accepted: torch.float32",
        ),
        (5, torch.zeros(3, 4, dtype=torch.int64), TypeError, "positions of torch.int64; accepted: torch.int32"),
        (7, torch.zeros(2), ValueError, r"sinks of shape \[2\]; accepted: \[4\]"),
        (9, torch.zeros(3, 3, dtype=torch.bool), ValueError, r"tree_mask of shape \[3, 3\]; accepted: \[4, 4\]"),
        (0, torch.zeros(3, 4, 5, 8), ValueError, "5 query heads for 2 KV heads; accepted: a multiple of them"),
        (0, torch.zeros(3, 4, 4, 8, dtype=torch.int32), TypeError, "queries of torch.int32; accepted: torch.float32"),
    ],
)
def test_wrong_arguments_are_named_when_traced(index: int, wrong: Tensor, error: type[Exception], message: str) -> None:
    arguments = CHUNK.make_arguments()
    arguments[index] = wrong
    arguments = [None if one is None else one.to("meta") for one in arguments]
    with pytest.raises(error, match=message):
        torch.ops.kiln.attend(*arguments, **CHUNK.make_options())


def test_every_accepted_dtype_attends() -> None:
    for dtype in operators.ATTENTION_DTYPES:
        step = replace(DECODE, dtype=dtype, cache_dtype=dtype)
        attended, keys, _ = torch.ops.kiln.attend(*step.make_arguments(), **step.make_options())
        assert attended.dtype == keys.dtype == dtype
