"""The scheduler alone, by hand; test_scheduler_machine.py moves it at random."""

from __future__ import annotations

import pytest

from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.request import BucketKey, Finish, FinishReason
from tests.ranks.scheduling import (
    make_parts_scheduler,
    make_request,
    make_scheduler,
    names,
    run_step,
    update,
)

ABORTED = Finish(FinishReason.ABORTED)


def test_prompt_then_tokens() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 9)
    scheduler.add(request)
    plan = run_step(scheduler)
    assert plan is not None
    assert plan.executable.tag == "context_encoding_16"
    assert (request.num_computed_tokens, request.output_token_ids) == (9, [5])
    plan = run_step(scheduler)
    assert plan is not None
    assert plan.executable.tag == "token_generation_16"
    assert (plan.rows[0].row, plan.rows[0].start, plan.rows[0].num_tokens) == (0, 9, 1)
    assert plan.rows[0].placement.blocks == (0,)
    assert request.num_computed_tokens == 10
    assert request.bucket_steps == {
        BucketKey("context_encoding", (16,)): 1,
        BucketKey("token_generation", (16,)): 1,
    }
    assert request.bucket_padding == {BucketKey("context_encoding", (16,)): 7}


def test_decode_bucket_is_that_of_the_longest_row() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("short", 2))
    scheduler.add(make_request("long", 16))
    run_step(scheduler)
    plan = run_step(scheduler)
    assert names(plan) == ["short"]
    plan = run_step(scheduler)
    assert names(plan) == ["long"]
    plan = run_step(scheduler)
    assert plan is not None
    assert names(plan) == ["short", "long"]
    assert plan.executable.tag == "token_generation_64"


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


def test_prompts_run_back_to_back_while_no_sequence_waits_for_a_token() -> None:
    scheduler = make_scheduler(num_slots=1)
    for index in range(3):
        scheduler.add(make_request(f"short-{index}", 1, max_new_tokens=1))
    assert [names(run_step(scheduler)) for _ in range(3)] == [["short-0"], ["short-1"], ["short-2"]]
    assert run_step(scheduler) is None


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


def test_stop_token_and_limit_end_a_request() -> None:
    scheduler = make_scheduler()
    stopped, limited = make_request("stopped", 2, stop=[9]), make_request("limited", 2, max_new_tokens=2)
    scheduler.add(stopped)
    scheduler.add(limited)
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler, tokens=[9])
    assert stopped.finish == Finish(FinishReason.STOP_TOKEN, stop_token_id=9)
    assert limited.finish == Finish(FinishReason.LENGTH)
    assert scheduler.num_running == 0
    assert stopped.output_token_ids == [5, 5, 9]


def test_stop_token_is_named_if_it_is_also_the_last_allowed() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2, max_new_tokens=1, stop=[5])
    scheduler.add(request)
    run_step(scheduler)
    assert request.finish == Finish(FinishReason.STOP_TOKEN, stop_token_id=5)


def test_request_that_ends_during_a_step_gets_no_token_from_it() -> None:
    scheduler = make_scheduler()
    request, mate = make_request("a", 2), make_request("mate", 2)
    scheduler.add(request)
    scheduler.add(mate)
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler)
    plan = scheduler.schedule()
    assert plan is not None
    assert request.claim_finish(ABORTED, 2.0)
    scheduler.remove(request)
    scheduler.check_integrity()
    rows = update(scheduler, plan, [[7]] * 2)
    assert [(one.row.request, one.token_ids) for one in rows] == [(mate, [7])]
    assert 7 not in request.output_token_ids


def test_slot_of_an_ended_request_is_taken_anew_while_its_step_runs() -> None:
    scheduler = make_scheduler(num_slots=1)
    first, second = make_request("first", 2), make_request("second", 3)
    scheduler.add(first)
    plan = scheduler.schedule()
    assert plan is not None
    first.claim_finish(ABORTED, 1.0)
    scheduler.remove(first)
    scheduler.add(second)
    update(scheduler, plan, [[7]])
    assert names(run_step(scheduler)) == ["second"]
    assert second.output_token_ids == [5]


