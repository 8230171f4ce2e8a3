"""Events that wait for a client may become one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from runtime_svc.engine.events import Accepted, Event, Finished, GeneratedToken, TokenDelta, TokenLogprob
from runtime_svc.engine.request import Finish, FinishReason, SamplingParams, Usage
from runtime_svc.engine.streams import OutputStream

ACCEPTED = Accepted("one", 1, SamplingParams(0.0, 0, 1.0, 0), 5)
FINISHED = Finished(Finish(FinishReason.LENGTH), Usage(1, 0, 1, 1, 1, 0.0, 0.0, 0.0, ()))


def make_stream(capacity: int = 4, *, joins: bool = True) -> tuple[OutputStream, list[str]]:
    calls: list[str] = []
    return (
        OutputStream(
            capacity, on_drained=lambda: calls.append("drained"), on_closed=lambda: calls.append("closed"), joins=joins
        ),
        calls,
    )


def delta(token_id: int, num_alternatives: int = 0) -> TokenDelta:
    alternatives = tuple(TokenLogprob(one, "x", -1.0) for one in range(num_alternatives))
    token = GeneratedToken(token_id, chr(97 + token_id), -0.5, alternatives)
    return TokenDelta(chr(97 + token_id), (token,))


async def take_all(stream: OutputStream) -> list[Event]:
    async with asyncio.timeout(1):
        return [event async for event in stream]


def ids_of(events: Sequence[Event]) -> list[list[int]]:
    return [
        [token.token_id for token in event.payload.tokens] for event in events if isinstance(event.payload, TokenDelta)
    ]


async def test_deltas_that_wait_become_one_with_everything_in_them() -> None:
    stream, _ = make_stream()
    for payload in (ACCEPTED, delta(0, 2), delta(1, 2), TokenDelta("rest", ()), FINISHED):
        stream.put(payload, 1)
    events = await take_all(stream)
    assert [event.sequence_number for event in events] == [0, 1, 2]
    joined = events[1].payload
    assert joined == TokenDelta("abrest", (*delta(0, 2).tokens, *delta(1, 2).tokens))
    assert (events[0].payload, events[2].payload) == (ACCEPTED, FINISHED)


async def test_deltas_of_different_weights_stay_apart() -> None:
    stream, _ = make_stream()
    for token_id, epoch in ((0, 1), (1, 1), (2, 2), (3, 2)):
        stream.put(delta(token_id), epoch)
    stream.put(FINISHED, 2)
    events = await take_all(stream)
    assert ids_of(events) == [[0, 1], [2, 3]]
    assert [event.weight_epoch for event in events] == [1, 2, 2]


async def test_a_client_that_reads_at_once_sees_every_delta_by_itself() -> None:
    stream, _ = make_stream()
    taken = []
    for token_id in range(3):
        stream.put(delta(token_id), 1)
        taken.append(await anext(stream))
    assert ids_of(taken) == [[0], [1], [2]]


async def test_other_streams_do_not_join() -> None:
    stream, _ = make_stream(joins=False)
    for payload in (delta(0), delta(1), FINISHED):
        stream.put(payload, 1)
    assert ids_of(await take_all(stream)) == [[0], [1]]


@pytest.mark.parametrize("num_alternatives", [0, 4])
async def test_joined_events_and_what_waits_are_bounded(num_alternatives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_svc.engine.streams.MAX_JOINED_VALUES", 20)
    stream, calls = make_stream(capacity=2)
    num_put = 0
    while not stream.is_full:
        stream.put(delta(num_put % 26, num_alternatives), 1)
        num_put += 1
    assert num_put == 20 // (1 + num_alternatives)
    stream.put(delta(25, num_alternatives), 1)
    assert len(ids_of([await anext(stream)])[0]) == num_put
    assert calls == ["drained"]
    assert not stream.is_full
    assert ids_of([await anext(stream)]) == [[25]]
