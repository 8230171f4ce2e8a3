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
    return processors.process(logits, asked.describe(VOCAB_SIZE))


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
        weights = scores.exp()
        for cut, warper in (
            (processors.cut_below(weights, min_p), MinPLogitsWarper(min_p)),
            (processors.cut_untypical(weights, typical_p), TypicalLogitsWarper(typical_p)),
        ):
            expected = warper(tokens[None], theirs).softmax(-1)
            ours = torch.zeros(VOCAB_SIZE).index_put((ids,), cut / cut.sum())
            assert torch.equal(ours > 0, expected[0] > 0)
            torch.testing.assert_close(ours, expected[0], rtol=1e-5, atol=1e-6)
            num_cut += int((cut > 0).sum() < (weights > 0).sum())
    assert num_cut > NUM_CASES / 2


def test_what_is_cut_is_never_drawn_and_the_rest_as_often_as_it_should_be() -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    params, rows = torch.tensor([[0.0, 0.9, 1.0]]), 50_000
    ids, scores = (one[0] for one in candidates(logits, params, 0))
    drawn = sampling.draw(ids, processors.cut(scores, 0.02, 0.6).expand(rows, VOCAB_SIZE), params, draw_keys(rows))
    expected = logits
    for warper in (TopPLogitsWarper(0.9), MinPLogitsWarper(0.02), TypicalLogitsWarper(0.6)):
        expected = warper(torch.tensor([[0]]), expected)
    counts = torch.bincount(drawn, minlength=VOCAB_SIZE)
    assert torch.equal(counts > 0, expected[0] > float("-inf"))
    assert measure_fit(counts, expected.softmax(-1)[0]) > 0.001


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 2 * processors._PART - 7])
@pytest.mark.parametrize("global_topk", [0, 30])
def test_host_and_graphs_draw_the_same(vocab_size: int, global_topk: int) -> None:
    """Whatever rows ask for, alone or together, also beside rows that are cut."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(30, vocab_size, generator=generator) * 2
    kinds = torch.tensor([[0, 1.0, 1.0], [0, 0.9, 1.3], [20, 1.0, 0.7], [9, 0.8, 1.5], [0, 1.0, 0.0], [1, 0.5, 2.0]])
    params, keys = kinds.repeat(5, 1), draw_keys(30)
    rows = [ProcessedRow(row, cuts=(0.05, 1.0)) for row in range(0, 30, 7)]
    tokens = processors.sample_on_host(logits, params, keys, rows, global_topk)
    graphs = sampling.sample(logits, params, keys, global_topk)
    others = [row for row in range(30) if row % 7]
    assert torch.equal(tokens[others], graphs[others])
    for row in range(30):
        one, own = slice(row, row + 1), [replace(asked, row=0) for asked in rows if asked.row == row]
        alone = processors.sample_on_host(logits[one], params[one], keys[one], own, global_topk)
        assert alone == tokens[row]


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
        assert processors.process(logits, row).equal(left)


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
        left = processors.process(logits, Asked(asked, constraint=mask).describe(vocab_size))
        assert (left > float("-inf")).nonzero()[:, 0].tolist() == sorted(set(expected))
        assert torch.equal(left[left > float("-inf")], logits[left > float("-inf")])


def test_rows_that_are_no_numbers_stay_invalid() -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[1, 7] = float("nan")
    row = Asked(SamplingParams(0.0, forced_token_ids=(5,))).describe(VOCAB_SIZE, 1)
    params = torch.tensor([[0.0, 1.0, 0.0]]).expand(3, -1)
    drawn = processors.sample_on_host(logits, params, draw_keys(3), [row], 0)
    assert drawn.tolist() == [0, INVALID_ROW, 0]
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