def test_paused_request_keeps_its_slot_and_its_mates_go_on() -> None:
    scheduler = make_scheduler()
    paused, mate = make_request("paused", 2), make_request("mate", 2)
    scheduler.add(paused)
    scheduler.add(mate)
    for _ in range(3):
        run_step(scheduler)
    paused.is_paused = True
    assert names(run_step(scheduler)) == ["mate"]
    assert scheduler.num_running == 2
    mate.is_paused = True
    assert run_step(scheduler) is None
    paused.is_paused = False
    assert names(run_step(scheduler)) == ["paused"]


def test_no_request_starts_while_admission_is_held() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2, max_new_tokens=2))
    run_step(scheduler)
    scheduler.is_admitting = False
    scheduler.add(make_request("b", 2))
    assert names(run_step(scheduler)) == ["a"]
    assert run_step(scheduler) is None
    scheduler.is_admitting = True
    assert names(run_step(scheduler)) == ["b"]


def test_integrity_notices_a_request_that_lost_its_slot() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2)
    scheduler.add(request)
    run_step(scheduler)
    scheduler.kv.release(request)
    with pytest.raises(AssertionError, match="a lost its slot"):
        scheduler.check_integrity()


def test_integrity_notices_a_request_that_ended_and_runs() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2)
    scheduler.add(request)
    run_step(scheduler)
    request.claim_finish(ABORTED, 2.0)
    with pytest.raises(AssertionError, match="a has ended and runs"):
        scheduler.check_integrity()


# Several tokens of a row, and none


def test_a_step_may_give_several_tokens() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3)
    scheduler.add(request)
    run_step(scheduler)
    plan = run_step(scheduler, tokens=[6, 7, 8])
    assert plan is not None
    assert (plan.rows[0].start, plan.rows[0].num_tokens) == (3, 1)
    assert request.output_token_ids == [5, 6, 7, 8]
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.rows[0].start, plan.rows[0].num_tokens, request.num_computed_tokens) == (6, 1, 6)


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
    scheduler.check_integrity()


def test_a_row_without_a_token_computes_its_newest_again() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    assert update(scheduler, plan, [[]]) == []
    assert (request.num_computed_tokens, request.timeline.first_token_s) == (2, None)
    plan = run_step(scheduler)
    assert plan is not None
    assert (plan.executable.submodel, plan.rows[0].start) == ("token_generation", 2)
    assert request.output_token_ids == [5]


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


def test_one_step_computes_parts_of_prompts_and_new_tokens() -> None:
    scheduler = make_parts_scheduler(SlotManager(2, 64), max_running=2, max_tokens=4)
    scheduler.add(make_request("short", 2))
    run_step(scheduler)
    scheduler.add(make_request("long", 9))
    plan = run_step(scheduler)
    assert plan is not None
    assert [(row.request.request_id, row.num_tokens, row.samples) for row in plan.rows] == [
        ("short", 1, True),
        ("long", 4, False),
    ]


# Room in the KV cache


def test_a_request_waits_until_the_cache_has_room_for_it() -> None:
    scheduler = make_parts_scheduler(BlockManager(2, 4, caches_prefixes=False), max_running=2, max_tokens=8)
    first, second = make_request("first", 8, max_new_tokens=1), make_request("second", 8)
    scheduler.add(first)
    scheduler.add(second)
    assert names(run_step(scheduler)) == ["first"]
    assert first.finish is not None
    assert names(run_step(scheduler)) == ["second"]


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


def test_a_step_has_room_for_the_tokens_that_it_gives() -> None:
    kv = BlockManager(2, 4, caches_prefixes=False)
    scheduler = make_parts_scheduler(kv, max_running=1, max_tokens=4, max_new_tokens=3)
    request = make_request("a", 3)
    scheduler.add(request)
    plan = run_step(scheduler, tokens=[5, 6, 7])
    assert plan is not None
    assert len(plan.rows[0].placement.blocks) == 2, "for 3 tokens of the prompt and 2 of those that come out"
    assert request.num_computed_tokens == 5


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
