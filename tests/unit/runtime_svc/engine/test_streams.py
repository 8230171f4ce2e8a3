"""Token deltas that wait for a client become one event."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from execution.sampling_parameters import SamplingParams
from runtime_svc.engine.events import Accepted, Event, Finished, GeneratedToken, TokenDelta, TokenLogprob
from runtime_svc.engine.request import Finish, FinishReason, Usage
from runtime_svc.engine.streams import MAX_JOINED_VALUES, OutputStream
from tests.ranks.engines import (
    StartEngine,
    collect,
    collect_rest,
    finished_of,
    generated_of,
    letters,
    text_of,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import expected_tokens

ACCEPTED = Accepted("one", 1, SamplingParams(0.0, 0, 1.0, 0), 5)
FINISHED = Finished(Finish(FinishReason.LENGTH), Usage(1, 0, 1, 1, 1, 0.0, 0.0, 0.0, ()))


def make_stream(capacity: int = 4, *, counts_values: bool = False) -> tuple[OutputStream, list[None]]:
    """A stream, and as many items as it has told that it is drained."""
    drained: list[None] = []
    on: Any = {"on_drained": lambda: drained.append(None), "on_closed": lambda: None}
    return OutputStream(capacity, counts_values=counts_values, **on), drained


def delta(token_id: int, num_alternatives: int = 0) -> TokenDelta:
    alternatives = tuple(TokenLogprob(one, "x", -1.0) for one in range(num_alternatives))
    token = GeneratedToken(token_id, chr(97 + token_id), -0.5, alternatives)
    return TokenDelta(chr(97 + token_id), (token,))


def ids_of(events: Sequence[Event]) -> list[list[int]]:
    return [
        [token.token_id for token in event.payload.tokens] for event in events if isinstance(event.payload, TokenDelta)
    ]


async def test_deltas_that_wait_become_one_with_everything_in_them() -> None:
    stream, _ = make_stream()
    for payload in (ACCEPTED, delta(0, 2), delta(1, 2), TokenDelta("rest", ()), FINISHED):
        stream.put(payload, 1)
    events = await collect_rest(stream)
    assert [event.sequence_number for event in events] == [0, 1, 2]
    joined = events[1].payload
    assert joined == TokenDelta("abrest", (*delta(0, 2).tokens, *delta(1, 2).tokens))
    assert (events[0].payload, events[2].payload) == (ACCEPTED, FINISHED)


async def test_deltas_of_different_weights_stay_apart() -> None:
    stream, _ = make_stream()
    for token_id, epoch in ((0, 1), (1, 1), (2, 2), (3, 2)):
        stream.put(delta(token_id), epoch)
    stream.put(FINISHED, 2)
    events = await collect_rest(stream)
    assert ids_of(events) == [[0, 1], [2, 3]]
    assert [event.weight_epoch for event in events] == [1, 2, 2]


async def test_a_stream_that_counts_events_is_full_of_them_and_empty_at_once() -> None:
    stream, drained = make_stream(capacity=3)
    for token_id in range(3):
        assert not stream.is_full
        stream.put(delta(token_id), 1)
    assert stream.is_full
    assert ids_of([await anext(stream)]) == [[0, 1, 2]]
    assert len(drained) == 1


async def test_logits_count_as_values() -> None:
    """A token with those of a vocabulary has an event of its own."""
    stream, _ = make_stream()
    logits = memoryview(array("f", [0.0] * MAX_JOINED_VALUES))
    for token_id in range(2):
        stream.put(TokenDelta("x", (GeneratedToken(token_id, "x", None, (), logits),)), 1)
    stream.put(delta(2), 1)
    stream.put(FINISHED, 1)
    assert ids_of(await collect_rest(stream)) == [[0], [1], [2]]


@pytest.mark.parametrize("num_alternatives", [0, 4])
async def test_joined_events_and_what_waits_are_bounded(num_alternatives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_svc.engine.streams.MAX_JOINED_VALUES", 20)
    stream, drained = make_stream(capacity=2, counts_values=True)
    num_put = 0
    while not stream.is_full:
        stream.put(delta(num_put % 26, num_alternatives), 1)
        num_put += 1
    assert num_put == 20 // (1 + num_alternatives)
    stream.put(delta(25, num_alternatives), 1)
    assert len(ids_of([await anext(stream)])[0]) == num_put
    assert len(drained) == 1
    assert not stream.is_full
    assert ids_of([await anext(stream)]) == [[25]]


async def test_a_late_client_gets_what_a_client_in_time_gets(start_engine: StartEngine) -> None:
    """Text behind a stop string stays out, and log probabilities and usage are the same."""
    tokens = expected_tokens([5], 12)
    stop_string = letters(tokens[4:6])
    events_of = []
    for is_late in (False, True):
        harness = await start_engine()
        stream = harness.submit([5], stop_strings=(stop_string,), top_logprobs=2, max_new_tokens=12)
        if is_late:
            await wait_until(lambda stream=stream: stream.finished is not None)  # type: ignore[misc]
        events_of.append(await collect(stream))
    in_time, late = events_of
    assert ids_of(in_time) == [[token] for token in tokens[:6]]
    assert len(late) == 3, "accepted, all tokens, finished"
    assert text_of(late) == text_of(in_time) == letters(tokens[:4])
    assert generated_of(late) == generated_of(in_time)
    assert tokens_of(late) == tokens[:6]
    assert finished_of(late).finish == finished_of(in_time).finish
    assert finished_of(late).usage.generated_tokens == finished_of(in_time).usage.generated_tokens == 6
