"""Requests whose clients do not read: they keep their slots while no one wants them, and end when someone does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from edge.errors import ClientStalled
from runtime_svc.engine.engine import EngineConfig
from runtime_svc.engine.events import TokenDelta
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.engine.request import FinishReason, StallAction, StallPolicy, StallTimeouts
from tests.ranks.engines import (
    EngineHarness,
    StartEngine,
    collect,
    collect_rest,
    finished_of,
    letters,
    text_of,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import expected_tokens

TIMEOUT_S = 0.1
CONFIG = EngineConfig(stream_capacity=4, stall_timeouts=StallTimeouts(TIMEOUT_S, 10.0))
PAUSE = StallPolicy(StallAction.PAUSE, 10.0)
COALESCE = StallPolicy(StallAction.COALESCE, 10.0)
BUCKETS: dict[str, Any] = {"prompt_buckets": (8,), "token_buckets": (2048,)}

#: Takes what a paused request holds, or waits for its end.
Want = Callable[[EngineHarness], Coroutine[Any, Any, object]]
WANTS: dict[str, Want] = {
    "another request": lambda harness: collect(harness.submit([6], max_new_tokens=3)),
    "a reset": lambda harness: harness.engine.reset_kv_cache(InFlightPolicy.WAIT),
    "an unload": lambda harness: harness.engine.requests.wait_until_empty(),
}


def is_paused(harness: EngineHarness) -> bool:
    running = harness.engine.scheduler.running
    return bool(running) and all(request.is_paused for request in running)


@pytest.mark.parametrize("want", WANTS)
async def test_paused_request_ends_when_others_want_what_it_holds(start_engine: StartEngine, want: str) -> None:
    harness = await start_engine(CONFIG, num_slots=1, **BUCKETS)
    silent = harness.submit([5], stall=PAUSE)
    await wait_until(lambda: is_paused(harness))
    await asyncio.sleep(2 * TIMEOUT_S)
    assert is_paused(harness), "it holds its slot for longer than the timeout while no one wants it"
    async with asyncio.timeout(20 * TIMEOUT_S):
        await WANTS[want](harness)
    # The client may still read what was made for it, and why there is no more.
    events = await collect(silent)
    finish = finished_of(events).finish
    assert finish.reason is FinishReason.ABORTED
    assert isinstance(finish.error, ClientStalled)
    assert tokens_of(events) == expected_tokens([5], len(tokens_of(events)))
    assert len(tokens_of(events)) < 40


async def test_paused_request_goes_on_when_its_client_reads(start_engine: StartEngine) -> None:
    harness = await start_engine(CONFIG, num_slots=1, **BUCKETS)
    stream = harness.submit([5], stall=PAUSE)
    await wait_until(lambda: is_paused(harness))
    waiting = harness.submit([6], max_new_tokens=3)
    await asyncio.sleep(TIMEOUT_S / 2)
    assert tokens_of(await collect(stream)) == expected_tokens([5], 40)
    assert tokens_of(await collect(waiting)) == expected_tokens([6], 3)


@pytest.mark.parametrize(("read_every_s", "ends"), [(0.12, True), (0.02, False)], ids=["trickle", "slow"])
async def test_a_client_must_read_at_a_twentieth_of_the_pace_while_others_wait(
    start_engine: StartEngine, read_every_s: float, ends: bool
) -> None:
    """One token in every timeout would hold a slot for hours; a client that is merely slow is served."""
    timeout_s = 0.3
    config = EngineConfig(stream_capacity=4, stall_timeouts=StallTimeouts(timeout_s, 10.0))
    harness = await start_engine(config, num_slots=1, step_s=0.003, **BUCKETS)
    stream = harness.submit([5], max_new_tokens=1000, stall=PAUSE)
    await wait_until(lambda: is_paused(harness))
    waiting = harness.submit([6], max_new_tokens=3)
    deadline_s = asyncio.get_running_loop().time() + 2.5 * timeout_s
    while stream.finished is None and asyncio.get_running_loop().time() < deadline_s:
        await anext(stream)
        await asyncio.sleep(read_every_s)
    assert (stream.finished is not None) is ends
    stream.close()
    assert tokens_of(await collect(waiting)) == expected_tokens([6], 3)


async def test_coalesced_request_ends_by_itself_and_frees_its_slot(start_engine: StartEngine) -> None:
    harness = await start_engine(CONFIG, num_slots=1, **BUCKETS)
    silent = harness.submit([5], max_new_tokens=300, stall=COALESCE)
    assert tokens_of(await collect(harness.submit([6], max_new_tokens=3))) == expected_tokens([6], 3)
    assert not harness.engine.scheduler.num_running
    events = await collect(silent)
    # The first event was waited for by no one either, so there is one delta for all tokens.
    assert [type(event.payload).__name__ for event in events] == ["Accepted", "TokenDelta", "Finished"]
    assert tokens_of(events) == expected_tokens([5], 300)
    assert text_of(events) == letters(expected_tokens([5], 300))
    assert finished_of(events).finish.reason is FinishReason.LENGTH


async def test_coalesced_request_pauses_when_much_waits(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime_svc.engine.streams.MAX_JOINED_VALUES", 32)
    harness = await start_engine(CONFIG, num_slots=1, **BUCKETS)
    stream = harness.submit([5], max_new_tokens=300, stall=COALESCE)
    await wait_until(lambda: is_paused(harness))
    events = await collect_rest(stream)
    sizes = [len(event.payload.tokens) for event in events if isinstance(event.payload, TokenDelta)]
    assert max(sizes) == sizes[0] == 32
    assert tokens_of(events) == expected_tokens([5], 300)
