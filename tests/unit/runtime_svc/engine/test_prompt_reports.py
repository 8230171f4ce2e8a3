"""What requests tell of their prompts, however steps part these and whatever the KV cache holds."""

from __future__ import annotations

from typing import Any

import pytest

from bundle.abi.inputs import LEFT_PADDED, PROMPT_LOGPROBS
from bundle.abi.outputs import EMBEDDINGS
from bundle.manifest import Serving
from runtime_svc.engine.config import ChunkLimits, EngineConfig
from runtime_svc.engine.events import Event, GeneratedToken, PromptDelta, TokenDelta
from runtime_svc.engine.prompt_reports import PromptEmbedding, PromptLogprobs, normalize
from runtime_svc.engine.streams import MAX_JOINED_VALUES
from runtime_svc.text.codec import SequenceText
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.ranks.engines import (
    CACHING,
    FLAGS,
    EngineHarness,
    LetterTokenizer,
    StartEngine,
    collect,
    collect_sequences,
    finished_of,
    generated_of,
    letters,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import VOCAB_SIZE, expected_tokens, tell_logprob, tell_top

TELLING: dict[str, Any] = {"flags": (*FLAGS, PROMPT_LOGPROBS, EMBEDDINGS)}
PROMPT = list(range(10, 50))
#: Chunks of 8 tokens, of which the last one of 41 has one.
CHUNKS = EngineConfig(chunks=ChunkLimits(max_tokens=8))


def ask(prompt: list[int], num_top: int | None = 2) -> PromptLogprobs:
    report = PromptLogprobs(prompt, num_top)
    report.text = SequenceText(LetterTokenizer(), ())  # type: ignore[arg-type]
    return report


def told_of(events: list[Event]) -> tuple[str, list[GeneratedToken]]:
    """Text and tokens of the prompt, which come before all others."""
    kinds = [type(event.payload) for event in events if isinstance(event.payload, PromptDelta | TokenDelta)]
    assert kinds == sorted(kinds, key=lambda kind: kind is TokenDelta)
    parts = [event.payload.list_tokens() for event in events if isinstance(event.payload, PromptDelta)]
    return "".join(text for text, _ in parts), [token for _, tokens in parts for token in tokens]


def check_told(events: list[Event], prompt: list[int], num_top: int = 2) -> None:
    text, tokens = told_of(events)
    assert text == letters(prompt)
    assert [token.token_id for token in tokens] == prompt
    assert [token.text_offset for token in tokens] == list(range(len(prompt)))
    assert (tokens[0].logprob, tokens[0].top_logprobs) == (None, ())
    for before, token in zip(prompt, tokens[1:], strict=False):
        assert token.logprob == tell_logprob(before, token.token_id)
        assert [(one.token_id, one.logprob) for one in token.top_logprobs] == tell_top(before, num_top)


async def generate(harness: EngineHarness, prompt: list[int], report: Any, **options: Any) -> list[Event]:
    events = await collect(harness.submit(prompt, max_new_tokens=3, report=report, **options))
    assert tokens_of(events) == expected_tokens(prompt, 3)
    return events


@pytest.mark.parametrize("length", [1, 2, 8, 9, 40, 41])
async def test_prompts_in_chunks(start_engine: StartEngine, length: int) -> None:
    """A last chunk of one token is none of token_generation's, which says nothing."""
    harness = await start_engine(CHUNKS, **TELLING, token_buckets=(64,))
    prompt = list(range(10, 10 + length))
    running = harness.submit([5], max_new_tokens=60)
    await wait_until(lambda: harness.engine.num_steps > 2)
    check_told(await generate(harness, prompt, ask(prompt)), prompt)
    for pooling, expected in (("mean", [sum(prompt) / length, 1.0]), ("last", [prompt[-1], 1.0])):
        embedding = PromptEmbedding(length, pooling)  # type: ignore[arg-type]
        await generate(harness, prompt, embedding)
        assert embedding.values == expected
    running.close()


async def test_left_padded_prompts(start_engine: StartEngine) -> None:
    harness = await start_engine(flags=(*DYNAMIC_FLAGS, LEFT_PADDED, PROMPT_LOGPROBS))
    check_told(await generate(harness, PROMPT[:5], ask(PROMPT[:5], 3)), PROMPT[:5], 3)


async def test_only_what_needs_all_of_a_prompt_computes_what_is_cached(start_engine: StartEngine) -> None:
    harness = await start_engine(**CACHING | TELLING)

    async def count_cached(report: Any) -> int:
        events = await generate(harness, PROMPT, report)
        if isinstance(report, PromptLogprobs) and report.num_top is not None:
            check_told(events, PROMPT)
        return finished_of(events).usage.cached_prompt_tokens

    reports = [None, ask(PROMPT), ask(PROMPT, None), PromptEmbedding(40, "mean"), PromptEmbedding(40, "last")]
    assert [await count_cached(one) for one in reports] == [0, 0, 36, 0, 36]
    for report in reports[3:]:
        assert isinstance(report, PromptEmbedding)
        assert report.values[1] == 1.0


async def test_a_prompt_that_starts_anew_is_told_once(start_engine: StartEngine) -> None:
    """Three sequences outgrow the cache, so that the newest give up their blocks and compute all again."""
    harness = await start_engine(
        **TELLING | {"num_blocks": 20, "block_tokens": 4, "serving": Serving(prefix_caching=True)}
    )
    prompts = [[first, *PROMPT[:15]] for first in (1, 3, 4)]
    streams = [harness.submit(one, max_new_tokens=40, report=ask(one)) for one in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        events = await collect(stream)
        assert tokens_of(events) == expected_tokens(prompt, 40)
        check_told(events, prompt)
    assert harness.engine.scheduler.statistics.preemptions > 0


async def test_one_sequence_tells_of_the_prompt_of_all(start_engine: StartEngine) -> None:
    harness = await start_engine(**CACHING | TELLING)
    stream = harness.submit_call(PROMPT, 3, max_new_tokens=3, report=ask(PROMPT))
    first, *others = await collect_sequences(stream)
    check_told(first, PROMPT)
    assert [told_of(own) for own in others] == [("", [])] * 2


async def test_long_prompts_come_in_events_of_a_few_values(start_engine: StartEngine) -> None:
    harness = await start_engine(**TELLING, prompt_buckets=(1024,), token_buckets=(1100,))
    prompt = [3 + number % (VOCAB_SIZE - 3) for number in range(1000)]
    events = await generate(harness, prompt, ask(prompt, 20))
    check_told(events, prompt, 20)
    counts = [event.payload.count for event in events if isinstance(event.payload, PromptDelta)]
    assert max(counts) * 21 <= MAX_JOINED_VALUES
    assert sum(counts) == 1000


async def test_the_prompt_is_told_without_probabilities(start_engine: StartEngine) -> None:
    harness = await start_engine()
    text, tokens = told_of(await generate(harness, PROMPT[:5], ask(PROMPT[:5], None)))
    assert text == letters(PROMPT[:5])
    assert [(token.token_id, token.logprob) for token in tokens] == [(one, None) for one in PROMPT[:5]]


async def test_log_probabilities_come_with_offsets_and_their_sum(start_engine: StartEngine) -> None:
    harness = await start_engine()
    events = await collect(harness.submit([5], max_new_tokens=4, top_logprobs=1))
    tokens = generated_of(events)
    assert [token.text_offset for token in tokens] == [0, 1, 2, 3]
    total = sum(token.logprob for token in tokens if token.logprob is not None)
    assert finished_of(events).cumulative_logprob == pytest.approx(total) != 0
    plain = await collect(harness.submit([5], max_new_tokens=4))
    assert {token.text_offset for token in generated_of(plain)} == {None}
    assert finished_of(plain).cumulative_logprob is None


def test_lengths_of_vectors() -> None:
    assert normalize([3.0, -4.0]) == [0.6, -0.8]
    assert normalize([0.0, 0.0]) == [0.0, 0.0]
