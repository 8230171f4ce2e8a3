"""Several ranks pick the tokens that one rank picks of equal logits, however they divide the vocabulary."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bundle.abi.inputs import read_sampling_params
from bundle.abi.outputs import INVALID_ROW
from compiler_svc.models.divisions import share_of
from compiler_svc.models.layers.logits import RankLogits
from compiler_svc.models.layers.ranks import Ranks
from execution.processors import sample_on_host
from execution.sampling import greedy, sample
from tests.fuzzing import fuzz
from tests.ranks.arithmetic import compute_as_on
from tests.ranks.noise import draw_keys
from tests.ranks.processed_rows import draw_asked, make_changes
from tests.ranks.threads import run_ranks


@pytest.fixture(scope="module", autouse=True, params=["cpu", "xla"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with the arithmetic of the CPU's graphs, and with that of other devices'."""
    with compute_as_on(request.param):
        yield


def draw_logits(rows: int, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of few different values, so that most have equals on other ranks."""
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return ((logits * 4).round() / 4).to(dtype)


def divide(logits: Tensor, tp_degree: int) -> list[RankLogits]:
    """Parts as ranks have them; padding holds what must never be picked."""
    vocab_size, ranks = logits.shape[1], Ranks(tp_degree)
    share = share_of(vocab_size, tp_degree)
    padding = torch.full((len(logits), share * tp_degree - vocab_size), 99.0, dtype=logits.dtype)
    parts = torch.cat((logits, padding), dim=1).split(share, dim=1)
    return [
        RankLogits(
            part=part.contiguous(),
            rank=torch.tensor([rank], dtype=torch.int32) if tp_degree > 1 else None,
            vocab_size=vocab_size,
            ranks=ranks,
        )
        for rank, part in enumerate(parts)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "tp_degree"), [(24, 1), (24, 2), (23, 4), (22, 7), (9, 8)])
def test_whole_logits(vocab_size: int, tp_degree: int, dtype: torch.dtype) -> None:
    logits = draw_logits(3, vocab_size, seed=1, dtype=dtype)
    parts = divide(logits, tp_degree)
    for whole in run_ranks(tp_degree, lambda rank: parts[rank].gather()):
        assert torch.equal(whole, logits.float())


@fuzz(250)
@given(seed=st.integers(0, 10_000), vocab_size=st.integers(8, 60), tp_degree=st.integers(1, 8))
def test_the_likeliest_token(seed: int, vocab_size: int, tp_degree: int) -> None:
    logits = draw_logits(4, vocab_size, seed)
    logits[3] = 1.5  # all equal: the lowest id wins
    parts = divide(logits, tp_degree)
    for tokens in run_ranks(tp_degree, lambda rank: parts[rank].greedy()):
        assert tokens.dtype == torch.int32
        assert torch.equal(tokens, greedy(logits))


@fuzz(250)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.integers(8, 60),
    tp_degree=st.integers(1, 8),
    global_topk=st.sampled_from((0, 1, 5, 16, 256)),
    rows=st.lists(
        st.tuples(
            st.sampled_from((0.0, 1.0, 3.0, 12.0)),
            st.floats(0.0625, 1.0, width=32),
            st.sampled_from((0.0, 0.3, 1.0, 40.0)),
            st.integers(0, 10_000),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_drawn_tokens(
    seed: int,
    vocab_size: int,
    tp_degree: int,
    global_topk: int,
    rows: list[tuple[float, float, float, int]],
) -> None:
    logits = draw_logits(len(rows), vocab_size, seed)
    params, keys = torch.tensor([row[:3] for row in rows]), torch.cat([draw_keys(1, row[3]) for row in rows])
    parts = divide(logits, tp_degree)
    expected = sample(logits, params, keys, global_topk)
    for tokens in run_ranks(tp_degree, lambda rank: parts[rank].sample(params, keys, global_topk, needs_total=True)):
        assert tokens.dtype == torch.int32
        assert torch.equal(tokens, expected)


def test_without_a_total_top_k_rows_are_drawn_alike() -> None:
    logits = draw_logits(64, 50, seed=3)
    params = torch.tensor([[7.0, 0.8, 1.3]]).expand(64, 3)
    keys = draw_keys(64)
    parts = divide(logits, 3)
    for tokens in run_ranks(3, lambda rank: parts[rank].sample(params, keys, 16, needs_total=False)):
        assert torch.equal(tokens, sample(logits, params, keys, 16))


def test_probabilities_are_of_the_whole_vocabulary() -> None:
    """A flat tail on the other ranks, beyond the candidates, makes the nucleus wider."""
    logits = torch.zeros(1, 40)
    logits[0, :2] = torch.tensor([3.0, 2.5])
    parts = divide(logits.expand(64, -1), 4)
    keys = draw_keys(64)
    params = torch.tensor([[0.0, 0.35, 1.0]]).expand(64, 3)
    for tokens in run_ranks(4, lambda rank: parts[rank].sample(params, keys, 4, needs_total=True)):
        assert set(tokens.tolist()) == {0, 1}
    # Among the four candidates alone, the first would reach 0.35.
    params = torch.tensor([[4.0, 0.35, 1.0]]).expand(64, 3)
    assert set(sample(logits.expand(64, -1), params, keys, 4).tolist()) == {0}


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e30])
def test_padding_is_never_picked(temperature: float) -> None:
    """Not even if the temperature makes all tokens equal, or if a rank has only padding."""
    logits = torch.full((200, 9), -3e38)
    params, keys = torch.tensor([[0.0, 1.0, temperature]]).expand(200, 3), draw_keys(200)
    parts = divide(logits, 8)
    for tokens in run_ranks(8, lambda rank: parts[rank].sample(params, keys, 256, needs_total=True)):
        assert set(tokens.tolist()) == set(range(9))


@pytest.mark.parametrize("number", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 7, 22])
@pytest.mark.parametrize("global_topk", [0, 4])
def test_row_without_numbers_is_marked_on_every_rank(number: float, place: int, global_topk: int) -> None:
    logits = draw_logits(3, 23, seed=5)
    params, keys = torch.tensor([[0.0, 0.9, 1.0]]).expand(3, 3), draw_keys(3)
    expected = sample(logits, params, keys, global_topk), greedy(logits)
    logits[1, place] = number
    parts = divide(logits, 4)
    picks = (
        lambda rank: parts[rank].sample(params, keys, global_topk, needs_total=True),
        lambda rank: parts[rank].greedy(),
    )
    for pick, before in zip(picks, expected, strict=True):
        for tokens in run_ranks(4, pick):
            assert tokens.tolist() == [before[0], INVALID_ROW, before[2]]


def test_row_of_nothing_but_negative_infinity_is_marked() -> None:
    logits = torch.full((1, 23), -float("inf"))
    parts = divide(logits, 4)
    assert [tokens.tolist() for tokens in run_ranks(4, lambda rank: parts[rank].greedy())] == [[INVALID_ROW]] * 4


@pytest.mark.parametrize(("tp_degree", "global_topk"), [(1, 20), (3, 20), (2, 0)])
def test_processed_rows_get_the_tokens_that_the_host_picks(tp_degree: int, global_topk: int) -> None:
    """Random parameters of all processors, with random keys."""
    draw = random.Random(tp_degree)
    for number in range(40):
        logits = draw_logits(10, 50, seed=number, dtype=torch.bfloat16)
        rows = [draw_asked(draw, 50) for _ in range(10)]
        params = torch.tensor([read_sampling_params(row.sampling) for row in rows])
        keys = draw_keys(10, number)
        described = [asked.describe(50, row) for row, asked in enumerate(rows)]
        expected = sample_on_host(logits.float(), params, keys, described, global_topk)
        changes, parts = make_changes(rows, 50), divide(logits, tp_degree)

        def pick(
            rank: int,
            parts: list[RankLogits] = parts,
            params: Tensor = params,
            keys: Tensor = keys,
            changes: dict[str, Tensor] = changes,
        ) -> Tensor:
            changed = parts[rank].change(changes)
            return changed.sample(params, keys, global_topk, needs_total=True, cuts=changes["cuts"])

        for tokens in run_ranks(tp_degree, pick):
            assert tokens.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "tp_degree"), [(24, 1), (24, 2), (23, 4), (22, 7), (9, 8)])
def test_log_probabilities(vocab_size: int, tp_degree: int, dtype: torch.dtype) -> None:
    logits = draw_logits(5, vocab_size, seed=2, dtype=dtype)
    ids = torch.tensor([0, vocab_size - 1, 3, 7, 5], dtype=torch.int32)
    expected = logits.float().log_softmax(dim=-1)
    parts = divide(logits, tp_degree)
    for told in run_ranks(tp_degree, lambda rank: parts[rank].tell(ids)):
        torch.testing.assert_close(told, expected.gather(-1, ids.long()[:, None])[:, 0], atol=1e-5, rtol=0)
    for top, top_ids in run_ranks(tp_degree, lambda rank: parts[rank].tell_likeliest(6)):
        torch.testing.assert_close(top, expected.topk(6, dim=-1).values, atol=1e-5, rtol=0)
        # Of equally likely tokens, the lowest ids come first.
        order = sorted(range(vocab_size), key=lambda token: (-float(logits[2, token]), token))
        assert top_ids[2].tolist() == order[:6]
