"""The attention operator's reference against loops over single tokens, and against torch's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from execution.attention import operators, reference
from tests.attention.steps import CASES, CHUNK, DECODE, TREE, AttentionStep, attend_by_loops


class LargestTensor(TorchDispatchMode):
    """Records the largest result of any operator."""

    num_entries = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_entries = max(self.num_entries, result.numel())
        return result


@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
def test_reference_does_what_loops_do(step: AttentionStep) -> None:
    arguments, options = step.make_arguments(), step.make_options()
    expected = attend_by_loops(arguments, options)
    actual = torch.ops.kiln.attend(*arguments, **options)
    tolerance = 1e-2 if step.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    # torch compares no float8.
    assert actual[1].float().equal(expected[1].float())
    assert actual[2].float().equal(expected[2].float())


def test_a_float8_cache_holds_no_more_than_neurons() -> None:
    """Its float8 ends with 240, and torch's with 448."""
    step = AttentionStep((0,), (1,), cache_dtype=torch.float8_e4m3fn)
    arguments = step.make_arguments()
    arguments[1][:], arguments[2][:] = 300.0, -1000.0
    _, keys, values = torch.ops.kiln.attend(*arguments, **step.make_options())
    block = arguments[6][0, 0]
    assert (keys[block, :, 0].float() == 240).all()
    assert (values[block, :, 0].float() == -240).all()


@pytest.mark.parametrize("max_scores", [1, 50])
@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
def test_tokens_attend_some_at_a_time(step: AttentionStep, max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, options = step.make_arguments(), step.make_options()
    expected = torch.ops.kiln.attend(*arguments, **options)[0]
    monkeypatch.setattr(reference, "MAX_SCORES", max_scores)
    torch.testing.assert_close(torch.ops.kiln.attend(*arguments, **options)[0], expected)


def test_scores_take_as_much_memory_however_long_the_prompt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most entries of any tensor grow with the tokens, not with their square."""
    monkeypatch.setattr(reference, "MAX_SCORES", 1 << 10)
    largest = []
    for num_tokens in (64, 128):
        step = reference.Step(*AttentionStep((0, 0), (num_tokens, num_tokens)).make_arguments())
        context = reference.Context.of_step(step.keys, step.values, step.positions, torch.float32)
        with LargestTensor() as recorded:
            reference.attend_to(context, step, reference.Options(scale=1.0, window=0, soft_cap=0.0))
        largest.append(recorded.num_entries)
    assert largest[1] <= 2 * largest[0]


def test_a_prompt_is_torchs_causal_attention() -> None:
    step = AttentionStep((0, 0), (16, 16), options={"reads_cache": False})
    queries, keys, values = step.make_arguments()[:3]
    expected = functional.scaled_dot_product_attention(
        *(heads.transpose(1, 2) for heads in (queries, keys, values)), is_causal=True, scale=8**-0.5, enable_gqa=True
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
def test_the_twin_writes_the_caches_themselves(step: AttentionStep) -> None:
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
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, tuple(step.make_arguments()), step.make_options(), test_utils=tests)


@pytest.mark.parametrize(
    ("index", "wrong", "error", "message"),
    [
        (1, torch.zeros(3, 4, 3, 8), ValueError, r"keys of shape \[3, 4, 3, 8\]; accepted: \[3, 4, 2, 8\]"),
        (4, torch.zeros(7, 2, 16, 8).half(), TypeError, "value_cache of torch.float16; accepted: torch.float32"),
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
