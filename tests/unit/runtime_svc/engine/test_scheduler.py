"""The scheduler alone, by hand; test_scheduler_machine.py moves it at random."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.request import BucketKey, Finish, FinishReason, Request
from runtime_svc.engine.scheduler.scheduler import MAX_CANDIDATES, Scheduler
from tests.ranks.scheduling import (
    give_adapters,
    make_parts_scheduler,
    make_request,
    make_scheduler,
    names,
    run_step,
    update,
)

ABORTED = Finish(FinishReason.ABORTED)


def test_prompts_do_not_starve_tokens_nor_tokens_prompts() -> None:
    """Short requests that come without end get every other step."""
    scheduler = make_scheduler()
    running = make_request("running", 3)
    scheduler.add(running)
    run_step(scheduler)
    for index in range(20):
        scheduler.add(make_request(f"short-{index}", 1, max_new_tokens=1))
    submodels = [plan.executable.submodel for _ in range(12) if (plan := run_step(scheduler))]
    assert submodels == ["token_generation", "context_encoding"] * 6


def test_context_encoding_takes_up_to_its_batch_in_order_of_arrival() -> None:
    scheduler = make_scheduler(num_slots=3, ctx_batch_size=2)
    for index, length in enumerate([2, 9, 3, 4]):
        scheduler.add(make_request(f"{index}", length))
    plan = run_step(scheduler)
    assert plan is not None
    assert (names(plan), [row.row for row in plan.rows], [row.placement.blocks for row in plan.rows]) == (
        ["0", "1"],
        [0, 1],
        [(0,), (1,)],
    )
    assert plan.executable.tag == "context_encoding_16", "the longest of its rows decides"
    assert names(run_step(scheduler)) == ["0", "1"]
    assert names(run_step(scheduler)) == ["2"], "one slot was left"
    assert [request.request_id for request in scheduler.waiting] == ["3"]


def test_integrity_notices_a_request_that_ended_and_runs() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2)
    scheduler.add(request)
    run_step(scheduler)
    request.claim_finish(ABORTED, 2.0)
    with pytest.raises(AssertionError, match="a has ended and runs"):
        scheduler.check_integrity()


# Several tokens of a row, and none


@pytest.mark.parametrize(
    ("stop", "max_new_tokens", "taken", "finish"),
    [
        ([7], 9, [5, 6, 7], Finish(FinishReason.STOP_TOKEN, stop_token_id=7)),
        ([], 3, [5, 6, 7], Finish(FinishReason.LENGTH)),
        ([8], 4, [5, 6, 7, 8], Finish(FinishReason.STOP_TOKEN, stop_token_id=8)),
        ([8], 3, [5, 6, 7], Finish(FinishReason.LENGTH)),
    ],
)
def test_tokens_behind_the_end_are_dropped(
    stop: list[int], max_new_tokens: int, taken: list[int], finish: Finish
) -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3, stop=stop, max_new_tokens=max_new_tokens)
    scheduler.add(request)
    run_step(scheduler)
    plan = scheduler.schedule()
    assert plan is not None
    (new,) = update(scheduler, plan, [[6, 7, 8]] * 2)
    assert [5, *new.token_ids] == request.output_token_ids == taken
    assert request.finish == finish
    assert scheduler.num_running == 0


# Prompts in parts


def test_a_prompt_in_parts_gives_a_token_with_its_last_part() -> None:
    scheduler = make_parts_scheduler(SlotManager(2, 64), max_running=2, max_tokens=4)
    request = make_request("a", 10)
    scheduler.add(request)
    parts = []
    for _ in range(4):
        plan = run_step(scheduler)
        assert plan is not None
        parts.append((plan.rows[0].start, plan.rows[0].num_tokens, plan.rows[0].samples))
    assert parts == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]
    assert request.output_token_ids == [5, 5], "what a row that does not sample gives is dropped"
    assert request.bucket_padding == {BucketKey("context_encoding", (4,)): 5}


# Room in the KV cache


def test_the_newest_request_makes_room_for_the_oldest_and_starts_anew() -> None:
    scheduler = make_parts_scheduler(BlockManager(3, 4, caches_prefixes=False), max_running=2, max_tokens=8)
    old, new = make_request("old", 7, max_new_tokens=4), make_request("new", 4, max_new_tokens=3)
    for request in (old, new):
        scheduler.add(request)
    assert names(run_step(scheduler)) == ["old", "new"]
    assert names(run_step(scheduler)) == ["old"], "its token is the last that its second block has room for"
    assert names(run_step(scheduler)) == ["old"]
    assert new.num_computed_tokens == 0
    assert names(run_step(scheduler, tokens=[6])) == ["old"]
    assert old.finish == Finish(FinishReason.LENGTH)
    plan = run_step(scheduler, tokens=[6])
    assert names(plan) == ["new"]
    assert plan is not None
    assert (plan.rows[0].start, plan.rows[0].num_tokens) == (0, 5), "its prompt and the token that it had"
    assert new.output_token_ids == [5, 6]


def test_a_paused_request_makes_room_too() -> None:
    scheduler = make_parts_scheduler(BlockManager(2, 4, caches_prefixes=False), max_running=2, max_tokens=4)
    paused, other = make_request("paused", 3), make_request("other", 4, max_new_tokens=2)
    for request in (paused, other):
        scheduler.add(request)
    assert names(run_step(scheduler)) == ["paused", "other"]
    paused.is_paused = True
    assert names(run_step(scheduler)) == ["other"]
    assert other.finish is not None
    paused.is_paused = False
    assert names(run_step(scheduler)) == ["paused"]


def test_a_sequence_that_never_fits_is_our_own_bug() -> None:
    scheduler = make_parts_scheduler(BlockManager(1, 4, caches_prefixes=False), max_running=1, max_tokens=4)
    scheduler.add(make_request("a", 9))
    run_step(scheduler)
    with pytest.raises(AssertionError, match="a does not fit"):
        scheduler.schedule()


# Slots of adapters


def ask(scheduler: Scheduler, name: str, **options: Any) -> Request:
    """Queues a request that names the adapter of its first letter, if there is one."""
    request = make_request(name, 4, adapter=scheduler.adapters.find(name[0]), **options)
    scheduler.add(request)
    return request


def list_starts(scheduler: Scheduler) -> list[str]:
    """Runs until no request is left; lists in which order they started."""
    started: dict[str, None] = {}
    while run_step(scheduler) is not None:
        started |= dict.fromkeys(request.request_id for request in scheduler.running)
    return [*started]


def test_others_pass_a_request_that_waits_for_a_slot_but_not_those_that_would_keep_it() -> None:
    scheduler = make_scheduler(num_slots=4)
    slots = give_adapters(scheduler, 1, "ab")
    for name in ("a-1", "a-2", "b-1", "plain-1", "a-3", "plain-2"):
        ask(scheduler, name, max_new_tokens=9)
    assert list_starts(scheduler) == ["a-1", "a-2", "plain-1", "plain-2", "b-1", "a-3"]
    assert [write.slot for write in slots.take_writes()] == [0]


def test_requests_that_wait_for_a_slot_are_no_candidates() -> None:
    scheduler = make_scheduler(num_slots=3)
    give_adapters(scheduler, 1, "ab")
    for name in ("a", *(f"b-{number}" for number in range(MAX_CANDIDATES)), "plain"):
        ask(scheduler, name, max_new_tokens=9)
    assert list_starts(scheduler)[:3] == ["a", "plain", "b-0"]


def test_steps_are_called_ahead_while_others_wait_for_a_slot() -> None:
    scheduler = make_scheduler(num_slots=3)
    give_adapters(scheduler, 1, "ab")
    ask(scheduler, "a")
    run_step(scheduler)
    ask(scheduler, "b")
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.schedule_behind(plan) is not None
    ask(scheduler, "plain")
    assert scheduler.schedule_behind(plan) is None


def test_a_preempted_request_keeps_the_slot_of_its_adapter() -> None:
    scheduler = make_parts_scheduler(BlockManager(3, 4, caches_prefixes=False), max_running=3, max_tokens=8)
    give_adapters(scheduler, 2, "abc")
    old, new = ask(scheduler, "a", max_new_tokens=8), ask(scheduler, "b", max_new_tokens=3)
    run_step(scheduler)
    waits = ask(scheduler, "c", max_new_tokens=2)
    while scheduler.statistics.preemptions == 0:
        run_step(scheduler)
    assert (new.num_computed_tokens, new.adapter_slot) == (0, 1)
    assert list_starts(scheduler) == ["a", "b", "c"]
    assert all(request.finish == Finish(FinishReason.LENGTH) for request in (old, new, waits))
