"""Rows on the host have the bits that graphs give them."""

from __future__ import annotations

import random

import pytest
import torch

from execution import candidates, host_rows, noise, sampling
from execution.host_rows import RowToDraw
from execution.logit_changes import change_logits
from tests.ranks.noise import draw_keys
from tests.ranks.processed_rows import draw_asked, make_changes

NUM_CASES = 1000


@pytest.fixture(params=[True, False], ids=["native", "graphs"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_rows.load_sampling_library() is not None
    if not request.param:
        monkeypatch.setattr(host_rows, "load_sampling_library", lambda: None)


def draw_logits(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Logits of which many are equal, 0 of either sign, or excluded, f32 [N, V]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    logits[1::4] = logits[1::4].round()
    logits[2::4].masked_fill_(torch.rand(logits[2::4].shape, generator=generator) < 0.95, float("-inf"))
    logits[3::8] = 1.0
    logits[7::8] = -logits[7::8].abs().floor()
    return logits


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("vocab_size", [1, 7, 32, 33, 70, 3001])
def test_the_likeliest_tokens(vocab_size: int) -> None:
    for seed, count in enumerate((1, 2, 5, 32, 40, 100, 3001)):
        logits, taken = draw_logits(16, vocab_size, seed), min(count, vocab_size)
        valid = sampling.is_valid(logits)
        top, ids = candidates.take_top(torch.where(valid, logits, 0.0), taken)
        asked = [(0.0, 1.0, (0.0, 0.3, 1.0, 1.7)[row % 4]) for row in range(len(logits))]
        scores = sampling.score(top, top[:, :1], torch.tensor(asked))
        expected = (scores, torch.where(valid, ids, 0), valid)
        rows = [RowToDraw(row, None, own) for row, own in enumerate(asked)]
        for given in (logits, torch.nn.functional.pad(logits, (0, 3), value=float("nan"))[:, :vocab_size]):
            found = host_rows.find_top(given, rows, taken)
            assert all(map(torch.equal, found, expected))
            found = host_rows.find_top(given, rows[9:2:-2], taken)
            assert all(one.equal(every[[9, 7, 5, 3]]) for one, every in zip(found, expected, strict=True))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("count", [1, 3, 40])
def test_rows_are_valid_that_are_numbers_and_disturb_no_other_row(count: int) -> None:
    logits = draw_logits(8, 40, 1)
    expected = candidates.take_top(logits[:1], count)
    logits[1, 7], logits[2], logits[3, 39], logits[5] = float("nan"), float("-inf"), float("inf"), -float("nan")
    logits[4, 1:] = float("-inf")
    scores, ids, valid = host_rows.find_top(logits, [RowToDraw(row) for row in range(6)], count)
    assert valid.tolist() == [[True], [False], [False], [False], [True], [False]]
    assert sampling.is_valid(logits[:6]).equal(valid)
    assert scores[0].equal(expected[0][0] - expected[0][0][0])
    assert ids[0].equal(expected[1][0])
    assert ids[4].tolist() == list(range(count))


@pytest.mark.usefixtures("rows")
def test_changes() -> None:
    draw = random.Random(1)
    for _ in range(NUM_CASES):
        vocab_size = draw.choice((32, 33, 70, 71))
        asked, logits = draw_asked(draw, vocab_size), draw_logits(4, vocab_size, draw.getrandbits(20))
        row = asked.describe(vocab_size)
        given = logits.clone()
        expected = change_logits(given, make_changes([asked] * len(logits), vocab_size), vocab_size, None)
        assert torch.stack([host_rows.change_row(own, row) for own in logits]).equal(expected)
        assert logits.equal(given)
        scores, ids, valid = host_rows.find_top(logits, [RowToDraw(place, row) for place in range(4)], 9)
        expected_top, expected_ids = candidates.take_top(expected, 9)
        assert valid.equal(sampling.is_valid(expected))
        assert scores[valid[:, 0]].equal((expected_top - expected_top[:, :1])[valid[:, 0]])
        assert ids[valid[:, 0]].equal(expected_ids[valid[:, 0]])


@pytest.mark.usefixtures("rows")
def test_noise() -> None:
    keys, ids = draw_keys(3000), torch.randperm(1 << 18, generator=torch.Generator().manual_seed(2)).int()[:1000]
    for own, own_keys in ((ids[:130], keys), (ids.view(500, 2), keys[:500]), (ids[None], keys[:1])):
        assert host_rows.make_noise(own, own_keys).equal(noise.make_noise(own, own_keys))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("num_ids", [1, 5, 50, 1000])
def test_draws(num_ids: int) -> None:
    generator = torch.Generator().manual_seed(num_ids)
    scores, keys = draw_logits(64, num_ids, num_ids), draw_keys(64)
    for ids in (torch.randperm(3000, generator=generator).int()[:num_ids], torch.arange(64 * num_ids).int().flip(0)):
        own = ids if len(ids) == num_ids else ids.view(64, num_ids)
        not_greedy = torch.tensor([[0.0, 1.0, 1.0]] * len(keys))
        assert host_rows.draw(own, scores, keys).equal(sampling.draw(own, scores, not_greedy, keys))
    # Sums of which several are the largest.
    ties = torch.full((2, 3), float("-inf")), draw_keys(2)
    assert host_rows.draw(torch.tensor([7, 2, 9], dtype=torch.int32), *ties).tolist() == [2, 2]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("num_scores", [1, 7, 50, 300])
def test_what_a_probability_leaves(num_scores: int) -> None:
    scores = -draw_logits(200, num_scores, num_scores).abs().sort().values
    weights = scores.exp()
    measure = weights.sum(dim=-1, keepdim=True) * 1.5
    for share in (1.0, 0.95, 0.5, 1e-3, 1e-45):
        params = torch.full((len(scores), 3), share)
        params[::9, 1] = 1.0
        left = scores.clone()
        host_rows.keep_nucleus(left, weights, measure, params[:, 1:2])
        is_kept = sampling.find_nucleus(weights, measure, params[:, 1:2])
        assert left[:, 1:].equal(scores.where(is_kept, float("-inf"))[:, 1:])
        assert left[:, 0].equal(scores[:, 0]), "the first one stays, however small its share is"


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("wide", ["ids", "keys"])
def test_noise_takes_no_other_integers(wide: str) -> None:
    given = {"ids": torch.arange(4, dtype=torch.int32), "keys": draw_keys(2)}
    with pytest.raises(AssertionError, match="native code reads no other numbers"):
        host_rows.make_noise(**given | {wide: given[wide].long()})
