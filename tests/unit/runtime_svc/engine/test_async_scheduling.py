"""Steps that the engine calls while the previous one runs: what is planned, and what comes out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from execution.errors import RankDied
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.engine.request import Finish, FinishReason
from runtime_svc.engine.scheduler.plan import StepPlan
from runtime_svc.engine.scheduler.scheduler import Scheduler
from tests.ranks.engines import (
    NEW_BIAS,
    EngineHarness,
    StartEngine,
    collect,
    epochs_of,
    finished_of,
    generated_of,
    swap,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import VOCAB_SIZE, expected_tokens, make_manifest
from tests.ranks.scheduling import make_async, make_request, make_scheduler, names, run_step, update

ABORTED = Finish(FinishReason.ABORTED)


# Plans


def decode(scheduler: Scheduler) -> StepPlan:
    """Plans a token_generation step, after the prompts; its result is for the caller to give."""
    while (plan := scheduler.schedule()) is not None and plan.executable.submodel == "context_encoding":
        update(scheduler, plan, [[5]] * plan.executable.batch_size)
    assert plan is not None
    return plan


def test_the_step_behind_computes_the_next_tokens_of_the_same_rows() -> None:
    scheduler = make_scheduler(ctx_batch_size=2)
    plan_behind = make_async(scheduler).plan_behind
    requests = [make_request("a", 3), make_request("b", 5)]
    for request in requests:
        scheduler.add(request)
    running = decode(scheduler)
    in_flight = plan_behind(running)
    assert in_flight is not None
    assert in_flight.executable is running.executable
    assert in_flight.depends_on_previous
    assert [(row.row, row.request, row.start, row.num_tokens) for row in in_flight.rows] == [
        (0, requests[0], 4, 1),
        (1, requests[1], 6, 1),
    ]
    update(scheduler, running, [[6], [7]])
    assert plan_behind(in_flight) is not None, "and a step behind that one"
    update(scheduler, in_flight, [[8], [9]])
    assert [request.output_token_ids for request in requests] == [[5, 6, 8], [5, 7, 9]]
    assert [request.num_computed_tokens for request in requests] == [5, 7]


def test_no_step_behind_a_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    plan = scheduler.schedule()
    assert plan is not None
    assert make_async(scheduler).plan_behind(plan) is None


def test_no_step_behind_while_a_request_waits() -> None:
    scheduler = make_scheduler(num_slots=1)
    scheduler.add(make_request("a", 3))
    running = decode(scheduler)
    scheduler.add(make_request("b", 3))
    assert make_async(scheduler).plan_behind(running) is None


def test_no_step_behind_if_a_row_ends_or_pauses_or_another_request_is_ready() -> None:
    scheduler = make_scheduler(ctx_batch_size=2)
    plan_behind = make_async(scheduler).plan_behind
    a, b = make_request("a", 3), make_request("b", 3, max_new_tokens=3)
    for request in (a, b):
        scheduler.add(request)
    running = decode(scheduler)
    assert plan_behind(running) is not None
    a.is_paused = True
    assert plan_behind(running) is None
    alone = scheduler.schedule()
    assert names(alone) == ["b"]
    assert alone is not None
    assert plan_behind(alone) is not None
    a.is_paused = False
    assert plan_behind(alone) is None, "a would have to wait for b to end"
    update(scheduler, running, [[6], [6]])
    assert plan_behind(running) is None, "the next token is b's last"
    a.claim_finish(ABORTED, 1.0)
    scheduler.remove(a)
    assert plan_behind(running) is None


def test_no_step_behind_in_another_bucket() -> None:
    scheduler = make_scheduler()
    plan_behind = make_async(scheduler).plan_behind
    scheduler.add(make_request("a", 14))
    running = decode(scheduler)
    assert (running.executable.tag, running.rows[0].start) == ("token_generation_16", 14)
    in_flight = plan_behind(running)
    assert in_flight is not None
    update(scheduler, running, [[5], [5]])
    assert plan_behind(in_flight) is None, "position 16 takes the next bucket"
    update(scheduler, in_flight, [[5], [5]])
    other = decode(scheduler)
    assert other.executable.tag == "token_generation_64"
    assert plan_behind(other) is not None


def test_no_step_behind_without_room_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    running = decode(scheduler)
    asked = []
    monkeypatch.setattr(scheduler.kv, "reserve", lambda request, num_tokens: asked.append(num_tokens))
    assert make_async(scheduler).plan_behind(running) is None
    assert asked == [2], "for the token that the running step computes and the one behind it"


def test_a_slot_that_a_step_in_flight_writes_goes_to_the_next_request_at_once() -> None:
    scheduler = make_scheduler(num_slots=1)
    plan_behind = make_async(scheduler).plan_behind
    first, second = make_request("first", 3, stop=[9]), make_request("second", 3)
    scheduler.add(first)
    running = decode(scheduler)
    in_flight = plan_behind(running)
    assert in_flight is not None
    update(scheduler, running, [[9]])
    assert first.finish is not None
    scheduler.add(second)
    assert plan_behind(in_flight) is None
    assert update(scheduler, in_flight, [[7]]) == [], "computed in vain"
    assert first.output_token_ids == [5, 9]
    plan = run_step(scheduler)
    assert names(plan) == ["second"]
    assert plan is not None
    assert (plan.rows[0].placement.blocks, second.output_token_ids) == ((0,), [5])


# In the engine


@pytest.fixture
def is_async() -> bool:
    return True


def steps_of(harness: EngineHarness) -> str:
    """Every step that ran: p for a prompt, t for tokens, d for tokens that depend on those of a step in flight."""
    tags = ["p" if step.tag.startswith("context") else "t" for step in harness.ranks.steps]
    return "".join(
        "d" if step.depends_on_previous else tag for tag, step in zip(tags, harness.ranks.steps, strict=True)
    )


async def hold_two_steps(harness: EngineHarness) -> None:
    """Stops ranks that take some time for a step in one behind which another has been called; the caller opens the
    gate."""
    await wait_until(lambda: harness.ranks.num_under_way == 2)
    harness.ranks.gate.clear()
    await asyncio.sleep(4 * harness.ranks.step_s)
    assert harness.ranks.num_under_way == 2


@pytest.mark.parametrize(("is_async", "steps"), [(True, "ptdddd"), (False, "pttttt")])
async def test_the_switch(start_engine: StartEngine, steps: str) -> None:
    harness = await start_engine()
    assert tokens_of(await collect(harness.submit([5], max_new_tokens=6))) == expected_tokens([5], 6)
    assert steps_of(harness) == steps


async def test_two_steps_are_in_flight(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=0.005)
    stream = harness.submit([5], max_new_tokens=6)
    await hold_two_steps(harness)
    harness.ranks.gate.set()
    assert tokens_of(await collect(stream)) == expected_tokens([5], 6)
    assert harness.ranks.num_under_way == 0


async def test_seeded_tokens_and_their_logprobs_are_the_same(start_engine: StartEngine) -> None:
    harness = await start_engine()
    events = await collect(harness.submit([5], temperature=0.7, seed=3, max_new_tokens=10, top_logprobs=1))
    tokens = expected_tokens([5], 10, seed=3)
    assert tokens_of(events) == tokens
    assert [token.logprob for token in generated_of(events)] == [-token / 10 for token in tokens]
    assert steps_of(harness) == "pt" + "d" * 8


async def test_a_change_of_bucket_waits_for_the_previous_step(start_engine: StartEngine) -> None:
    harness = await start_engine()
    await collect(harness.submit([5] * 14, max_new_tokens=6))
    assert steps_of(harness) == "ptdtdd", "positions 14 and 15, then the next bucket"


async def test_tokens_that_the_host_picks_are_waited_for(start_engine: StartEngine) -> None:
    on_device = make_manifest().sampling
    harness = await start_engine(sampling=msgspec.structs.replace(on_device, mode="host"))
    assert tokens_of(await collect(harness.submit([5], max_new_tokens=6))) == expected_tokens([5], 6)
    assert steps_of(harness) == "pttttt"


async def test_a_prompt_runs_after_the_step_in_flight(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=0.005)
    running = harness.submit([5], max_new_tokens=12)
    await hold_two_steps(harness)
    num_steps = len(harness.ranks.steps)
    late = harness.submit([6], max_new_tokens=3)
    harness.ranks.gate.set()
    assert tokens_of(await collect(running)) == expected_tokens([5], 12)
    assert tokens_of(await collect(late)) == expected_tokens([6], 3)
    assert steps_of(harness)[num_steps - 1 :].startswith("ddpt")


async def test_one_token_more_is_computed_and_dropped(start_engine: StartEngine) -> None:
    harness = await start_engine()
    expected = expected_tokens([5], 6)
    events = await collect(harness.submit([5], stop_token_ids=(expected[5],)))
    assert tokens_of(events) == expected
    assert finished_of(events).usage.generated_tokens == 6
    assert sum(one.steps for one in finished_of(events).usage.buckets) == 6, "a client does not pay for what is dropped"
    await wait_until(lambda: not harness.ranks.is_running)
    assert steps_of(harness) == "ptddddd"


async def test_a_paused_sequence_gets_no_step_behind(start_engine: StartEngine) -> None:
    harness = await start_engine(EngineConfig(stream_capacity=4))
    stream = harness.submit([5], max_new_tokens=12)
    await wait_until(lambda: len(stream._events) >= 4 and harness.ranks.num_under_way == 0)
    assert len(stream._events) <= 5, "no more than what the running step added"
    assert tokens_of(await collect(stream)) == expected_tokens([5], 12)


async def test_swap_comes_after_the_step_in_flight(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine(step_s=0.005, token_buckets=(64,))
    running = harness.submit([5], max_new_tokens=20)
    await hold_two_steps(harness)
    num_steps = len(harness.ranks.steps)
    task = await swap(harness, shards, InFlightPolicy.CONTINUE, keep_kv=True)
    harness.ranks.gate.set()
    await task
    events = await collect(running)
    epochs = epochs_of(events)
    assert epochs == [1] * (num_steps + 1) + [2] * (20 - num_steps - 1), "and before any other"
    history = [5]
    for token, epoch in zip(tokens_of(events), epochs, strict=True):
        assert token == (sum(history) + (1 if epoch == 1 else NEW_BIAS)) % VOCAB_SIZE
        history.append(token)
    steps = steps_of(harness)[num_steps + 1 :]
    assert steps == "t" + "d" * (len(steps) - 1), "its tokens are known by then"


async def test_no_step_behind_while_a_reset_waits(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=0.002)
    running = harness.submit([5], max_new_tokens=20)
    await hold_two_steps(harness)
    num_steps = len(harness.ranks.steps) + 1
    reset = asyncio.create_task(harness.engine.reset_kv_cache(InFlightPolicy.WAIT))
    await asyncio.sleep(0)
    harness.ranks.gate.set()
    assert tokens_of(await collect(running)) == expected_tokens([5], 20)
    await reset
    assert "d" not in steps_of(harness)[num_steps:]


async def test_rank_that_dies_under_two_steps(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=0.005)
    first = harness.ranks
    stream = harness.submit([5], max_new_tokens=20)
    await hold_two_steps(harness)
    first.die()
    events = await collect(stream)
    assert isinstance(finished_of(events).finish.error, RankDied)
    assert tokens_of(events) == expected_tokens([5], len(tokens_of(events)))
    assert tokens_of(await collect(harness.submit([6], max_new_tokens=5))) == expected_tokens([6], 5)
    assert harness.ranks is not first
    assert first.num_under_way == 0


async def test_a_client_that_is_gone_costs_the_steps_in_flight_and_no_more(start_engine: StartEngine) -> None:
    harness = await start_engine(step_s=0.005)
    harness.submit([5], request_id="gone", max_new_tokens=40)
    await hold_two_steps(harness)
    num_ended = len(harness.ranks.steps) - 1
    assert harness.engine.requests.abort("gone", "its client vanished")
    assert not harness.engine.scheduler.running, "its slot is free at once"
    harness.ranks.gate.set()
    await wait_until(lambda: not harness.ranks.is_running)
    await asyncio.sleep(4 * harness.ranks.step_s)
    assert len(harness.ranks.steps) == num_ended + 2, "the one that ran and the one called behind it"
