"""Steps that the engine calls while the previous one runs: what is planned, and what comes out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from execution.errors import RankDied
from execution.sampling_parameters import SamplingParams
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.engine.request import Finish, FinishReason
from runtime_svc.engine.scheduler.plan import StepPlan
from runtime_svc.engine.scheduler.scheduler import Scheduler
from tests.bundles.manifests import DYNAMIC
from tests.ranks.engines import (
    NEW_BIAS,
    EngineHarness,
    StartEngine,
    collect,
    epochs_of,
    finished_of,
    swap,
    tokens_of,
    wait_until,
)
from tests.ranks.fakes import VOCAB_SIZE, expected_tokens
from tests.ranks.scheduling import make_request, make_scheduler, names, update

ABORTED = Finish(FinishReason.ABORTED)


# Plans


def decode(scheduler: Scheduler) -> StepPlan:
    """Plans a token_generation step, after the prompts; its result is for the caller to give."""
    while (plan := scheduler.schedule()) is not None and plan.executable.submodel == "context_encoding":
        update(scheduler, plan, [[5]] * plan.executable.batch_size)
    assert plan is not None
    return plan


def test_no_step_behind_while_a_request_waits() -> None:
    scheduler = make_scheduler(num_slots=1)
    scheduler.add(make_request("a", 3))
    running = decode(scheduler)
    scheduler.add(make_request("b", 3))
    assert scheduler.schedule_behind(running) is None


def test_no_step_behind_if_a_row_ends_or_pauses_or_another_request_is_ready() -> None:
    scheduler = make_scheduler(ctx_batch_size=2)
    a, b = make_request("a", 3), make_request("b", 3, max_new_tokens=3)
    for request in (a, b):
        scheduler.add(request)
    running = decode(scheduler)
    assert scheduler.schedule_behind(running) is not None
    a.is_paused = True
    assert scheduler.schedule_behind(running) is None
    alone = scheduler.schedule()
    assert names(alone) == ["b"]
    assert alone is not None
    assert scheduler.schedule_behind(alone) is not None
    a.is_paused = False
    assert scheduler.schedule_behind(alone) is None, "a would have to wait for b to end"
    update(scheduler, running, [[6], [6]])
    assert scheduler.schedule_behind(running) is None, "the next token is b's last"
    a.claim_finish(ABORTED, 1.0)
    scheduler.remove(a)
    assert scheduler.schedule_behind(running) is None


@pytest.mark.parametrize(
    ("sampling", "goes_ahead"), [({"logit_bias": {5: 1.0}}, True), ({"presence_penalty": 1}, False)]
)
def test_no_step_behind_if_a_row_counts_the_tokens_of_the_running_one(
    sampling: dict[str, Any], goes_ahead: bool
) -> None:
    scheduler = make_scheduler(ctx_batch_size=2)
    for name, asked in (("a", {}), ("b", sampling)):
        scheduler.add(make_request(name, 3, sampling=SamplingParams(**asked)))
    assert (scheduler.schedule_behind(decode(scheduler)) is not None) is goes_ahead


def test_no_step_behind_without_room_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    running = decode(scheduler)
    asked = []
    monkeypatch.setattr(scheduler.kv, "reserve", lambda request, num_tokens: asked.append(num_tokens))
    assert scheduler.schedule_behind(running) is None
    assert asked == [2], "for the token that the running step computes and the one behind it"


# In the engine


@pytest.fixture
def is_async() -> bool:
    return True


def steps_of(harness: EngineHarness) -> str:
    """Every step that ran: p for a prompt, t for tokens, d for tokens that depend on those of a step in flight."""
    steps = harness.ranks.steps
    return "".join("d" if one.depends_on_previous else "p" if "context" in one.tag else "t" for one in steps)


async def hold_two_steps(harness: EngineHarness) -> None:
    """Stops ranks that take some time for a step in one behind which another has been called; the caller opens the
    gate."""
    await wait_until(lambda: harness.ranks.num_under_way == 2)
    harness.ranks.gate.clear()
    await asyncio.sleep(4 * harness.ranks.step_s)
    assert harness.ranks.num_under_way == 2


@pytest.mark.parametrize(
    ("is_async", "mode", "steps"),
    [(True, "on_device", "ptdddd"), (False, "on_device", "pttttt"), (True, "host", "pttttt")],
)
async def test_steps_are_called_ahead_unless_the_host_picks_tokens(
    start_engine: StartEngine, mode: str, steps: str
) -> None:
    harness = await start_engine(sampling=msgspec.structs.replace(DYNAMIC, mode=mode))
    assert tokens_of(await collect(harness.submit([5], max_new_tokens=6))) == expected_tokens([5], 6)
    assert steps_of(harness) == steps


async def test_a_change_of_bucket_waits_for_the_previous_step(start_engine: StartEngine) -> None:
    harness = await start_engine()
    await collect(harness.submit([5] * 14, max_new_tokens=6))
    assert steps_of(harness) == "ptdtdd", "positions 14 and 15, then the next bucket"


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


async def test_swap_comes_after_the_step_in_flight(start_engine: StartEngine, shards: dict[int, Path]) -> None:
    harness = await start_engine(step_s=0.005, token_buckets=(64,))
    running = harness.submit([5], max_new_tokens=20)
    await hold_two_steps(harness)
    num_steps = len(harness.ranks.steps)
    task = await swap(harness, shards, InFlightPolicy.CONTINUE, keep_kv=True)
    harness.ranks.gate.set()
    assert (await task).aborted_requests == 0
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
