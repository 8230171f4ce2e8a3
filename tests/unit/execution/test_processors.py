"""Processors change logits as those of transformers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from bundle.abi.outputs import INVALID_ROW
from execution import processors, sampling
from execution.host_rows import change_row
from execution.sampling import candidates
from execution.sampling_parameters import SamplingParams
from execution.step import ProcessedRow
from tests.ranks.noise import draw_keys, measure_fit
from tests.ranks.processed_rows import Asked

VOCAB_SIZE = 50
NUM_CASES = 1000


def cases() -> Iterator[tuple[torch.Generator, Tensor, Tensor]]:
    """Random numbers, logits [V] and tokens [T] in which some are often there, many times over."""
    generator = torch.Generator().manual_seed(1)
    for case in range(NUM_CASES):
        logits = torch.randn(VOCAB_SIZE, generator=generator) * 4
        if case % 3 == 0:
            # Ties, and numbers that are 0.
            logits = logits.round()
        length = int(torch.randint(1, 40, (), generator=generator))
        yield generator, logits, torch.randint(0, (4, VOCAB_SIZE)[case % 2], (length,), generator=generator)


def draw(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def choose(generator: torch.Generator, count: int, below: int = VOCAB_SIZE) -> list[int]:
    return torch.randperm(below, generator=generator)[:count].tolist()


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """The same tokens are candidates, and their logits are equal but for rounding."""
    assert torch.equal(ours.isneginf(), theirs[0].isneginf())
    torch.testing.assert_close(ours, theirs[0], rtol=1e-6, atol=1e-6)


def change(
    logits: Tensor, tokens: Tensor, num_generated: int = 0, ends: Sequence[int] = (), **parameters: Any
) -> Tensor:
    """What the engine and the host make of logits behind tokens, of which the last ones are generated."""
    prompt, output = tokens.tolist(), []
    if num_generated:
        prompt, output = prompt[:-num_generated], prompt[-num_generated:]
    asked = Asked(SamplingParams(**parameters), prompt, output, tuple(ends))
    return change_row(logits, asked.describe(VOCAB_SIZE))


def test_bias() -> None:
    for generator, logits, tokens in cases():
        biases = {token: draw(generator, -9, 9) for token in choose(generator, 5)}
        theirs = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})
        assert_same(change(logits, tokens, logit_bias=biases), theirs(tokens[None], logits[None]))


def test_repetition_penalty_counts_each_token_of_prompt_and_output_once() -> None:
    for generator, logits, tokens in cases():
        penalty = draw(generator, 0.2, 3)
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(tokens[None], logits[None])
        assert_same(change(logits, tokens, len(tokens) // 2, repetition_penalty=penalty), theirs)


def test_frequency_and_presence_are_taken_off() -> None:
    """As OpenAI and vLLM define them: transformers has neither."""
    for generator, logits, tokens in cases():
        frequency, presence = draw(generator, -2, 2), draw(generator, -2, 2)
        expected, count = logits.clone(), len(tokens) // 2
        for token, number in Counter(tokens.tolist()[len(tokens) - count :]).items():
            expected[token] -= frequency * number + presence
        changed = change(logits, tokens, count, frequency_penalty=frequency, presence_penalty=presence)
        assert_same(changed, expected[None])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_repeated_ngrams(size: int) -> None:
    theirs = NoRepeatNGramLogitsProcessor(size)
    for _, logits, tokens in cases():
        expected = theirs(tokens[None], logits[None])
        assert_same(change(logits, tokens, len(tokens) // 2, no_repeat_ngram_size=size), expected)


def test_words() -> None:
    for generator, logits, tokens in cases():
        newest = tokens[: int(torch.randint(1, 5, (), generator=generator))]
        words = [choose(generator, length, 4) for length in (1, 2, 2, 3)]
        expected = NoBadWordsLogitsProcessor(words)(newest[None], logits[None])
        assert_same(change(logits, newest, len(newest) // 2, bad_words=tuple(map(tuple, words))), expected)


def test_allowed_tokens() -> None:
    for generator, logits, tokens in cases():
        allowed = choose(generator, 7)
        theirs = PrefixConstrainedLogitsProcessor(lambda *_, allowed=allowed: allowed, 1)
        expected = theirs(tokens[None], logits[None])
        assert_same(change(logits, tokens, allowed_token_ids=tuple(allowed)), expected)


def test_excluded_ends() -> None:
    for generator, logits, tokens in cases():
        ends = choose(generator, 2)
        theirs = MinNewTokensLengthLogitsProcessor(len(tokens), 1, ends)
        assert_same(change(logits, tokens, ends=ends), theirs(tokens[None], logits[None]))


def test_forced_tokens() -> None:
    for generator, logits, tokens in cases():
        forced = tuple(choose(generator, 2))
        changed = [change(logits, tokens, count, forced_token_ids=forced) for count in range(min(3, len(tokens)))]
        for one, token in zip(changed, forced, strict=False):
            theirs = ForcedBOSTokenLogitsProcessor(token)(torch.tensor([[3]]), logits[None])
            assert torch.equal(one.isneginf(), theirs[0].isneginf())
        assert all(one.equal(logits) for one in changed[2:])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (9, 1.0), (0, 0.8), (20, 0.9)])
def test_min_p_and_typical_p_come_behind_top_k_and_top_p(top_k: int, top_p: float) -> None:
    """Without ties, whose order is open: transformers may keep another one of equal tokens."""
    params, num_cut = torch.tensor([[float(top_k), top_p, 1.0]]), 0
    for generator, logits, tokens in cases():
        if len(set(logits.tolist())) < VOCAB_SIZE:
            continue
        min_p, typical_p = draw(generator, 0, 0.3), draw(generator, 0.05, 0.95)
        theirs = logits[None]
        if top_k:
            theirs = TopKLogitsWarper(top_k)(tokens[None], theirs)
        if top_p < 1:
            theirs = TopPLogitsWarper(top_p)(tokens[None], theirs)
        ids, scores = (one[0] for one in candidates(logits[None], params, 0))
        for cuts, warper in (
            ((min_p, 1.0), MinPLogitsWarper(min_p)),
            ((0.0, typical_p), TypicalLogitsWarper(typical_p)),
        ):
            expected = warper(tokens[None], theirs).softmax(-1)
            left = sampling.cut(scores[None], torch.tensor([cuts]), params)[0]
            ours = torch.zeros(VOCAB_SIZE).index_put((ids,), left.softmax(-1))
            assert torch.equal(ours > 0, expected[0] > 0)
            torch.testing.assert_close(ours, expected[0], rtol=1e-5, atol=1e-6)
            num_cut += int((left.exp() > 0).sum() < (scores.exp() > 0).sum())
    assert num_cut > NUM_CASES / 2


def test_what_is_cut_is_never_drawn_and_the_rest_as_often_as_it_should_be() -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    params, rows = torch.tensor([[0.0, 0.9, 1.0]]), 50_000
    ids, scores = candidates(logits, params, 0)
    left = sampling.cut(scores, torch.tensor([[0.02, 0.6]]), params)
    drawn = sampling.draw(ids, left.expand(rows, VOCAB_SIZE), params, draw_keys(rows))
    expected = logits
    for warper in (TopPLogitsWarper(0.9), MinPLogitsWarper(0.02), TypicalLogitsWarper(0.6)):
        expected = warper(torch.tensor([[0]]), expected)
    counts = torch.bincount(drawn, minlength=VOCAB_SIZE)
    assert torch.equal(counts > 0, expected[0] > float("-inf"))
    assert measure_fit(counts, expected.softmax(-1)[0]) > 0.001


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 2 * processors._PART - 7])
@pytest.mark.parametrize("global_topk", [0, 30])
def test_host_and_graphs_draw_the_same(vocab_size: int, global_topk: int) -> None:
    """Whatever rows ask for, alone or together."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(30, vocab_size, generator=generator) * 2
    kinds = torch.tensor([[0, 1.0, 1.0], [0, 0.9, 1.3], [20, 1.0, 0.7], [9, 0.8, 1.5], [0, 1.0, 0.0], [1, 0.5, 2.0]])
    params, keys, cuts = kinds.repeat(5, 1), draw_keys(30), torch.tensor([[0.0, 1.0]]).repeat(30, 1)
    cuts[::7] = torch.tensor([0.05, 1.0])
    rows = [ProcessedRow(row, cuts=tuple(cuts[row].tolist())) for row in range(0, 30, 7)]
    tokens = processors.sample_on_host(logits, params, keys, rows, global_topk)
    assert torch.equal(tokens, sampling.sample(logits, params, keys, global_topk, cuts))
    for row in range(30):
        one, own = slice(row, row + 1), [replace(asked, row=0) for asked in rows if asked.row == row]
        alone = processors.sample_on_host(logits[one], params[one], keys[one], own, global_topk)
        assert alone == tokens[row]


