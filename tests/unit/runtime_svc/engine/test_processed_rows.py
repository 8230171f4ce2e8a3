"""What processors count of a sequence is its tokens, whatever steps compute them and whatever runs beside it."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import msgspec
import pytest

from bundle.manifest import Serving
from runtime_svc.engine.config import ChunkLimits, EngineConfig
from tests.bundles.manifests import DYNAMIC
from tests.ranks.engines import BLOCKS, EngineHarness, StartEngine, collect, is_async, start_engine, tokens_of
from tests.ranks.fakes import VOCAB_SIZE, expected_tokens

__all__ = ["is_async", "start_engine"]

HOST: dict[str, Any] = BLOCKS | {"sampling": msgspec.structs.replace(DYNAMIC, mode="host")}
PENALIZED = {"repetition_penalty": 1.5}


def assert_counted(harness: EngineHarness, prompt: list[int], tokens: list[int]) -> None:
    """The steps that gave a sequence's tokens, and others that gave them again, counted just what came before."""
    counted, expected = list_all_counted(harness), list_counted(prompt, tokens)
    assert [one for one in counted if one[: len(expected[0])] == expected[0]] == expected


def list_all_counted(harness: EngineHarness) -> list[list[int]]:
    rows = [row for step in harness.ranks.steps for row in step.processed]
    return [array("i", row.pairs["pair_ids"]).tolist() for row in rows]


def list_counted(prompt: list[int], tokens: list[int]) -> list[list[int]]:
    """What each step of a sequence counts once: its prompt, and the tokens that came before."""
    return [[*dict.fromkeys([*prompt, *tokens[:length]])] for length in range(len(tokens))]


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        (HOST, ChunkLimits()),
        (BLOCKS, ChunkLimits()),
        (BLOCKS, ChunkLimits(max_tokens=4)),
        (BLOCKS | {"num_blocks": 20, "num_slots": 4}, ChunkLimits()),
        (BLOCKS | {"num_blocks": 20, "num_slots": 4, "serving": Serving(prefix_caching=True)}, ChunkLimits()),
    ],
    ids=["host", "whole", "chunked", "preempted", "cached"],
)
async def test_the_sequence_is_counted_whatever_steps_compute_it(
    start_engine: StartEngine, options: dict[str, Any], chunks: ChunkLimits
) -> None:
    harness = await start_engine(EngineConfig(chunks=chunks), **options)
    prompts = [[number + 5] * 13 for number in range(4)]
    streams = [harness.submit(prompt, max_new_tokens=30, sampling=PENALIZED) for prompt in prompts[:3]]
    streams.append(harness.submit(prompts[3], max_new_tokens=30))
    answers = [tokens_of(events) for events in await asyncio.gather(*map(collect, streams))]
    assert answers == [expected_tokens(prompt, 30) for prompt in prompts]
    assert bool(harness.engine.scheduler.statistics.preemptions) == ("num_slots" in options)
    for prompt, tokens in zip(prompts[:3], answers[:3], strict=True):
        assert_counted(harness, prompt, tokens)
    assert not any(prompts[3][0] == one[0] for one in list_all_counted(harness))


async def test_a_session_counts_its_whole_prompt(start_engine: StartEngine) -> None:
    harness = await start_engine(**BLOCKS)
    first = [5, 6, 7, 8, 9]
    answer = tokens_of(await collect(harness.submit(first, max_new_tokens=6, session="s", sampling=PENALIZED)))
    assert_counted(harness, first, answer)
    second = [*first, *answer, 11]
    again = tokens_of(await collect(harness.submit(second, max_new_tokens=4, session="s", sampling=PENALIZED)))
    assert harness.engine.scheduler.statistics.session_tokens
    assert_counted(harness, second, again)


async def test_sequences_of_a_call_count_their_own_tokens(start_engine: StartEngine) -> None:
    harness = await start_engine(**BLOCKS)
    stream = harness.submit_call([5, 6, 7], 3, max_new_tokens=8, temperature=0.7, seed=3, sampling=PENALIZED)
    events = [event async for event in stream]
    drawn = {tuple(tokens_of([one for one in events if one.sequence_index == index])) for index in range(3)}
    counted = {*map(tuple, list_all_counted(harness))}
    assert len(drawn) == 3
    assert counted == {tuple(own) for tokens in drawn for own in list_counted([5, 6, 7], [*tokens])}


def list_allowed(mask: bytes) -> list[int]:
    return [one for one in range(VOCAB_SIZE) if mask[one // 8] >> one % 8 & 1]


async def test_rows_that_count_no_tokens_are_called_ahead(start_engine: StartEngine, is_async: bool) -> None:
    """A step that is called ahead knows how many tokens came before, not which one was the last."""
    harness = await start_engine(**BLOCKS)
    sampling = {"forced_token_ids": (5, 6, 7), "min_new_tokens": 5}
    await collect(harness.submit([5, 6, 7], max_new_tokens=8, sampling=sampling, stop_token_ids={9}))
    rows = [row for step in harness.ranks.steps for row in step.processed]
    allowed = [None if row.mask is None else list_allowed(row.mask) for row in rows]
    assert allowed == [[5], [6], [7], *[[one for one in range(VOCAB_SIZE) if one != 9]] * 2, None, None, None]
    assert any(step.depends_on_previous for step in harness.ranks.steps) is is_async


async def test_executables_with_processors_get_no_rows(start_engine: StartEngine) -> None:
    harness = await start_engine(on_device=True, **BLOCKS)
    await collect(harness.submit([5, 6, 7], max_new_tokens=4, sampling=PENALIZED))
    assert not any(step.processed for step in harness.ranks.steps)
