"""Sessions, through an engine whose ranks read what slots and blocks hold."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bundle.abi.inputs import COMPUTED_CONTEXT, PromptLengths
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.kv.kept_sequences import SessionKeeper
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.engine.request import (
    FinishReason,
    Session,
    SessionLimits,
)
from runtime_svc.errors import SessionBusy, SessionNotFound, TooManySessions
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.ranks.engines import (
    BLOCKS,
    CACHING,
    FLAGS,
    NEW_BIAS,
    EngineHarness,
    StartEngine,
    collect,
    collect_rest,
    finished_of,
    swap,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import STATE_BYTES, expected_tokens
from tests.ranks.scheduling import make_request, make_scheduler, run_step

LAYOUTS: dict[str, dict[str, Any]] = {
    "slots": {"flags": FLAGS, "num_slots": 2},
    "slots, rows by slot": {"flags": (*DYNAMIC_FLAGS, COMPUTED_CONTEXT), "num_slots": 2},
    "blocks": BLOCKS | {"num_blocks": 32, "num_slots": 2},
    "blocks, prefixes": CACHING | {"num_blocks": 32, "num_slots": 2},
}
PROMPT = list(range(10, 23))


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> dict[str, Any]:
    return LAYOUTS[request.param]


async def ask(harness: EngineHarness, prompt: list[int], count: int = 5, *, bias: int = 1, **options: Any) -> int:
    """Generates in session "s" and checks the tokens; returns how many of the prompt the session held."""
    events = await collect(harness.submit(prompt, max_new_tokens=count, **{"session": "s"} | options))
    assert tokens_of(events) == expected_tokens(prompt, count, bias=bias)
    harness.engine.scheduler.check_integrity()
    return finished_of(events).usage.cached_prompt_tokens


def list_held(harness: EngineHarness, caller: str = "caller") -> dict[str, int]:
    return {one.session_id: one.num_held_tokens for one in harness.engine.requests.sessions.list_of(caller)}


def count_prefilled(harness: EngineHarness, first_step: int) -> int:
    """Tokens that steps of context_encoding computed."""
    steps = [step for step in harness.ranks.steps[first_step:] if step.tag.startswith("context")]
    return sum(max(step.inputs["num_tokens"]) for step in steps)


async def test_the_second_turn_computes_only_what_is_new(start_engine: StartEngine, layout: dict[str, Any]) -> None:
    harness = await start_engine(**layout)
    assert await ask(harness, PROMPT, 8) == 0
    turn = [*PROMPT, *expected_tokens(PROMPT, 8), 70, 71, 72]
    before = len(harness.ranks.steps)
    assert await ask(harness, turn, 3) == 20, "all but the last generated token, which has not been an input"
    assert count_prefilled(harness, before) == 4
    statistics = harness.engine.scheduler.statistics
    assert statistics.session_tokens == statistics.cached_prompt_tokens == 20
    assert statistics.looked_up_tokens == len(PROMPT) + len(turn)
    assert list_held(harness) == {"s": 26}


async def test_a_turn_that_leaves_the_conversation_is_continued_as_far_as_it_is_the_same(
    start_engine: StartEngine, layout: dict[str, Any]
) -> None:
    harness = await start_engine(**layout)
    await ask(harness, PROMPT, 8)
    assert await ask(harness, [*PROMPT[:10], 90, 91, 92, 93], 6) in {8, 10}, "a shared block is not written again"
    assert await ask(harness, PROMPT, 8) in {8, 10, 12}
    assert await ask(harness, [99, 98], 4) == 0
    assert await ask(harness, [99], 4) == 0, "the newest token is computed always"


async def test_other_callers_and_other_sessions_continue_nothing(start_engine: StartEngine) -> None:
    harness = await start_engine(**LAYOUTS["slots"])
    await ask(harness, PROMPT)
    assert await ask(harness, PROMPT, caller="other") == 0
    assert await ask(harness, PROMPT, session="t") == 0
    assert list_held(harness) == {"s": 0, "t": 17}, "two slots: the session unused for longest lost its one"
    assert list_held(harness, "other") == {"s": 17}
    assert list_held(harness, "third") == {}
    with pytest.raises(SessionNotFound):
        await harness.engine.reset_session("third", "s")


async def test_idle_sessions_never_hold_up_requests(start_engine: StartEngine, layout: dict[str, Any]) -> None:
    harness = await start_engine(**layout)
    for number in range(6):
        await ask(harness, [number + 5] * 20, 20, session=f"s{number}")
    prompts = [[number + 50] * 20 for number in range(8)]
    events = await asyncio.gather(*(collect(harness.submit(prompt, max_new_tokens=20)) for prompt in prompts))
    assert [tokens_of(one) for one in events] == [expected_tokens(prompt, 20) for prompt in prompts]
    assert harness.engine.scheduler.kv.num_evictions >= 4
    assert harness.engine.scheduler.statistics.preemptions == 0 or layout["num_slots"] > 2
    held = list_held(harness)
    assert list(held) == [f"s{number}" for number in range(6)], "they are known still"
    assert held["s0"] == 0
    assert await ask(harness, [5] * 20, 20, session="s0") in {0, 16}


async def test_a_session_has_one_request_at_a_time(start_engine: StartEngine) -> None:
    harness = await start_engine(**LAYOUTS["slots"])
    harness.ranks.gate.clear()
    running = harness.submit(PROMPT, request_id="first", session="s", max_new_tokens=3)
    with pytest.raises(SessionBusy, match="'s' is in use by request 'first'"):
        harness.submit(PROMPT, session="s")
    with pytest.raises(SessionBusy):
        await harness.engine.reset_session("caller", "s")
    other = harness.submit(PROMPT, session="s", caller="other", max_new_tokens=3)
    harness.ranks.gate.set()
    assert tokens_of(await collect(running)) == tokens_of(await collect(other)) == expected_tokens(PROMPT, 3)
    assert await ask(harness, PROMPT) == 12


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_what_a_cancelled_request_had_computed_is_continued(
    start_engine: StartEngine, layout: dict[str, Any], num_tokens: int
) -> None:
    """A step runs, and perhaps another one behind it, while its client leaves: what they write is not trusted."""
    harness = await start_engine(**layout)
    stream = harness.submit(PROMPT, session="s", max_new_tokens=40)
    await wait_until(lambda: len(harness.ranks.steps) > num_tokens)
    await harness.hold()
    [request] = harness.engine.scheduler.running or harness.engine.scheduler.waiting
    num_computed = request.num_computed_tokens
    generated = list(request.output_token_ids)
    stream.close()
    assert list_held(harness) == {"s": num_computed}
    harness.ranks.gate.set()
    assert await ask(harness, [*PROMPT, *generated, 77, 78], 9) in {num_computed, num_computed // 4 * 4}
    other = [*PROMPT, *generated[:-1], 5, 6]
    assert await ask(harness, other, 9) > 0 or not num_computed


async def test_ends_by_deadline_and_stop_string_keep_what_is_computed(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=0.02, **LAYOUTS["slots"])
    stream = harness.submit(PROMPT, session="s", deadline_s=0.3, max_new_tokens=45)
    events = await collect(stream)
    assert finished_of(events).finish.reason is FinishReason.TIME
    generated = tokens_of(events)
    assert await ask(harness, [*PROMPT, *generated, 9], 3) == len(PROMPT) + len(generated) - 1
    letter = chr(ord("a") + expected_tokens(PROMPT, 6)[4] % 26)
    events = await collect(harness.submit(PROMPT, session="t", stop_strings=(letter,)))
    assert finished_of(events).finish.reason is FinishReason.STOP_STRING
    assert await ask(harness, [*PROMPT, *tokens_of(events)], 3, session="t") >= len(PROMPT)


async def test_a_session_ends_when_it_was_not_used_for_its_time(start_engine: StartEngine) -> None:
    harness = await start_engine(**LAYOUTS["slots"])
    now_s = 1000.0
    harness.engine.requests.sessions._now = lambda: now_s
    await ask(harness, PROMPT, ttl_s=10.0)
    await ask(harness, PROMPT, session="t", ttl_s=100.0)
    for session in harness.engine.requests.sessions.list_of("caller"):
        session.last_used_s = now_s
    now_s += 9.9
    assert list_held(harness) == {"s": 17, "t": 17}
    now_s += 0.1
    assert list_held(harness) == {"t": 17}
    assert not harness.engine.scheduler.kv.num_evictions
    assert await ask(harness, PROMPT) == 0


async def test_limits_forget_the_session_unused_for_longest(start_engine: StartEngine) -> None:
    limits = SessionLimits(max_sessions=3, max_caller_sessions=2)
    harness = await start_engine(EngineConfig(session_limits=limits), **LAYOUTS["slots"])
    for name in ("a", "b", "a", "c"):
        await ask(harness, PROMPT, session=name)
    assert list(list_held(harness)) == ["a", "c"]
    for name in ("x", "y"):
        await ask(harness, PROMPT, session=name, caller="other")
    assert list(list_held(harness)) == ["c"], "four of the deployment: the oldest went"
    harness.ranks.gate.clear()
    streams = [harness.submit(PROMPT, session=name, caller="third", max_new_tokens=2) for name in "ab"]
    with pytest.raises(TooManySessions, match="requests use 2 sessions, as many as a caller may have"):
        harness.submit(PROMPT, session="c", caller="third")
    harness.ranks.gate.set()
    for stream in streams:
        await collect(stream)
    assert len(harness.engine.requests.sessions) == 3


async def test_a_reset_of_a_session_forgets_and_zeroes_it(start_engine: StartEngine, layout: dict[str, Any]) -> None:
    harness = await start_engine(**layout)
    await ask(harness, PROMPT)
    receipt = await harness.engine.reset_session("caller", "s")
    num_blocks = 5 if "block_tokens" in layout else 1
    assert (receipt.affected_sequences, receipt.freed_blocks) == (0, num_blocks)
    assert receipt.zeroed_bytes == STATE_BYTES
    assert len(harness.ranks.zeroed[-1]) == num_blocks
    assert list_held(harness) == {}
    assert await ask(harness, PROMPT, session="") == 0, "no request finds what was zeroed"
    with pytest.raises(SessionNotFound, match="no session 's'"):
        await harness.engine.reset_session("caller", "s")


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_resets_of_the_cache_forget_what_sessions_hold(
    start_engine: StartEngine, layout: dict[str, Any], prefix_cache: bool
) -> None:
    harness = await start_engine(**layout)
    await ask(harness, PROMPT)
    if prefix_cache:
        await harness.engine.reset_prefix_cache()
    else:
        await harness.engine.reset_kv_cache(InFlightPolicy.WAIT)
    assert list_held(harness) == {"s": 0}
    assert await ask(harness, PROMPT) == 0


@pytest.mark.parametrize("keep_kv", [False, True])
async def test_new_weights_continue_no_session(
    start_engine: StartEngine, shards: dict[int, Path], layout: dict[str, Any], keep_kv: bool
) -> None:
    harness = await start_engine(step_s=0.001, **layout)
    await ask(harness, PROMPT, session="idle")
    running = harness.submit(PROMPT[::-1], session="s", max_new_tokens=40)
    await wait_until(lambda: len(harness.engine.scheduler.running) == 1)
    policy = InFlightPolicy.CONTINUE if keep_kv else InFlightPolicy.ABORT
    await (await swap(harness, shards, policy, keep_kv=keep_kv))
    await collect_rest(running)
    assert list_held(harness) == {"idle": 0, "s": 0}, "nothing of the old weights, also of what ran over the swap"
    for session, prompt in (("idle", PROMPT), ("s", PROMPT[::-1])):
        assert await ask(harness, prompt, session=session, bias=NEW_BIAS) == 0
        assert await ask(harness, prompt, session=session, bias=NEW_BIAS) == 12


async def test_sessions_outlive_ranks_without_what_they_held(start_engine: StartEngine, layout: dict[str, Any]) -> None:
    harness = await start_engine(**layout)
    await ask(harness, PROMPT)
    running = harness.submit(PROMPT, session="t")
    await harness.hold()
    await harness.lose_ranks()
    assert finished_of(await collect(running)).finish.reason is FinishReason.ERROR
    assert list_held(harness) == {"s": 0, "t": 0}
    assert await ask(harness, PROMPT) == 0
    assert await ask(harness, PROMPT, session="t") in {0, 12}


async def test_a_session_holds_nothing_of_a_request_with_invalid_numbers(start_engine: StartEngine) -> None:
    harness = await start_engine(**LAYOUTS["slots"])
    await ask(harness, PROMPT)
    harness.ranks.invalid_rows = (0,)
    await collect(harness.submit([*PROMPT, 7], session="s"))
    harness.ranks.invalid_rows = ()
    assert list_held(harness) == {"s": 0}
    assert await ask(harness, [*PROMPT, 7]) == 0


async def test_a_preempted_request_leaves_its_session_right(start_engine: StartEngine) -> None:
    """Two sequences grow to 16 blocks, of which there are 20."""
    harness = await start_engine(**LAYOUTS["blocks"] | {"num_blocks": 20})
    await asyncio.gather(ask(harness, PROMPT, 45), ask(harness, PROMPT[:6], 50, session="t"))
    assert harness.engine.scheduler.statistics.preemptions
    assert await ask(harness, [*PROMPT, *expected_tokens(PROMPT, 3), 7], 4) >= 0


async def test_a_session_of_blocks_that_share_finds_the_longer_prefix(start_engine: StartEngine) -> None:
    harness = await start_engine(**CACHING)
    await ask(harness, PROMPT[:6], 2)
    await ask(harness, PROMPT, 3, session="")
    assert await ask(harness, PROMPT, 3) == 12, "what another request computed, in place of six tokens of its own"
    assert await ask(harness, [*PROMPT, *expected_tokens(PROMPT, 3), 5], 3) == 15, (
        "and then its own, in part of a block"
    )


class _Turns:
    """Requests of one session, computed in a slot one after the other."""

    def __init__(self, keeper: SessionKeeper) -> None:
        self._kv = SlotManager(1, 64, keeper)
        self._session = Session("caller", "s", 60.0, 0.0)

    def take(self, tokens: list[int]) -> int:
        """Computes all but the newest token; returns how many of them the session held."""
        request = make_request("r", tokens[:-1], session=self._session, output_token_ids=tokens[-1:])
        num_cached = self._kv.find_prefix(request)
        assert self._kv.reserve(request, request.num_tokens - num_cached, num_cached=num_cached)
        request.num_computed_tokens = request.num_tokens - 1
        self._kv.keep(request)
        return num_cached


def test_rings_are_continued_where_they_hold_what_the_window_sees() -> None:
    """Of 20 tokens, 19 are computed; the steps that were called ahead may have written positions 19 and 20."""
    turns = _Turns(SessionKeeper(rewind_limit=5))
    assert turns.take([*range(20)]) == 0
    assert turns.take([*range(16), *range(40, 44)]) == 16
    assert turns.take([*range(15), *range(50, 55)]) == 0, "position 15 sees what 20 has overwritten"


def test_what_was_written_before_a_session_was_taken_back_counts() -> None:
    """A ring that has held position 19 lacks what 13 sees, whatever shorter turn came in between."""
    scheduler = make_scheduler(num_slots=1, flags=(*DYNAMIC_FLAGS, COMPUTED_CONTEXT))
    scheduler.kv = SlotManager(1, 64, SessionKeeper(rewind_limit=7))
    session = Session("caller", "s", 60.0, 0.0)
    found = []
    for tokens in ([*range(20)], [*range(15), 40], [*range(13), 50]):
        request = make_request("r", tokens, session=session, max_new_tokens=1)
        scheduler.add(request)
        while request.finish is None:
            run_step(scheduler)
        found.append(request.num_cached_tokens)
    assert found == [0, 15, 0]


def test_prompts_of_other_lengths_continue_no_keys_of_other_frequencies() -> None:
    turns = _Turns(SessionKeeper(prompt_lengths=PromptLengths(limit=9, each=False)))
    assert turns.take([*range(8)]) == 0
    assert turns.take([*range(10)]) == 7
    assert turns.take([*range(14)]) == 0, "a prompt of 13 has other keys than one of 9"
    assert turns.take([*range(20)]) == 13
