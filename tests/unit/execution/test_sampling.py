from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from bundle.abi.outputs import INVALID_ROW
from execution import sampling
from execution.candidates import round_sum, take_top
from execution.sampling import candidates, draw, greedy, pick_logprobs, sample, score, sum_weights
from tests.ranks.arithmetic import compute_as_on
from tests.ranks.noise import draw_keys, measure_fit

VOCAB = 97


@pytest.fixture(scope="module", autouse=True, params=["cpu", "xla"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with the arithmetic of the CPU's graphs, and with that of other devices'."""
    with compute_as_on(request.param):
        yield


def random_logits(rows: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def oracle(logits: Tensor, top_k: int, top_p: float, temperature: float) -> Tensor:
    """Probabilities f32 [N, V] that Hugging Face draws from."""
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores.softmax(-1)


def find_probabilities(logits: Tensor, top_k: int, top_p: float, temperature: float, global_topk: int) -> Tensor:
    """Probabilities [N, V] that `sample` draws from."""
    params = torch.tensor([[top_k, top_p, temperature]]).expand(len(logits), 3)
    ids, scores = candidates(logits, params, global_topk)
    return torch.zeros(len(logits), VOCAB).scatter(1, ids.long(), scores.softmax(-1))


@pytest.mark.parametrize("global_topk", [0, 64, 500])
@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"),
    list(itertools.product((1, 5, 50), (0.05, 0.5, 0.95, 1.0), (0.3, 1.0, 2.0))),
)
def test_distribution_is_hugging_faces(top_k: int, top_p: float, temperature: float, global_topk: int) -> None:
    logits = random_logits(20)
    expected = oracle(logits, top_k, top_p, temperature)
    torch.testing.assert_close(find_probabilities(logits, top_k, top_p, temperature, global_topk), expected)


@pytest.mark.parametrize("top_p", [0.1, 0.7, 0.95, 1.0])
def test_without_top_k_top_p_is_measured_in_the_whole_vocabulary(top_p: float) -> None:
    logits = random_logits(20)
    expected = oracle(logits, 0, top_p, 1.0)
    torch.testing.assert_close(find_probabilities(logits, 0, top_p, 1.0, 0), expected)
    # A nucleus that lies within the global candidates is not changed by them.
    nucleus = int((expected > 0).sum(-1).max())
    torch.testing.assert_close(find_probabilities(logits, 0, top_p, 1.0, nucleus), expected)


def test_global_candidates_cut_a_wider_nucleus_off() -> None:
    logits = random_logits(20)
    cut = find_probabilities(logits, 0, 1.0, 1.0, 10)
    torch.testing.assert_close(cut, oracle(logits, 10, 1.0, 1.0))
    assert ((cut > 0).sum(-1) == 10).all()


def test_a_bundle_of_an_earlier_release_inverts_the_cumulative_distribution() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    params = torch.tensor([[0.0, 1.0, 1.0]])
    drawn = {rand: int(sample(logits, params, torch.tensor([[rand]]), 0)) for rand in (0.0, 0.49, 0.51, 0.79, 0.81)}
    assert drawn == {0.0: 1, 0.49: 1, 0.51: 2, 0.79: 2, 0.81: 0}


def test_the_largest_rand_draws_the_last_candidate() -> None:
    largest = torch.full((50, 1), 1 - 2**-24)
    for top_k, top_p in ((0, 1.0), (7, 1.0), (0, 0.6)):
        params = torch.tensor([[top_k, top_p, 1.0]]).expand(50, 3)
        logits = random_logits(50)
        drawn = sample(logits, params, largest, 0)
        assert (find_probabilities(logits, top_k, top_p, 1.0, 0).gather(1, drawn.long()[:, None]) > 0).all()


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(20, 0.9, 0.8), (0, 1.0, 1.0), (0, 0.7, 2.0), (9, 1.0, 1.5)]
)
def test_frequencies_follow_the_distribution(top_k: int, top_p: float, temperature: float) -> None:
    logits, rows = random_logits(1, scale=1.0)[:, :24], 50_000
    params = torch.tensor([[float(top_k), top_p, temperature]])
    ids, scores = candidates(logits, params, 0)
    tokens = draw(ids, scores.expand(rows, 24), params, draw_keys(rows))
    expected = oracle(logits, top_k, top_p, temperature)[0]
    assert (expected > 0).sum() > 5
    assert measure_fit(torch.bincount(tokens.long(), minlength=24), expected) > 0.001


def test_the_order_of_candidates_does_not_matter() -> None:
    logits, params, keys = random_logits(200).round(), torch.tensor([[0.0, 1.0, 1.0]]), draw_keys(200)
    ids = torch.arange(VOCAB, dtype=torch.int32)
    tokens = draw(ids, score(logits, logits.amax(-1, keepdim=True), params), params, keys)
    assert torch.equal(tokens, sample(logits, params.expand(200, 3), keys, 0))


def test_of_equals_the_lowest_id_is_drawn() -> None:
    scores, ids = torch.zeros(1, 3), torch.tensor([[9, 4, 7]], dtype=torch.int32)
    with patch.object(sampling, "make_noise", lambda ids, keys: torch.zeros(1, 3)):
        assert draw(ids, scores, torch.tensor([[0.0, 1.0, 1.0]]), draw_keys(1)).tolist() == [4]


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.lists(
        st.tuples(
            st.sampled_from((0.0, 1.0, 3.0, 40.0)),
            st.floats(0.0625, 1.0, width=32),
            st.sampled_from((0.0, 0.2, 1.0, 5.0)),
            st.integers(0, 10_000),
        ),
        min_size=1,
        max_size=5,
    ),
    global_topk=st.sampled_from((0, 1, 16)),
)
def test_rows_do_not_see_each_other(seed: int, rows: list[tuple[float, float, float, int]], global_topk: int) -> None:
    logits = random_logits(len(rows), seed=seed)
    params = torch.tensor([row[:3] for row in rows])
    keys = torch.cat([draw_keys(1, row[3]) for row in rows])
    together = sample(logits, params, keys, global_topk)
    assert together.dtype == torch.int32
    for row in range(len(rows)):
        one = slice(row, row + 1)
        assert sample(logits[one], params[one], keys[one], global_topk) == together[row]


@pytest.mark.parametrize("params", [[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [50.0, 0.3, 0.0]])
def test_greedy_parameters_pick_the_likeliest(params: list[float]) -> None:
    logits = random_logits(30)
    tokens = sample(logits, torch.tensor([params]).expand(30, 3), draw_keys(30), 16)
    assert torch.equal(tokens, greedy(logits))
    assert torch.equal(tokens, logits.argmax(-1).to(torch.int32))


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [70, 11, 40]] = 1
    assert greedy(logits).tolist() == [11, 0]
    assert sample(logits, torch.tensor([[0.0, 1.0, 0.0]]).expand(2, 3), draw_keys(2), 8).tolist() == [11, 0]


def test_the_top_is_ordered_by_likelihood_and_then_by_id() -> None:
    infinity = float("inf")
    logits = torch.tensor([[0.0, 2.5, -0.0, -1.0, 2.5, -infinity, infinity, 1e-45, -1e-45, -infinity]])
    top, ids = take_top(logits, 10)
    assert ids.tolist() == [[6, 1, 4, 7, 0, 2, 8, 3, 5, 9]]
    assert torch.equal(top, logits.gather(1, ids.long()))
    assert ids.dtype == torch.int32


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, VOCAB))
def test_the_top_is_that_of_a_stable_sort(seed: int, count: int) -> None:
    logits = random_logits(3, seed=seed).round()
    expected = logits.sort(dim=-1, descending=True, stable=True)
    top, ids = take_top(logits, count)
    assert torch.equal(top, expected.values[:, :count])
    assert torch.equal(ids.long(), expected.indices[:, :count])


def test_the_top_of_joined_tops_is_the_top_of_all() -> None:
    logits = random_logits(5).round()
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2)).to(torch.int32).expand(5, VOCAB)
    top, top_ids = take_top(logits.gather(1, ids.long()), 20, ids)
    expected, expected_ids = take_top(logits, 20)
    assert torch.equal(top, expected)
    assert torch.equal(top_ids, expected_ids)


def test_weights_of_parts_add_up_exactly() -> None:
    logits = random_logits(50)
    params = torch.tensor([[0.0, 0.9, 1.3]]).expand(50, 3)
    largest = logits.amax(-1, keepdim=True)
    whole = sum_weights(logits, largest, params, VOCAB)
    for length in (1, 7, 32):
        parts = [sum_weights(part, largest, params, VOCAB) for part in logits.split(length, dim=1)]
        assert torch.equal(torch.stack(parts).sum(0), whole)
    expected = ((logits - largest) / 1.3).exp().sum(-1, keepdim=True)
    torch.testing.assert_close(round_sum(whole, VOCAB), expected)


def test_extreme_scores_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, float("-inf"), 2.9e38]])
    for temperature in (1e-6, 1.0, 1e6):
        params = torch.tensor([[0.0, 0.9, temperature]])
        rows = logits.expand(100, 4), params.expand(100, 3), draw_keys(100)
        assert set(sample(*rows, 0).tolist()) <= {0, 3}


class Sampler(nn.Module):
    def forward(self, logits: Tensor, params: Tensor, keys: Tensor) -> tuple[Tensor]:
        return (sample(logits, params, keys, 16),)


def test_it_can_be_exported() -> None:
    arguments = (random_logits(3), torch.tensor([[5.0, 0.9, 1.0], [0, 1, 0.5], [1, 1, 1]]), draw_keys(3))
    program = torch.export.export(Sampler(), arguments)
    assert not program.constants
    for seed in range(10):
        logits = random_logits(3, seed=seed)
        (tokens,) = program.module()(logits, *arguments[1:])
        assert torch.equal(tokens, sample(logits, arguments[1], arguments[2], 16))


NAN, INFINITY = float("nan"), float("inf")
#: What x86 makes of `inf - inf`: as an integer it is less than any number.
NEGATIVE_NAN = struct.unpack("f", struct.pack("I", 0xFFC00000))[0]
NO_NUMBERS = {
    "one NaN": lambda row: row.index_fill_(0, torch.tensor([5]), NAN),
    "one negative NaN": lambda row: row.index_fill_(0, torch.tensor([5]), NEGATIVE_NAN),
    "all NaN": lambda row: row.fill_(NAN),
    "infinite": lambda row: row.index_fill_(0, torch.tensor([5]), INFINITY),
    "several infinite": lambda row: row.fill_(INFINITY),
    "nothing but -inf": lambda row: row.fill_(-INFINITY),
}


@pytest.mark.parametrize("kind", NO_NUMBERS)
@pytest.mark.parametrize("global_topk", [0, 8])
@pytest.mark.parametrize("params", [(0, 1.0, 1.0), (5, 0.9, 0.7), (1, 1.0, 0.0)])
def test_row_without_numbers_is_marked_and_changes_no_other(
    kind: str, global_topk: int, params: tuple[float, ...]
) -> None:
    logits, keys = random_logits(3), draw_keys(3)
    rows = torch.tensor([params]).expand(3, 3)
    expected = sample(logits, rows, keys, global_topk), greedy(logits)
    NO_NUMBERS[kind](logits[1])
    for tokens, before in zip((sample(logits, rows, keys, global_topk), greedy(logits)), expected, strict=True):
        assert tokens.dtype == torch.int32
        assert tokens.tolist() == [before[0], INVALID_ROW, before[2]]


def test_tokens_that_cannot_be_picked_leave_a_row_valid() -> None:
    logits = random_logits(1)
    logits[0, 10:] = -INFINITY
    assert greedy(logits)[0] < 10
    rows = logits.expand(300, VOCAB), torch.tensor([[0, 1.0, 30.0]]).expand(300, 3), draw_keys(300)
    assert (sample(*rows, 0) < 10).all()


def test_log_probabilities_of_a_marked_row_harm_no_other() -> None:
    logits = random_logits(2)
    expected = pick_logprobs(logits, torch.tensor([3, 4], dtype=torch.int32), 2)[0][0]
    logits[1] = NAN
    assert pick_logprobs(logits, torch.tensor([3, INVALID_ROW], dtype=torch.int32), 2)[0][0] == expected


def test_logprobs_are_those_of_the_whole_distribution() -> None:
    logits = torch.randn(4, 31) * 5
    tokens = torch.tensor([3, 0, 30, 7], dtype=torch.int32)
    picked, top_ids, top = pick_logprobs(logits, tokens, 5)
    expected = torch.log(torch.softmax(logits.double(), -1))
    torch.testing.assert_close(picked.double(), expected[range(4), tokens.long()], rtol=0, atol=1e-5)
    assert torch.equal(top_ids, logits.argsort(descending=True, dim=-1)[:, :5])
    torch.testing.assert_close(top.double(), expected.gather(1, top_ids), rtol=0, atol=1e-5)


def test_logprobs_of_several_tokens_a_row_are_those_of_one_by_one() -> None:
    logits, tokens = torch.randn(2, 3, 31), torch.tensor([[3, 0, 30], [7, 8, 9]], dtype=torch.int32)
    together, alone = pick_logprobs(logits, tokens, 4), pick_logprobs(logits.flatten(0, 1), tokens.flatten(), 4)
    for several, one in zip(together, alone, strict=True):
        assert torch.equal(several.flatten(0, 1), one)


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.randn(2, 1000).bfloat16()
    picked, _, _ = pick_logprobs(logits, torch.tensor([1, 2], dtype=torch.int32), 0)
    assert picked.dtype == torch.float32
    torch.testing.assert_close(picked, logits.float().log_softmax(-1)[range(2), [1, 2]])
