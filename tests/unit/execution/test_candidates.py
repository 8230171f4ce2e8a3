"""What devices compute that have no 64-bit integers, here on the CPU; the tests of sampling run with it, too."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from execution.candidates import round_sum, sum_exactly, take_top
from tests.ranks.arithmetic import compute_as_on


@pytest.fixture(scope="module", autouse=True)
def arithmetic() -> Iterator[None]:
    with compute_as_on("xla"):
        yield


def take_last_of_equals(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A top-k that prefers what others would leave out, and gives equals in the other order."""
    backwards = values.flip(-1).sort(dim=-1, descending=True, stable=True)
    places = values.shape[-1] - 1 - backwards.indices[:, :count]
    return backwards.values[:, :count], places.to(torch.int32)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 60), num_values=st.integers(1, 12))
def test_the_order_of_candidates_depends_on_no_order_of_equals(seed: int, count: int, num_values: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(num_values, (3, 60), generator=generator) - num_values // 2 + 0.0
    ids = torch.stack([torch.randperm(90, generator=generator)[:60] for _ in range(3)]).to(torch.int32)
    by_id = ids.sort(dim=-1)
    in_order = logits.gather(-1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    with patch.object(torch.ops.kiln, "topk", take_last_of_equals):
        top, top_ids = take_top(logits, count, ids)
    assert torch.equal(top, in_order.values[:, :count])
    assert torch.equal(top_ids, by_id.values.gather(-1, in_order.indices)[:, :count])


@pytest.mark.parametrize("with_ids", [False, True])
def test_whole_vocabularies_are_sorted(with_ids: bool) -> None:
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(5)).mul(4).round()
    ids = torch.arange(2999, -1, -1, dtype=torch.int32).expand(2, -1) if with_ids else None
    order = (logits.flip(-1) if with_ids else logits).sort(dim=-1, descending=True, stable=True)
    top, top_ids = take_top(logits, 2500, ids)
    assert torch.equal(top, order.values[:, :2500])
    assert torch.equal(top_ids.long(), order.indices[:, :2500])
    assert top_ids.dtype == torch.int32


def test_more_tokens_than_floats_can_number_are_refused() -> None:
    for compute in (lambda logits: take_top(logits, 1), lambda logits: sum_exactly(logits, logits.shape[1])):
        with pytest.raises(ValueError, match="a vocabulary of 8388609 tokens"):
            compute(torch.empty(1, 2**23 + 1, device="meta"))


@pytest.mark.parametrize("vocab_size", [1, 97, 262_208, 2**19 + 1])
def test_sums_are_those_of_the_cpu(vocab_size: int) -> None:
    weights = torch.rand(2, vocab_size, generator=torch.Generator().manual_seed(1))
    weights[1] = 1.0
    digits = sum_exactly(weights, vocab_size)
    assert torch.equal(digits, digits.round())
    assert digits.max() <= 2**24
    with compute_as_on("cpu"):
        exact = sum_exactly(weights, vocab_size)
        expected = round_sum(exact, vocab_size)
    bits = 24 - (vocab_size - 1).bit_length()
    total = torch.zeros(2, 1, dtype=torch.int64)
    for index in range(digits.shape[1]):
        total += digits[:, index : index + 1].to(torch.int64) << bits * (digits.shape[1] - 1 - index)
    assert torch.equal(total, exact)
    torch.testing.assert_close(round_sum(digits, vocab_size), expected, rtol=2e-7, atol=0.0)