@pytest.mark.parametrize("doubt", [processors._DOUBT, 2.0])
@pytest.mark.parametrize("steps", [0, 2])
def test_rows_without_a_limit_get_the_tokens_of_graphs(
    doubt: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the vocabulary is ordered, which great doubt asks for, or not; also where many logits are equal."""
    monkeypatch.setattr(processors, "_DOUBT", doubt)
    kinds = [
        (top_p, temperature, cuts)
        for top_p in (0.02, 0.5, 0.95, 1.0)
        for temperature in (0.7, 4.0)
        for cuts in ((0.0, 1.0), (0.01, 1.0), (0.0, 0.9), (1e-4, 0.2))
    ]
    for number in range(NUM_CASES // len(kinds) + 1):
        logits = torch.randn(len(kinds), 4099, generator=torch.Generator().manual_seed(number)) * 2
        if steps:
            logits = (logits * steps).round() / steps
        params = torch.tensor([(0.0, top_p, temperature) for top_p, temperature, _ in kinds])
        keys, cuts = draw_keys(len(kinds), number), torch.tensor([cuts for *_, cuts in kinds])
        rows = [ProcessedRow(row, cuts=cuts) for row, (*_, cuts) in enumerate(kinds)]
        tokens = processors.sample_on_host(logits, params, keys, rows, 0)
        assert tokens.equal(sampling.sample(logits, params, keys, 0, cuts))


def test_rows_of_earlier_releases_are_drawn_as_they_were() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(5, 3)
    rand = torch.tensor([[0.0], [0.49], [0.51], [0.79], [0.81]])
    params = torch.tensor([[0.0, 1.0, 1.0]]).expand(5, 3)
    assert processors.sample_on_host(logits, params, rand, [], 0).tolist() == [1, 1, 2, 2, 0]


def test_a_token_is_left_whatever_is_excluded() -> None:
    logits = torch.arange(4.0)
    words = tuple((token,) for token in range(4))
    for allowed, left in ((), logits), ((1,), torch.tensor([0, 1.0, 0, 0]).where(logits == 1, float("-inf"))):
        row = Asked(SamplingParams(bad_words=words, allowed_token_ids=allowed)).describe(4)
        assert change_row(logits, row).equal(left)


@pytest.mark.parametrize("vocab_size", [5, 32, 33, 100])
def test_a_constraint_rules(vocab_size: int) -> None:
    """Where the other exclusions leave nothing of it, it excludes alone."""
    allowed = (1, 4) if vocab_size < 32 else (1, 31, vocab_size - 1)
    mask = sum(1 << token for token in set(allowed)).to_bytes(4 * -(-vocab_size // 32), "little")
    logits = torch.arange(vocab_size).float()
    for asked, expected in (
        (SamplingParams(), allowed),
        (SamplingParams(allowed_token_ids=(0, 1)), (1,)),
        (SamplingParams(allowed_token_ids=(0, 2)), allowed),
        (SamplingParams(bad_words=tuple((one,) for one in allowed)), allowed),
        (SamplingParams(bad_words=tuple((one,) for one in allowed[1:])), allowed[:1]),
    ):
        left = change_row(logits, Asked(asked, constraint=mask).describe(vocab_size))
        assert (left > float("-inf")).nonzero()[:, 0].tolist() == sorted(set(expected))
        assert torch.equal(left[left > float("-inf")], logits[left > float("-inf")])


def test_rows_that_are_no_numbers_stay_invalid() -> None:
    """Also where a mask excludes what is no number, or leaves tokens alone that the model excludes."""
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[1, 7], logits[2, 5] = float("nan"), float("-inf")
    rows = [Asked(SamplingParams(forced_token_ids=(5,))).describe(VOCAB_SIZE, row) for row in (1, 2)]
    for temperature in (0.0, 1.0):
        params = torch.tensor([[0.0, 1.0, temperature]]).expand(4, -1)
        drawn = processors.sample_on_host(logits, params, draw_keys(4), rows, 0)
        assert (drawn == INVALID_ROW).tolist() == [False, True, True, False]
    assert logits[1, 7].isnan()


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 3, 40])
def test_tokens_of_large_vocabularies_are_those_of_executables(top_k: int, top_p: float) -> None:
    """With many logits that are equal, some of them excluded, and rows that leave fewer tokens than top_k."""
    generator, num_rows, vocab_size = torch.Generator().manual_seed(8), 30, 3001
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 4).round() / 2
    logits[::3, :1500] = float("-inf")
    logits[::5, 7:] = float("-inf")
    logits[::5, :7] = 1.0
    params = torch.tensor([[top_k, top_p, 0.7]]).expand(num_rows, -1)
    keys = draw_keys(num_rows)
    expected = sampling.sample(logits, params, keys, 64)
    assert processors.sample_on_host(logits, params, keys, (), 64).equal(expected)
    assert len(expected.unique()) > 10
