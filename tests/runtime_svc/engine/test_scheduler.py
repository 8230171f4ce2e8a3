"""The scheduler alone, by hand and at random; integrity is checked after every move."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.request import (
    BucketKey,
    Finish,
    FinishReason,
    Request,
    SamplingParams,
    StopConditions,
    Timeline,
)
from runtime_svc.engine.scheduler import ScheduledRow, Scheduler, StepPlan
from tests.runtime_svc.fakes import make_manifest

ABORTED = Finish(FinishReason.ABORTED)


def make_request(name: str, num_prompt_tokens: int, *, max_new_tokens: int = 100, stop: Sequence[int] = ()) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(10, 10 + num_prompt_tokens)),
        sampling=SamplingParams(0.0, 0, 1.0, 0),
        stop=StopConditions(max_new_tokens, (), frozenset(stop)),
        timeline=Timeline(arrived_s=0.0),
    )


def make_scheduler(*, num_slots: int = 2, ctx_batch_size: int = 1) -> Scheduler:
    manifest = make_manifest(num_slots=num_slots, ctx_batch_size=ctx_batch_size)
    return Scheduler(BucketTable.from_manifest(manifest), num_slots=num_slots, ctx_batch_size=ctx_batch_size)


def run_step(scheduler: Scheduler, *, token: int = 5) -> StepPlan | None:
    """One step whose every row gives `token`."""
    plan = scheduler.schedule()
    scheduler.check_integrity()
    if plan is not None:
        scheduler.update(plan, [token] * plan.executable.batch_size, now_s=1.0)
        scheduler.check_integrity()
    return plan


def names(plan: StepPlan | None) -> list[str]:
    assert plan is not None
    return [row.request.request_id for row in plan.rows]


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
    assert (plan.rows[0].row, plan.rows[0].slot, plan.rows[0].num_tokens) == (0, 0, 1)
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


def test_prompts_run_back_to_back_while_nobody_waits_for_a_token() -> None:
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
    assert (names(plan), [row.row for row in plan.rows], [row.slot for row in plan.rows]) == (
        ["0", "1"],
        [0, 1],
        [0, 1],
    )
    assert plan.executable.tag == "context_encoding_16", "the longest of its rows decides"
    assert names(run_step(scheduler)) == ["0", "1"]
    assert names(run_step(scheduler)) == ["2"], "one slot was left"
    assert [request.request_id for request in scheduler.waiting] == ["3"]


def decode(scheduler: Scheduler) -> StepPlan:
    """Plans a token_generation step, after the prompts; its result is for the caller to give."""
    while (plan := scheduler.schedule()) is not None and plan.executable.submodel == "context_encoding":
        scheduler.update(plan, [5] * plan.executable.batch_size, now_s=1.0)
    assert plan is not None
    return plan


def test_the_step_that_follows_has_the_same_rows() -> None:
    scheduler = make_scheduler(ctx_batch_size=2)
    requests = [make_request("a", 3), make_request("b", 5)]
    for request in requests:
        scheduler.add(request)
    running = decode(scheduler)
    ahead = scheduler.schedule_ahead(running)
    assert ahead == StepPlan(running.executable, running.rows, follows=True)
    scheduler.update(running, [6, 7], now_s=1.0)
    further = scheduler.schedule_ahead(ahead)
    assert further is not None, "a step that follows is followed, too"
    scheduler.update(ahead, [8, 9], now_s=1.0)
    assert [request.output_token_ids for request in requests] == [[5, 6, 8], [5, 7, 9]]
    assert [request.num_computed_tokens for request in requests] == [5, 7]


def test_nothing_follows_a_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.schedule_ahead(plan) is None


def test_nothing_follows_where_somebody_waits() -> None:
    scheduler = make_scheduler(num_slots=1)
    scheduler.add(make_request("a", 3))
    running = decode(scheduler)
    scheduler.add(make_request("b", 3))
    assert scheduler.schedule_ahead(running) is None


def test_nothing_follows_where_a_row_ends_or_has_ended_or_pauses_or_another_is_ready() -> None:
    scheduler = make_scheduler(ctx_batch_size=2)
    a, b = make_request("a", 3), make_request("b", 3, max_new_tokens=3)
    for request in (a, b):
        scheduler.add(request)
    running = decode(scheduler)
    assert scheduler.schedule_ahead(running) is not None
    a.is_paused = True
    assert scheduler.schedule_ahead(running) is None
    alone = scheduler.schedule()
    assert names(alone) == ["b"]
    assert alone is not None
    a.is_paused = False
    assert scheduler.schedule_ahead(alone) is None, "a would have to wait for b to end"
    scheduler.update(running, [6, 6], now_s=1.0)
    assert scheduler.schedule_ahead(running) is None, "the next token is b's last"
    a.claim_finish(ABORTED, 1.0)
    scheduler.remove(a)
    assert scheduler.schedule_ahead(running) is None


def test_nothing_follows_into_another_bucket() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 14))
    running = decode(scheduler)
    assert (running.executable.tag, running.rows[0].request.num_computed_tokens) == ("token_generation_16", 14)
    ahead = scheduler.schedule_ahead(running)
    assert ahead is not None
    scheduler.update(running, [5, 5], now_s=1.0)
    assert scheduler.schedule_ahead(ahead) is None, "position 16 takes the next bucket"
    scheduler.update(ahead, [5, 5], now_s=1.0)
    other = decode(scheduler)
    assert other.executable.tag == "token_generation_64"
    assert scheduler.schedule_ahead(other) is not None


def test_a_slot_that_a_running_step_writes_goes_to_the_next_at_once() -> None:
    scheduler = make_scheduler(num_slots=1)
    first, second = make_request("first", 3, stop=[9]), make_request("second", 3)
    scheduler.add(first)
    running = decode(scheduler)
    ahead = scheduler.schedule_ahead(running)
    assert ahead is not None
    scheduler.update(running, [9], now_s=1.0)
    assert first.finish is not None
    scheduler.add(second)
    assert scheduler.schedule_ahead(ahead) is None
    assert scheduler.update(ahead, [7], now_s=1.0) == (), "computed for nobody"
    assert first.output_token_ids == [5, 9]
    assert names(run_step(scheduler)) == ["second"]
    assert (second.slot, second.output_token_ids) == (0, [5])


def test_stop_token_and_limit_free_the_slot() -> None:
    scheduler = make_scheduler()
    stopped, limited = make_request("stopped", 2, stop=[9]), make_request("limited", 2, max_new_tokens=2)
    scheduler.add(stopped)
    scheduler.add(limited)
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler, token=9)
    assert stopped.finish == Finish(FinishReason.STOP_TOKEN, stop_token_id=9)
    assert limited.finish == Finish(FinishReason.LENGTH)
    assert scheduler.num_running == 0
    assert stopped.output_token_ids == [5, 5, 9]


def test_stop_token_is_named_where_it_is_also_the_last_allowed() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2, max_new_tokens=1, stop=[5])
    scheduler.add(request)
    run_step(scheduler)
    assert request.finish == Finish(FinishReason.STOP_TOKEN, stop_token_id=5)


def test_request_that_ends_during_a_step_gets_nothing_from_it() -> None:
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
    rows = scheduler.update(plan, [7] * 2, now_s=3.0)
    assert [row.request for row in rows] == [mate]
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
    scheduler.update(plan, [7], now_s=2.0)
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


def test_nobody_is_admitted_while_admission_is_held() -> None:
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
    request.slot = 1
    with pytest.raises(AssertionError, match="runs in slot 0"):
        scheduler.check_integrity()


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts during and between steps, pauses and holds, in any order."""

    @initialize(num_slots=st.integers(1, 4), ctx_batch_size=st.integers(1, 3))
    def start(self, num_slots: int, ctx_batch_size: int) -> None:
        self.scheduler = make_scheduler(num_slots=num_slots, ctx_batch_size=ctx_batch_size)
        self.requests: list[Request] = []
        self.plan: StepPlan | None = None
        self.ahead: StepPlan | None = None

    @rule(num_prompt_tokens=st.integers(1, 16), max_new_tokens=st.integers(1, 20))
    def arrive(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        request = make_request(f"{len(self.requests)}", num_prompt_tokens, max_new_tokens=max_new_tokens, stop=[9])
        self.requests.append(request)
        self.scheduler.add(request)

    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice: object) -> None:
        unfinished = [request for request in self.requests if request.finish is None]
        if unfinished:
            request = choice.choice(unfinished)  # type: ignore[attr-defined]
            assert request.claim_finish(ABORTED, 0.0)
            self.scheduler.remove(request)

    @rule(choice=st.randoms(use_true_random=False), paused=st.booleans())
    def pause(self, choice: object, paused: bool) -> None:
        for request in self.scheduler.running:
            if choice.random() < 0.5:  # type: ignore[attr-defined]
                request.is_paused = paused

    @rule(admitting=st.booleans())
    def hold(self, admitting: bool) -> None:
        self.scheduler.is_admitting = admitting

    @precondition(lambda self: self.plan is None)
    @rule()
    def launch(self) -> None:
        self.plan = self.scheduler.schedule()
        if self.plan is None:
            ready = [one for one in self.scheduler.running if not one.is_paused]
            blocked = not self.scheduler.is_admitting or self.scheduler.num_running == self.scheduler.num_slots
            assert not ready, "somebody could have run"
            assert blocked or not self.scheduler.waiting, "somebody could have been admitted"
            return
        for row in self.plan.rows:
            self.check_row(self.plan, row)
        assert len({row.slot for row in self.plan.rows}) == len(self.plan.rows)

    @staticmethod
    def check_row(plan: StepPlan, row: ScheduledRow) -> None:
        assert row.slot == row.request.slot
        assert row.request.num_computed_tokens + row.num_tokens == row.request.num_tokens
        assert row.request.num_computed_tokens + row.num_tokens <= plan.executable.bucket[0]
        assert row.request.num_missing_tokens > 0
        assert row.row == row.slot or plan.executable.submodel == "context_encoding"

    @precondition(lambda self: self.plan is not None and self.ahead is None)
    @rule()
    def launch_ahead(self) -> None:
        assert self.plan is not None
        self.ahead = self.scheduler.schedule_ahead(self.plan)

    @precondition(lambda self: self.plan is not None)
    @rule(tokens=st.lists(st.integers(5, 9), min_size=4, max_size=4))
    def finish(self, tokens: list[int]) -> None:
        assert self.plan is not None
        before = {id(row.request): len(row.request.output_token_ids) for row in self.plan.rows}
        rows = self.scheduler.update(self.plan, tokens, 1.0)
        for row in rows:
            assert len(row.request.output_token_ids) == before[id(row.request)] + 1
        self.plan, self.ahead = self.ahead, None
        for row in self.plan.rows if self.plan is not None else ():
            # What was planned before the token was known fits it all the same.
            if row.request.finish is None:
                self.check_row(self.plan, row)

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        unfinished = sum(request.finish is None for request in self.requests)
        assert len(self.scheduler.waiting) + self.scheduler.num_running == unfinished

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for plan in (self.plan, self.ahead):
            if plan is not None:
                self.scheduler.update(plan, [9] * 4, 1.0)
        self.scheduler.is_admitting = True
        for request in self.requests:
            request.is_paused = False
        while run_step(self.scheduler) is not None:
            pass
        assert self.scheduler.num_running == 0
        assert all(request.finish is not None for request in self.requests), "somebody was forgotten"


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
