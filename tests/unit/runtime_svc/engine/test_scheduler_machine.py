"""The scheduler at random: every move in any order, and its integrity after each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bundle.abi.inputs import COMPUTED_CONTEXT, LIVE_ROWS
from runtime_svc.engine.config import ChunkLimits
from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.request import Finish, FinishReason, Request, Session
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan
from runtime_svc.engine.scheduler.scheduler import Scheduler
from tests.ranks.scheduling import (
    PromptParts,
    give_adapters,
    make_block_scheduler,
    make_parts_scheduler,
    make_request,
    make_scheduler,
    run_step,
    update,
)

ABORTED = Finish(FinishReason.ABORTED)
#: Chunks of which each is one step, and such that several prompts fit in.
CHUNKS: Any = st.sampled_from(
    [
        {"prompt_buckets": (8, 16), "chunks": ChunkLimits(8)},
        {"prompt_buckets": (8, 64), "chunks": ChunkLimits(60)},
        {"prompt_buckets": (8, 64), "chunks": ChunkLimits(200)},
    ]
)


def make_chunking_scheduler(make: Callable[..., Scheduler], chunks: dict[str, Any], **options: Any) -> Scheduler:
    return make(**chunks, **options)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts during and between steps, pauses and holds, in any order.

    Some of them continue sessions, some are sequences of one call, some name adapters. On slots and on blocks that do
    not suffice for all. With the policy that serves, steps are also called asynchronously; the other one gives several
    tokens a row.
    """

    @initialize(
        scheduler=st.one_of(
            st.builds(
                make_chunking_scheduler,
                st.just(make_scheduler),
                CHUNKS,
                num_slots=st.integers(1, 4),
                ctx_batch_size=st.integers(1, 3),
            ),
            st.builds(
                make_chunking_scheduler,
                st.just(make_block_scheduler),
                CHUNKS,
                num_blocks=st.integers(16, 30),
                num_slots=st.integers(1, 4),
                ctx_batch_size=st.integers(1, 3),
                flags=st.sampled_from([(), (COMPUTED_CONTEXT,), (COMPUTED_CONTEXT, LIVE_ROWS)]),
                prefix_caching=st.booleans(),
            ),
            st.builds(
                make_parts_scheduler,
                st.one_of(
                    st.builds(SlotManager, st.integers(1, 4), st.just(64)),
                    st.builds(BlockManager, st.integers(13, 30), st.just(3), caches_prefixes=st.booleans()),
                ),
                max_running=st.integers(1, 4),
                max_tokens=st.integers(1, 7),
                max_new_tokens=st.just(3),
            ),
        ),
        num_adapter_slots=st.integers(1, 2),
    )
    def start(self, scheduler: Scheduler, num_adapter_slots: int) -> None:
        self.scheduler = scheduler
        self.adapters = give_adapters(scheduler, num_adapter_slots, "xyz")
        # By slot, the adapter that the ranks hold.
        self.written: dict[int, str] = {}
        self.is_async = not isinstance(scheduler.policy, PromptParts)
        self.requests: list[Request] = []
        self.sessions = {name: Session("caller", name, 60.0, 0.0) for name in "abc"}
        self.plan: StepPlan | None = None
        self.in_flight: StepPlan | None = None
        # Tokens of the steps of prompts since the newest step of tokens.
        self.prompt_steps: list[int] = []

    @rule(
        num_prompt_tokens=st.integers(1, 16),
        max_new_tokens=st.integers(1, 20),
        name=st.sampled_from(["", "", "a", "b", "c"]),
        num_sequences=st.sampled_from([1, 1, 2, 4]),
        adapter=st.sampled_from(["", "", "x", "y", "z"]),
    )
    def arrive(self, num_prompt_tokens: int, max_new_tokens: int, name: str, num_sequences: int, adapter: str) -> None:
        request = make_request(f"{len(self.requests)}", num_prompt_tokens, max_new_tokens=max_new_tokens, stop=[9])
        request.adapter = self.adapters.find(adapter)
        session = self.sessions.get(name)
        if session is not None and session.user is None:
            request.session, session.user = session, request
        for one in request.fan_out(1 if request.session is not None else num_sequences):
            self.requests.append(one)
            self.scheduler.add(one)

    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice: random.Random) -> None:
        unfinished = [request for request in self.requests if request.finish is None]
        if unfinished:
            request = choice.choice(unfinished)
            assert request.claim_finish(ABORTED, 0.0)
            self.scheduler.remove(request)

    @rule(choice=st.randoms(use_true_random=False), paused=st.booleans())
    def pause(self, choice: random.Random, paused: bool) -> None:
        for request in self.scheduler.running:
            if choice.random() < 0.5:
                request.is_paused = paused

    @rule(admitting=st.booleans())
    def hold(self, admitting: bool) -> None:
        self.scheduler.is_admitting = admitting

    @precondition(lambda self: self.plan is None)
    @rule(keeps_running=st.booleans())
    def swap(self, keeps_running: bool) -> None:
        self.scheduler.kv.reset()
        self.scheduler.begin_epoch(keeps_running=keeps_running)

    @precondition(lambda self: self.plan is None)
    @rule()
    def launch(self) -> None:
        has_ready = any(
            not one.is_paused and 0 < one.num_computed_tokens == one.num_tokens - 1 for one in self.scheduler.running
        )
        self.plan = self.scheduler.schedule()
        self.written |= {write.slot: str(write.paths_by_rank[0]) for write in self.adapters.take_writes()}
        self.check_delay(has_ready)
        if self.plan is None:
            running = self.scheduler.running
            assert all(one.is_paused for one in running), "a request could have run"
            blocked = not self.scheduler.is_admitting or running
            assert blocked or not self.scheduler.waiting, "a request could have started"
            return
        for row in self.plan.rows:
            self.check_row(self.plan, row)
        block_tokens = self.scheduler.kv.block_tokens
        written = [block for row in self.plan.rows for block in row.placement.blocks[row.num_cached // block_tokens :]]
        assert len(written) == len(set(written)), "two rows write the same place"
        assert len({row.row for row in self.plan.rows}) == len(self.plan.rows)
        assert len({self.scheduler.uses_old(row.request) for row in self.plan.rows}) == 1, "weights cannot mix"

    def check_delay(self, has_ready: bool) -> None:
        """Between two steps of tokens there is one of prompts, or several that have no more tokens than a chunk.

        Of old weights and new ones, each has its own steps.
        """
        if self.plan is None or self.scheduler.num_old or self.plan.executable.submodel == "token_generation":
            self.prompt_steps.clear()
            return
        policy = self.scheduler.policy
        num_tokens = [row.num_tokens for row in self.plan.rows]
        self.prompt_steps.append(sum(num_tokens))
        if has_ready and not isinstance(policy, PromptParts):
            assert max(num_tokens) <= policy.chunk_size.tokens
            assert len(self.prompt_steps) == 1 or sum(self.prompt_steps) <= policy.chunk_size.tokens
            if len(self.prompt_steps) > 1:
                assert all(row.samples for row in self.plan.rows), "a step that gives no token delays those who wait"

    def check_row(self, plan: StepPlan, row: ScheduledRow) -> None:
        request = row.request
        assert row.placement == self.scheduler.kv.reserve(request, row.num_tokens - row.num_moved)
        assert row.num_cached == request.num_computed_tokens
        assert 0 <= row.num_moved < row.num_tokens
        assert 0 < row.num_tokens <= request.num_tokens - row.start
        assert row.samples == (row.start + row.num_tokens == request.num_tokens)
        assert request.num_missing_tokens > 0
        if request.adapter is not None:
            assert request.adapter_slot is not None
            assert self.written[request.adapter_slot] == request.adapter.digest
        if plan.executable.submodel == "token_generation":
            assert row.num_tokens == 1
            assert row.start < plan.executable.bucket[-1]
            assert row.row < plan.executable.batch_size
            policy = self.scheduler.policy
            assert policy._buckets.packs_rows or row.placement.blocks == (row.row,)
        else:
            assert row.num_tokens <= plan.executable.bucket[0]

    @precondition(lambda self: self.plan is not None and self.in_flight is None and self.is_async)
    @rule()
    def launch_behind(self) -> None:
        assert self.plan is not None
        self.in_flight = self.scheduler.schedule_behind(self.plan)

    @precondition(lambda self: self.plan is not None)
    @rule(tokens=st.lists(st.lists(st.integers(5, 9), max_size=3), min_size=4, max_size=4))
    def finish(self, tokens: list[list[int]]) -> None:
        plan = self.plan
        assert plan is not None
        if self.in_flight is not None:
            # Every row of a step that another one depends on gives one token.
            tokens = [[*row, 5][:1] for row in tokens]
        elif self.is_async:
            # Its executables give one token a row, or none, and it makes room for no more.
            tokens = [row[:1] for row in tokens]
        expected = {}
        for row in plan.rows:
            if row.request.finish is None:
                given = tokens[row.row][: row.request.num_missing_tokens] if row.samples else []
                expected[row.request] = given[: given.index(9) + 1] if 9 in given else given
        before = {request: len(request.output_token_ids) for request in expected}
        taken = {one.request: one.token_ids for one in update(self.scheduler, plan, tokens)}
        assert taken == {request: new for request, new in expected.items() if new}
        for request, new in expected.items():
            assert request.output_token_ids[before[request] :] == new
        self.plan, self.in_flight = self.in_flight, None
        for row in self.plan.rows if self.plan is not None else ():
            # The plan was made before the token was known, and fits it all the same.
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
        for plan in (self.plan, self.in_flight):
            if plan is not None:
                update(self.scheduler, plan, [[9]] * 4)
        self.scheduler.is_admitting = True
        for request in self.requests:
            request.is_paused = False
        # Each sequence takes at most 36 steps, and as many again for each that it makes room for.
        for _ in range(36 * (len(self.requests) + 1) ** 2):
            if run_step(self.scheduler) is None:
                break
        assert self.scheduler.num_running == 0
        assert all(request.finish is not None for request in self.requests), "a request was forgotten"


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
