"""Requests whose clients do not read: they keep their slots while no one wants them, and end when someone does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.errors import ClientStalled
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.events import TokenDelta
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.engine.pauses import PausedRequests
from runtime_svc.engine.request import (
    Finish,
    FinishReason,
    Request,
    StallAction,
    StallPolicy,
    StallTimeouts,
    Timeline,
)
from runtime_svc.engine.streams import OutputStream
from tests.hang_guard import HANG_S
from tests.ranks.engines import (
    BLOCKS,
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
from tests.ranks.fakes import BIAS, expected_tokens
from tests.ranks.scheduling import make_request

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
    async with asyncio.timeout(HANG_S):
        await WANTS[want](harness)
    # The client may still read what was made for it, and why there is no more.
    events = await collect(silent)
    finish = finished_of(events).finish
    assert finish.reason is FinishReason.ABORTED
    assert isinstance(finish.error, ClientStalled)
    assert tokens_of(events) == expected_tokens([5], len(tokens_of(events)))
    assert len(tokens_of(events)) < 40


async def test_request_that_finds_a_slot_costs_no_paused_one_its_own(start_engine: StartEngine) -> None:
    """It waits for a moment, too, but not for the slot of another."""
    harness = await start_engine(CONFIG, num_slots=3, **BUCKETS)
    silent = harness.submit([5], stall=PAUSE)
    await wait_until(lambda: is_paused(harness))
    harness.ranks.gate.clear()
    running = harness.submit([6], max_new_tokens=3)
    await wait_until(lambda: harness.ranks.is_running)
    waiting = harness.submit([7], max_new_tokens=3)
    await asyncio.sleep(3 * TIMEOUT_S)
    assert silent.finished is None
    harness.ranks.gate.set()
    for stream in (running, waiting):
        assert len(tokens_of(await collect(stream))) == 3


async def test_paused_request_ends_when_others_want_its_blocks(start_engine: StartEngine) -> None:
    """A slot is free, but no block."""
    harness = await start_engine(CONFIG, num_slots=2, **BLOCKS | {"num_blocks": 16})
    silent = harness.submit([5] * 40, stall=PAUSE)
    await wait_until(lambda: is_paused(harness))
    short = harness.submit([6], max_new_tokens=3)
    assert len(tokens_of(await collect(short))) == 3
    await asyncio.sleep(2 * TIMEOUT_S)
    assert silent.finished is None, "the short one found room beside it"
    async with asyncio.timeout(HANG_S):
        prompt = [7] * 30
        assert tokens_of(await collect(harness.submit(prompt, max_new_tokens=3))) == expected_tokens(prompt, 3)
    assert isinstance(finished_of(await collect(silent)).finish.error, ClientStalled)


async def test_paused_request_ends_when_others_want_the_slot_of_its_adapter(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    """The KV cache has room for all."""
    harness = await start_engine(CONFIG, num_slots=3, num_adapter_slots=1, **BUCKETS)
    first, second = (harness.load_adapter(key, tmp_path, number) for key, number in (("a", 10), ("b", 20)))
    silent, plain = harness.submit([5], stall=PAUSE, adapter=first), harness.submit([7], stall=PAUSE)
    await wait_until(lambda: harness.engine.scheduler.num_running == 2 and is_paused(harness))
    async with asyncio.timeout(HANG_S):
        other = harness.submit([6], max_new_tokens=3, adapter=second)
        assert tokens_of(await collect(other)) == expected_tokens([6], 3, bias=BIAS + 20)
    assert isinstance(finished_of(await collect(silent)).finish.error, ClientStalled)
    assert plain.finished is None, "it holds nothing that the other one wants"


async def test_paused_request_goes_on_when_its_client_reads(start_engine: StartEngine) -> None:
    config = replace(CONFIG, stall_timeouts=StallTimeouts(5.0, 10.0))
    harness = await start_engine(config, num_slots=1, **BUCKETS)
    stream = harness.submit([5], stall=PAUSE)
    await wait_until(lambda: is_paused(harness))
    waiting = harness.submit([6], max_new_tokens=3)
    await asyncio.sleep(0.02)
    assert tokens_of(await collect(stream)) == expected_tokens([5], 40)
    assert tokens_of(await collect(waiting)) == expected_tokens([6], 3)


class Pauses:
    """Paused requests without an engine, while others want what they hold; `ended` has how long each had waited."""

    def __init__(self, timeout_s: float) -> None:
        self.paused = PausedRequests(timeout_s, is_contended=lambda _: True, end=self._end)
        self.ended: list[float] = []

    def pause(self, *, age_s: float, paused_s: float) -> tuple[Request, OutputStream]:
        """Pauses a request of an age that was paused for some of it."""
        now_s = asyncio.get_running_loop().time()
        timeline = Timeline(now_s - age_s, started_s=now_s - age_s)
        request = make_request("one", 1, timeline=timeline, paused_s=paused_s)
        stream = OutputStream(1, on_drained=lambda: None, on_closed=lambda: None)
        self.paused.pause(request, stream)
        return request, stream

    def _end(self, request: Request, finish: Finish) -> None:
        self.paused.resume(request)
        assert finish.error is not None
        self.ended.append(float(finish.error.metadata["waited_s"]))


async def test_a_client_that_reads_next_to_nothing_does_not_hold_a_slot_for_hours() -> None:
    """It has read lately, but its request has stood still for nearly all of its time."""
    pauses = Pauses(timeout_s=3.0)
    pauses.pause(age_s=100.0, paused_s=97.0)
    await wait_until(lambda: bool(pauses.ended))
    assert pauses.ended[0] > 97


async def test_a_client_that_reads_at_a_tenth_of_the_pace_is_served() -> None:
    pauses = Pauses(timeout_s=3.0)
    request, _ = pauses.pause(age_s=100.0, paused_s=90.0)
    await asyncio.sleep(0.4)
    assert not pauses.ended
    pauses.paused.resume(request)
    assert 90.3 < request.paused_s < 100


async def test_a_client_that_reads_from_a_stream_above_its_capacity_is_not_silent() -> None:
    """One more event than the capacity waits after a step that had been called ahead: taking one leaves it full."""
    pauses = Pauses(timeout_s=0.5)
    _, stream = pauses.pause(age_s=100.0, paused_s=0.0)
    for _ in range(10):
        stream.num_taken += 1
        await asyncio.sleep(0.1)
    assert not pauses.ended
    await wait_until(lambda: bool(pauses.ended))


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
