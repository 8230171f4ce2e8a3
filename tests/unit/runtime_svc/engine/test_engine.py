"""The engine on ranks whose tokens can be computed by hand."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.events import Accepted, TokenDelta
from runtime_svc.engine.request import BucketKey, FinishReason
from runtime_svc.errors import NumericsInvalid, QueueFull, RequestAborted
from tests.bundles.manifests import DYNAMIC
from tests.ranks.engines import (
    StartEngine,
    collect,
    finished_of,
    generated_of,
    is_async,
    letters,
    text_of,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import expected_tokens

__all__ = ["is_async"]


async def test_stream_of_one_request(start_engine: StartEngine) -> None:
    harness = await start_engine()
    events = await collect(harness.submit([3, 4, 5], request_id="one", max_new_tokens=20))
    accepted = events[0].payload
    assert isinstance(accepted, Accepted)
    assert (accepted.request_id, accepted.num_prompt_tokens, accepted.max_new_tokens) == ("one", 3, 20)
    assert tokens_of(events) == expected_tokens([3, 4, 5], 20)
    assert text_of(events) == letters(expected_tokens([3, 4, 5], 20))
    finished = finished_of(events)
    assert finished.finish.reason is FinishReason.LENGTH
    usage = finished.usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.generated_tokens) == (3, 0, 20)
    assert (usage.kv_blocks, usage.kv_tokens) == (1, 22), "the last token is never computed"
    assert min(usage.queue_s, usage.prefill_s, usage.decode_s) >= 0
    # Positions 3 to 15 take bucket 16, the rest 64.
    assert {(one.key, one.steps, one.padding_tokens) for one in usage.buckets} == {
        (BucketKey("context_encoding", (8,)), 1, 5),
        (BucketKey("token_generation", (16,)), 13, 0),
        (BucketKey("token_generation", (64,)), 6, 0),
    }


@pytest.mark.parametrize("mode", ["on_device", "host"])
async def test_a_row_that_the_executable_calls_invalid_ends_its_request_alone(
    start_engine: StartEngine, mode: str
) -> None:
    """Whether or not steps are called ahead."""
    harness = await start_engine(sampling=msgspec.structs.replace(DYNAMIC, mode=mode), step_s=0.001)
    good, bad = (harness.submit([token], max_new_tokens=30) for token in (5, 6))
    await wait_until(lambda: len(harness.ranks.steps) > 6)
    harness.ranks.invalid_rows = (1,)
    events = await collect(bad)
    assert tokens_of(events) == expected_tokens([6], len(tokens_of(events)))
    assert 0 < len(tokens_of(events)) < 30
    finish = finished_of(events).finish
    assert finish.reason is FinishReason.ERROR
    assert isinstance(finish.error, NumericsInvalid)
    assert finish.error.metadata["num_tokens"] == str(1 + len(tokens_of(events)))
    harness.ranks.invalid_rows = ()
    later = harness.submit([7], max_new_tokens=5)
    assert tokens_of(await collect(later)) == expected_tokens([7], 5)
    assert harness.ranks.zeroed == [[1]], "what is NaN in a slot reaches its next owner"
    assert tokens_of(await collect(good)) == expected_tokens([5], 30)
    assert harness.engine.scheduler.statistics.invalid_requests == 1


async def test_batch_mates_that_come_and_go_change_nothing(start_engine: StartEngine) -> None:
    harness = await start_engine(num_slots=3, ctx_batch_size=2)
    source = random.Random(1)

    async def one(index: int) -> None:
        await asyncio.sleep(source.random() / 50)
        prompt = [source.randrange(3, 100) for _ in range(source.randint(1, 16))]
        count = source.randint(1, 40)
        temperature = source.choice([0.0, 1.0])
        stream = harness.submit(prompt, max_new_tokens=count, temperature=temperature, seed=index)
        expected = expected_tokens(prompt, count, seed=index if temperature else None)
        assert tokens_of(await collect(stream)) == expected

    await asyncio.gather(*(one(index) for index in range(60)))
    assert harness.engine.scheduler.num_running == 0


async def test_stop_token_is_reported_without_text(start_engine: StartEngine) -> None:
    harness = await start_engine()
    expected = expected_tokens([5], 6)
    events = await collect(harness.submit([5], stop_token_ids=(expected[5],)))
    assert tokens_of(events) == expected
    assert text_of(events) == letters(expected[:5])
    last = events[-2].payload
    assert isinstance(last, TokenDelta)
    assert last.tokens[0].text == ""
    finished = finished_of(events)
    assert finished.finish.reason is FinishReason.STOP_TOKEN
    assert finished.finish.stop_token_id == expected[5]
    assert finished.usage.generated_tokens == 6


async def test_stop_string_across_tokens_is_cut_out(start_engine: StartEngine) -> None:
    harness = await start_engine()
    whole = letters(expected_tokens([5], 20))
    stop = whole[7:10]
    assert whole.index(stop) == 7
    events = await collect(harness.submit([5], max_new_tokens=20, stop_strings=("nothing", stop)))
    assert text_of(events) == whole[:7]
    finished = finished_of(events)
    assert finished.finish.reason is FinishReason.STOP_STRING
    assert finished.finish.stop_string == stop
    assert len(tokens_of(events)) == finished.usage.generated_tokens == 10
    await wait_until(lambda: harness.engine.scheduler.num_running == 0)


async def test_stop_string_in_the_last_token_wins_over_length(start_engine: StartEngine) -> None:
    harness = await start_engine()
    whole = letters(expected_tokens([5], 10))
    events = await collect(harness.submit([5], max_new_tokens=10, stop_strings=(whole[8:],)))
    assert finished_of(events).finish.reason is FinishReason.STOP_STRING
    assert text_of(events) == whole[:8]


async def test_text_that_became_no_stop_string_is_delivered_at_the_end(start_engine: StartEngine) -> None:
    harness = await start_engine()
    whole = letters(expected_tokens([5], 10))
    events = await collect(harness.submit([5], max_new_tokens=10, stop_strings=(whole[7:] + "!",)))
    assert finished_of(events).finish.reason is FinishReason.LENGTH
    assert text_of(events) == whole
    aborted = harness.submit([5], request_id="aborted", max_new_tokens=40, stop_strings=(whole + "!",))
    harness.ranks.gate.clear()
    await wait_until(lambda: bool(harness.engine.scheduler.running))
    harness.ranks.gate.set()
    await asyncio.sleep(0.002)
    harness.engine.requests.abort("aborted", "a test")
    events = await collect(aborted)
    assert text_of(events) == letters(tokens_of(events))


async def test_logprobs_are_those_of_the_row(start_engine: StartEngine) -> None:
    harness = await start_engine()
    streams = [harness.submit([5, 6], max_new_tokens=3, top_logprobs=count) for count in (None, 0, 2)]
    without, chosen, two = [await collect(stream) for stream in streams]
    tokens = expected_tokens([5, 6], 3)
    for events, num_top in [(without, 0), (chosen, 0), (two, 2)]:
        for token, generated in zip(tokens, generated_of(events), strict=True):
            assert generated.logprob == (None if events is without else -token / 10)
            assert [one.token_id for one in generated.top_logprobs] == [token, token + 1][:num_top]


async def test_abort_frees_the_slot_before_it_answers(start_engine: StartEngine) -> None:
    harness = await start_engine(num_slots=1)
    stream = harness.submit([5], request_id="running")
    waiting = harness.submit([6], request_id="waiting", max_new_tokens=3)
    harness.ranks.gate.clear()
    await wait_until(lambda: harness.engine.scheduler.num_running == 1)
    assert harness.engine.requests.abort("running", "Abort")
    assert harness.engine.scheduler.num_running == 0
    assert not harness.engine.requests.abort("running", "Abort")
    assert not harness.engine.requests.abort("never was", "Abort")
    harness.ranks.gate.set()
    finished = finished_of(await collect(stream))
    assert finished.finish.reason is FinishReason.ABORTED
    assert isinstance(finished.finish.error, RequestAborted)
    assert tokens_of(await collect(waiting)) == expected_tokens([6], 3)


async def test_abort_of_a_waiting_request(start_engine: StartEngine) -> None:
    harness = await start_engine(num_slots=1)
    harness.submit([5], request_id="running")
    waiting = harness.submit([6], request_id="waiting")
    assert harness.engine.requests.abort("waiting", "Abort")
    events = await collect(waiting)
    assert tokens_of(events) == []
    assert finished_of(events).usage.generated_tokens == 0
    usage = finished_of(events).usage
    assert (usage.prefill_s, usage.kv_blocks, usage.kv_tokens) == (0, 0, 0)


async def test_exactly_one_terminal_event_whoever_ends_it(start_engine: StartEngine) -> None:
    harness = await start_engine(num_slots=2)
    for round_ in range(30):
        stream = harness.submit([5], request_id="contested", max_new_tokens=4, deadline_s=0.001 * (round_ % 5))
        await asyncio.sleep(0.0003 * (round_ % 7))
        won = harness.engine.requests.abort("contested", "a test")
        reason = finished_of(await collect(stream)).finish.reason
        assert won == (reason is FinishReason.ABORTED)


async def test_slow_consumer_pauses_its_own_sequence_only(start_engine: StartEngine) -> None:
    harness = await start_engine(EngineConfig(stream_capacity=4), prompt_buckets=(8,), token_buckets=(64,))
    slow = harness.submit([5], request_id="slow")
    assert tokens_of(await collect(harness.submit([6]))) == expected_tokens([6], 40)
    assert harness.engine.scheduler.num_running == 1, "the slot stays"
    assert len(slow._events) <= 5
    steps = harness.engine.num_steps
    await asyncio.sleep(0.02)
    assert harness.engine.num_steps == steps, "no step runs for a client that does not read"
    assert tokens_of(await collect(slow)) == expected_tokens([5], 40)


async def test_full_queue_refuses_with_a_time_to_retry(start_engine: StartEngine) -> None:
    harness = await start_engine(EngineConfig(queue_capacity=2), num_slots=1)
    harness.ranks.gate.clear()
    streams = [harness.submit([5], max_new_tokens=2) for _ in range(3)]
    with pytest.raises(QueueFull) as caught:
        harness.submit([5])
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    harness.ranks.gate.set()
    for stream in streams:
        assert tokens_of(await collect(stream)) == expected_tokens([5], 2)
    harness.submit([5])


async def test_output_is_published_while_the_next_step_runs(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await start_engine()
    requests, overlaps = harness.engine.requests, []
    publish = requests.publish

    def watch() -> None:
        if requests._unpublished:
            overlaps.append(harness.ranks.is_running)
        publish()

    monkeypatch.setattr(requests, "publish", watch)
    await collect(harness.submit([5], max_new_tokens=6))
    assert overlaps == [True] * 5 + [False], "nothing runs after the last token"


@pytest.mark.parametrize("stop", ["token", "string", "client", "abort"])
async def test_a_sequence_may_end_at_any_token_and_its_slot_goes_on(start_engine: StartEngine, stop: str) -> None:
    expected = expected_tokens([5], 14)
    for length in range(3, 13):
        harness = await start_engine(num_slots=1)
        options: dict[str, Any] = {
            "token": {"stop_token_ids": (expected[length - 1],)},
            "string": {"stop_strings": (letters(expected[:length])[-2:],)},
        }.get(stop, {})
        stream = harness.submit([5], request_id="first", max_new_tokens=14, **options)
        while len(harness.engine.requests) and len(harness.ranks.steps) < length:  # noqa: ASYNC110
            await asyncio.sleep(0)
        next_ = harness.submit([7, 8], max_new_tokens=5)
        if stop == "client":
            stream.close()
        elif stop == "abort":
            harness.engine.requests.abort("first", "a test")
        tokens = tokens_of(await collect(stream))
        assert tokens == expected[: len(tokens)]
        if stop == "token":
            assert len(tokens) == expected.index(expected[length - 1]) + 1
        assert tokens_of(await collect(next_)) == expected_tokens([7, 8], 5)
        stream.close()
