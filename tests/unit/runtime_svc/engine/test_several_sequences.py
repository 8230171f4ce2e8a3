"""Calls that want several sequences of one prompt: what they share, what ends one and what ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from bundle.errors import KilnError
from bundle.manifest import Serving
from edge.errors import ClientStalled
from execution.errors import RankDied
from execution.sampling_parameters import SamplingParams
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.events import Accepted, Event, PromptDelta, TokenDelta
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.engine.prompt_reports import PromptLogprobs
from runtime_svc.engine.request import FinishReason, StallAction, StallPolicy, StallTimeouts
from runtime_svc.engine.streams import MergedStream, OutputStream
from runtime_svc.errors import (
    DeadlineExceeded,
    NumericsInvalid,
    PromptQuarantined,
    QueueFull,
    RequestAborted,
    RequestIdInUse,
)
from tests.hang_guard import HANG_S
from tests.ranks.engines import (
    BLOCKS,
    CACHING,
    FLAGS,
    EngineHarness,
    StartEngine,
    collect,
    collect_sequences,
    finished_of,
    letters,
    text_of,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import VOCAB_SIZE, expected_tokens

#: Each layout, and the tokens of a prompt of 23 tokens that all sequences but the first share.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "slots": ({"flags": FLAGS}, 0),
    "blocks": (BLOCKS, 20),
    "blocks, prefixes": (CACHING, 20),
}
PROMPT = [10 + number for number in range(23)]


def assert_sequences(
    sequences: list[list[Event]], prompt: list[int], count: int, seed: int, *, num_wanted: int
) -> None:
    """Fails unless each sequence has the tokens of a request with the next seed."""
    assert len(sequences) == num_wanted
    for index, events in enumerate(sequences):
        assert tokens_of(events) == expected_tokens(prompt, count, seed=(seed + index) % (1 << 64))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_slots", "ctx_batch_size"), [(4, 1), (4, 4), (2, 1)])
async def test_sequences_are_those_of_requests_with_the_next_seeds_and_share_whole_blocks(
    start_engine: StartEngine, layout: str, num_slots: int, ctx_batch_size: int
) -> None:
    """Also if there is room for a few at once, and in chunks, which a step takes 16 tokens of."""
    options, num_shared = LAYOUTS[layout]
    harness = await start_engine(**options | {"num_slots": num_slots, "ctx_batch_size": ctx_batch_size})
    seed = 2**64 - 2
    stream = harness.submit_call(PROMPT, 4, request_id="r", temperature=0.7, seed=seed, max_new_tokens=9)
    sequences = await collect_sequences(stream)
    assert_sequences(sequences, PROMPT, 9, seed, num_wanted=4)
    accepted = sequences[0][0].payload
    assert isinstance(accepted, Accepted)
    assert (accepted.request_id, accepted.sampling.seed) == ("r", seed)
    usages = [finished_of(events).usage for events in sequences]
    assert [usage.cached_prompt_tokens for usage in usages] == [0, *[num_shared] * 3]
    assert {(usage.prompt_tokens, usage.generated_tokens, usage.kv_tokens) for usage in usages} == {(23, 9, 31)}
    assert harness.count_computed() == 23 + 3 * (23 - num_shared)
    assert harness.engine.scheduler.kv.num_used_blocks == 0
    alone = await collect(harness.submit(PROMPT, temperature=0.7, seed=seed, max_new_tokens=9))
    assert tokens_of(alone) == tokens_of(sequences[0])
    assert stream.error is None


async def test_without_prefix_caching_only_sequences_of_one_call_share(start_engine: StartEngine) -> None:
    harness = await start_engine(**LAYOUTS["blocks"][0])
    for _ in range(2):
        both = await asyncio.gather(
            *(collect_sequences(harness.submit_call(PROMPT, 2, max_new_tokens=9)) for _ in range(2)),
        )
        for call in both:
            assert [finished_of(events).usage.cached_prompt_tokens for events in call] == [0, 20]
        assert finished_of(await collect(harness.submit(PROMPT, max_new_tokens=2))).usage.cached_prompt_tokens == 0


async def test_a_stop_string_ends_its_own_sequence(start_engine: StartEngine) -> None:
    harness = await start_engine()
    texts = [letters(expected_tokens([5], 30, seed=seed)) for seed in range(3)]
    stop = texts[1][10:13]
    assert stop not in texts[0] + " " + texts[2]
    stream = harness.submit_call([5], 3, temperature=0.7, max_new_tokens=30, stop_strings=(stop,))
    sequences = await collect_sequences(stream)
    assert [text_of(events) for events in sequences] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    reasons = [finished_of(events).finish.reason for events in sequences]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP_STRING, FinishReason.LENGTH]
    assert stream.error is None


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_invalid_numbers_end_their_own_sequence_and_the_call_says_so_at_its_end(
    start_engine: StartEngine, layout: str
) -> None:
    harness = await start_engine(step_s=0.001, **LAYOUTS[layout][0])
    stream = harness.submit_call(PROMPT, 3, temperature=0.7, max_new_tokens=30)
    running = harness.engine.scheduler._running
    await wait_until(lambda: len(running) == 3 and all(one.output_token_ids for one in running))
    harness.ranks.invalid_rows = (1,)
    await wait_until(lambda: harness.engine.scheduler.statistics.invalid_requests == 1)
    harness.ranks.invalid_rows = ()
    sequences = await collect_sequences(stream)
    (failed,) = [index for index in range(3) if finished_of(sequences[index]).finish.error is not None]
    for index, events in enumerate(sequences):
        count = len(tokens_of(events))
        assert tokens_of(events) == expected_tokens(PROMPT, count, seed=index)
        assert (count < 30) is (index == failed)
    assert isinstance(stream.error, NumericsInvalid)
    assert len(harness.ranks.zeroed) == 1


async def abort(harness: EngineHarness) -> None:
    assert harness.engine.requests.abort("r", "Abort")
    assert not harness.engine.requests.abort("r", "Abort")


async def reset(harness: EngineHarness) -> None:
    receipt = await harness.engine.reset_kv_cache(InFlightPolicy.ABORT)
    assert receipt.affected_sequences == 4


async def wait_for_deadline(harness: EngineHarness) -> None:
    await wait_until(lambda: not len(harness.engine.requests))


ENDS: dict[str, tuple[Callable[[EngineHarness], Any], dict[str, Any], FinishReason, type[KilnError]]] = {
    "abort": (abort, {}, FinishReason.ABORTED, RequestAborted),
    "reset": (reset, {}, FinishReason.ABORTED, RequestAborted),
    "lost ranks": (EngineHarness.lose_ranks, {}, FinishReason.ERROR, RankDied),
    "deadline": (wait_for_deadline, {"deadline_s": 0.05}, FinishReason.TIME, DeadlineExceeded),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cause", ENDS)
async def test_what_ends_a_call_ends_running_and_waiting_sequences(
    start_engine: StartEngine, layout: str, cause: str
) -> None:
    harness = await start_engine(step_s=0.002, **LAYOUTS[layout][0] | {"num_slots": 2})
    end, options, reason, error = ENDS[cause]
    stream = harness.submit_call(PROMPT, 4, request_id="r", **options)
    other = harness.submit([6], max_new_tokens=3)
    with pytest.raises(RequestIdInUse):
        harness.submit([7], request_id="r")
    # A deadline may come before.
    await wait_until(lambda: harness.engine.scheduler.num_running == 2 or len(harness.engine.requests) < 5)
    await end(harness)
    assert len(harness.engine.requests) <= 1
    sequences = await collect_sequences(stream)
    assert [finished_of(events).finish.reason for events in sequences] == [reason] * 4
    assert stream.error is finished_of(sequences[0]).finish.error
    assert isinstance(stream.error, error)
    assert tokens_of(await collect(other)) == expected_tokens([6], 3)
    assert harness.engine.scheduler.kv.num_used_blocks == 0
    assert harness.engine.scheduler.statistics.finished[reason] == 4
    again = harness.submit_call(PROMPT, 2, request_id="r", max_new_tokens=3, temperature=1.0)
    assert_sequences(await collect_sequences(again), PROMPT, 3, 0, num_wanted=2)


async def test_a_client_that_leaves_ends_all_sequences(start_engine: StartEngine) -> None:
    harness = await start_engine(num_slots=2)
    stream = harness.submit_call([5], 4)
    await anext(stream)
    stream.close()
    assert len(harness.engine.requests) == 0
    assert [end.finish.reason for end in stream.ends] == [FinishReason.ABORTED] * 4


async def test_the_queue_counts_sequences_and_takes_all_or_none(start_engine: StartEngine) -> None:
    harness = await start_engine(EngineConfig(queue_capacity=3), num_slots=2)
    with pytest.raises(QueueFull):
        harness.submit_call([5], 6)
    assert len(harness.engine.requests) == 0
    stream = harness.submit_call([5], 5, max_new_tokens=3)
    assert len(harness.engine.requests) == 5
    with pytest.raises(QueueFull):
        harness.submit([6])
    assert len(await collect_sequences(stream)) == 5


@pytest.mark.parametrize("caches", [False, True])
async def test_sequences_that_are_preempted_come_back_with_their_own_tokens(
    start_engine: StartEngine, caches: bool
) -> None:
    options = BLOCKS | {"num_blocks": 20, "serving": Serving(prefix_caching=caches), "num_slots": 4}
    harness = await start_engine(**options)
    sequences = await collect_sequences(harness.submit_call(PROMPT, 4, temperature=0.7, seed=3, max_new_tokens=30))
    assert_sequences(sequences, PROMPT, 30, 3, num_wanted=4)
    assert harness.engine.scheduler.statistics.preemptions
    assert harness.engine.scheduler.kv.num_used_blocks == 0


async def test_sequences_of_one_call_are_one_prompt_to_the_quarantine(start_engine: StartEngine) -> None:
    """Two losses convict it, though several of its sequences were computed; those that wait end with the others."""
    harness = await start_engine(step_s=0.002, num_slots=2)
    for _ in range(2):
        stream = harness.submit_call([5], 3)
        await wait_until(lambda: harness.engine.scheduler.num_running == 2)
        await harness.hold()
        await harness.lose_ranks()
        sequences = await collect_sequences(stream)
        assert all(isinstance(finished_of(events).finish.error, RankDied) for events in sequences)
    with pytest.raises(PromptQuarantined):
        harness.submit_call([5], 3)
    assert len(harness.engine.requests) == 0
    assert harness.engine.scheduler.statistics.quarantined_requests == 1


async def test_a_suspected_prompt_runs_its_sequences_apart(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=0.002)
    for _ in range(2):
        streams = [harness.submit_call([5], 2), harness.submit_call([6], 2)]
        await wait_until(lambda: harness.engine.scheduler.num_running == 4)
        await harness.hold()
        await harness.lose_ranks()
        for stream in streams:
            await collect_sequences(stream)
    stream = harness.submit_call([5], 3, temperature=0.7, max_new_tokens=20)
    assert_sequences(await collect_sequences(stream), [5], 20, 0, num_wanted=3)


TIMEOUT_S = 0.1
STALLS = EngineConfig(stream_capacity=4, stall_timeouts=StallTimeouts(TIMEOUT_S, 10.0))
PAUSE = StallPolicy(StallAction.PAUSE, 10.0)


async def test_a_client_that_does_not_read_is_held_up_by_no_sequence_of_its_own(start_engine: StartEngine) -> None:
    """One of its sequences waits for the slot that another one holds; then a stranger does, and all end."""
    harness = await start_engine(STALLS, num_slots=1)
    stream = harness.submit_call([5], 2, stall=PAUSE)
    await wait_until(lambda: any(one.is_paused for one in harness.engine.scheduler.running))
    await asyncio.sleep(3 * TIMEOUT_S)
    assert not stream.ends, "only its own sequence waits"
    async with asyncio.timeout(HANG_S):
        assert tokens_of(await collect(harness.submit([6], max_new_tokens=3))) == expected_tokens([6], 3)
    sequences = await collect_sequences(stream)
    assert [type(finished_of(events).finish.error) for events in sequences] == [ClientStalled] * 2


async def test_a_slow_client_gets_every_sequence_whole_and_each_joined_by_itself(start_engine: StartEngine) -> None:
    harness = await start_engine(EngineConfig(stream_capacity=4), num_slots=3)
    stream = harness.submit_call([5], 3, temperature=0.7)
    assert isinstance(stream, MergedStream)
    running = harness.engine.scheduler._running
    await wait_until(lambda: len(running) == 3 and all(one.is_paused for one in running))
    events = [await anext(stream) for _ in range(4)]
    assert [event.sequence_index for event in events] == [0, 1, 2, 0], "they take turns"
    deltas = [event.payload for event in events[1:]]
    assert all(isinstance(delta, TokenDelta) and len(delta.tokens) > 1 for delta in deltas)
    events += [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    own = [[event for event in events if event.sequence_index == index] for index in range(3)]
    assert_sequences(own, [5], 40, 0, num_wanted=3)


async def test_the_prompt_comes_before_tokens_of_any_sequence() -> None:
    """However late the consumer comes."""
    streams = [OutputStream(9, on_drained=int, on_closed=int) for _ in range(2)]
    prompt = PromptLogprobs([5, 6], None)
    accepted, tokens = Accepted("r", 2, SamplingParams(), 9), TokenDelta("a", ())
    before = [accepted, PromptDelta(prompt, 0, 1), PromptDelta(prompt, 1, 1)]
    for payload in (*before, tokens):
        streams[0].put(payload, 1)
    streams[1].put(tokens, 1)
    stream = MergedStream(streams)
    events = [await anext(stream) for _ in range(5)]
    assert [event.payload for event in events] == [*before, tokens, tokens]
    assert [event.sequence_index for event in events] == [0, 0, 0, 1, 0]


async def test_what_the_log_probabilities_of_a_sequence_are_is_its_own(start_engine: StartEngine) -> None:
    harness = await start_engine()
    stream = harness.submit_call([5], 2, temperature=0.7, top_logprobs=1, max_new_tokens=6)
    for events in await collect_sequences(stream):
        for event in events:
            tokens = event.payload.tokens if isinstance(event.payload, TokenDelta) else ()
            assert all(token.logprob == -token.token_id / 10 for token in tokens)
            assert all(token.top_logprobs[0].token_id == token.token_id % VOCAB_SIZE for token in tokens)
