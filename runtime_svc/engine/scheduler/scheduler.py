"""Moves requests from the queue into the KV cache and on to their end.

There are no phases: every running request catches up `num_computed_tokens` with `num_tokens`, and whenever it has,
its step gives new tokens. A policy picks which requests compute how many tokens; a KV manager finds room for them.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice, takewhile
from typing import Final, NamedTuple

from bundle.abi.submodels import SUBMODELS
from edge.histogram import Histogram
from runtime_svc.engine.adapters import AdapterSlots
from runtime_svc.engine.kv.manager import KvManager
from runtime_svc.engine.request import BucketKey, Finish, FinishReason, Request
from runtime_svc.engine.scheduler.plan import RowTokens, ScheduledRow, StepPlan
from runtime_svc.engine.scheduler.policy import AlternatingSteps

#: The oldest waiting requests, of which a plan picks those that start: more would cost each step time, and a step has
#: room for a few.
MAX_CANDIDATES: Final = 32

#: Callers choose the names of adapters, and a metric that had all of them would grow without end.
MAX_COUNTED_ADAPTERS: Final = 64
OTHER_ADAPTERS: Final = "other"

#: Upper bounds in seconds. Those of vLLM for the same metrics, so that its boards and rules fit.
FIRST_TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
SWAP_PAUSE_BOUNDS_S: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


class EngineStatistics:
    """Counts of one engine since it started. Scheduler, requests and engine write them."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        self.swap_pause_s = Histogram(SWAP_PAUSE_BOUNDS_S)
        self.prompt_tokens = 0
        #: Tokens of prompts that were looked up in the KV cache when their requests started.
        self.looked_up_tokens = 0
        #: Of those, tokens that the KV cache held.
        self.cached_prompt_tokens = 0
        #: Of the latter, tokens of requests that continue sessions.
        self.session_tokens = 0
        self.generated_tokens = 0
        #: How often a request gave back its part of the KV cache to make room.
        self.preemptions = 0
        #: Requests that have ended, by reason.
        self.finished: Counter[FinishReason] = Counter()
        #: Steps of each executable.
        self.steps: Counter[BucketKey] = Counter()
        #: Tokens that rows of each executable computed, and those that its static shape wasted on them.
        self.computed_tokens: Counter[BucketKey] = Counter()
        self.padding_tokens: Counter[BucketKey] = Counter()
        #: How often ranks were ended because they hung.
        self.rank_hangs = 0
        #: Requests whose logits were NaN or infinite.
        self.invalid_requests = 0
        #: Requests that were refused because ranks had been lost over their prompts.
        self.quarantined_requests = 0
        #: How often dead ranks were replaced.
        self.rank_restarts = 0
        #: Adapters that were written into slots.
        self.adapter_writes = 0
        #: Requests that have started, by the names of their adapters: by those of the first `MAX_COUNTED_ADAPTERS`, and
        #: `OTHER_ADAPTERS` for the rest.
        self.adapter_requests: Counter[str] = Counter()

    def count_adapter(self, name: str) -> None:
        """Counts a request that starts with an adapter."""
        is_counted = name in self.adapter_requests or len(self.adapter_requests) < MAX_COUNTED_ADAPTERS
        self.adapter_requests[name if is_counted else OTHER_ADAPTERS] += 1


class _Side(NamedTuple):
    """The requests that one set of weights computes, and the policy that picks their steps."""

    policy: AlternatingSteps
    running: Collection[Request]
    waiting: Sequence[Request]


class Scheduler:
    """Plans steps and takes in their results.

    While requests run on with old weights, their steps alternate with those of the others, because a step has one set
    of weights. There are at most two sets, and each swap exchanges them: even epochs have one, odd ones the other.
    """

    def __init__(
        self, policy: AlternatingSteps, kv: KvManager, *, max_running: int, adapters: AdapterSlots | None = None
    ) -> None:
        """Starts without requests; without `adapters` there are no slots, and no request names an adapter."""
        #: Epoch of the weights in use; 0 while the first ones are awaited.
        self.weight_epoch = 1
        #: Requests that old weights compute, those of their calls that wait included.
        self.num_old = 0
        self._old_policy = policy
        self._newest_policy = policy
        #: Picks the rows of each step.
        self.policy = policy
        self.kv = kv
        #: The slots of the ranks, if they have any.
        self.adapters = adapters or AdapterSlots(0)
        self._waiting: deque[Request] = deque()
        # In order of admission; the values mean nothing.
        self._running: dict[Request, None] = {}
        self.max_running = max_running
        self.statistics = EngineStatistics()
        #: While False, waiting requests do not start.
        self.is_admitting = True

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that have not started, oldest first."""
        return self._waiting

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that have started, oldest first."""
        return tuple(self._running)

    @property
    def num_running(self) -> int:
        """Requests that have started."""
        return len(self._running)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys and values the cache holds for running requests."""
        return sum(request.num_computed_tokens for request in self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of waiting requests."""
        return sum(request.num_tokens for request in self._waiting)

    def add(self, request: Request) -> None:
        """Queues a new request, for the weights in use."""
        assert request.finish is None
        request.weight_epoch = self.weight_epoch
        self.adapters.join(request)
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes an ended request out, and leaves its part of the KV cache to its session or frees it, at once."""
        session, finish = request.session, request.finish
        if request in self._running:
            del self._running[request]
            # What failed may have written anything.
            keeps = session is not None and finish is not None and finish.reason is not FinishReason.ERROR
            self._give_back(request, self.kv.keep if keeps else self.kv.release)
        else:
            self._waiting.remove(request)
        self.adapters.leave(request)
        if self.num_old and self.uses_old(request):
            self.num_old -= 1
        if session is not None:
            session.user = None
            session.last_used_s = request.timeline.ended_s or session.last_used_s

    def schedule(self) -> StepPlan | None:
        """Plans the next step, while none is in flight; None if no request can run."""
        waiting = self._list_startable()
        plan = next((plan for plan in map(self._plan, self._list_sides(waiting)) if plan is not None), None)
        assert plan is not None or self._running or not waiting, "a prompt does not fit the empty KV cache"
        if plan is not None:
            for row in plan.rows:
                self._start(row)
        return plan

    def begin_epoch(self, *, keeps_running: bool) -> None:
        """Takes in that a swap has put other weights in use. With `keeps_running`, those before compute on the calls of
        which a sequence runs; the new ones compute all other requests.
        """
        self.weight_epoch += 1
        kept = {request.call_id for request in self._running} if keeps_running else set()
        for request in (*self._running, *self._waiting):
            if request.call_id not in kept:
                request.weight_epoch = self.weight_epoch
        self.num_old = sum(self.uses_old(request) for request in (*self._running, *self._waiting))
        # It has seen the same steps, and goes its own way.
        self._old_policy = copy.copy(self.policy)

    def uses_old(self, request: Request) -> bool:
        """Tells whether old weights compute a request."""
        return (self.weight_epoch - request.weight_epoch) % 2 == 1

    def schedule_behind(self, running: StepPlan) -> StepPlan | None:
        """Plans the step behind one that runs, if it lacks nothing but its tokens: not while a request waits to start,
        unless what it lacks is a slot for its adapter.

        The ranks take the tokens of the running step, which they know first, as inputs of this one.
        """
        startable = next(self.adapters.list_startable(self._waiting), None)
        return None if startable is not None else self.policy.plan_behind(running, self._running, self.kv)

    def update(self, plan: StepPlan, tokens: Sequence[Sequence[int]], now_s: float) -> list[RowTokens]:
        """Takes in the result of a step; returns new tokens of the requests that had not ended while the step ran.

        A request that a stop token or its limit ends leaves at once, without the tokens behind. `tokens` has those of
        every row of the batch, idle rows included; those of rows that do not sample are ignored. A row that samples and
        gives no token computes its newest token again.
        """
        executable, outputs = plan.executable, []
        key = BucketKey(executable.submodel, executable.bucket)
        pads_rows = SUBMODELS[executable.submodel].tokens == "bucket"
        num_computed = num_padding = 0
        for row in plan.rows:
            request = row.request
            if request.finish is not None:
                continue
            assert row.num_cached == request.num_computed_tokens, f"{request.request_id} was computed out of order"
            request.bucket_steps[key] += 1
            num_computed += row.num_tokens
            if pads_rows:
                request.bucket_padding[key] += executable.bucket[0] - row.num_tokens
                num_padding += executable.bucket[0] - row.num_tokens
            if taken := self._settle(row, tokens[row.row], now_s):
                outputs.append(RowTokens(request, taken, row.row))
        self.statistics.steps[key] += 1
        self.statistics.computed_tokens[key] += num_computed
        self.statistics.padding_tokens[key] += num_padding
        return outputs

    def list_jumps(self) -> list[tuple[Request, Sequence[int]]]:
        """Lists the requests that should take known tokens now, with those; see `AlternatingSteps.count_gainful`.

        Lists none while a request could start: its prompt would wait for one of their steps after the other.
        """
        if self._list_startable():
            return []
        going = [request for request in self._running if not request.stands_still]
        return [
            (request, request.known_tokens[:count])
            for request in going
            if request.known_tokens and (count := self.policy.count_gainful(request, len(going), self.kv))
        ]

    def jump(self, request: Request, known: Sequence[int], now_s: float) -> RowTokens:
        """Appends known tokens to a running request, which the next step computes together."""
        assert request.constrained is not None, "its constraint forces them"
        taken, finish = request.take(known)
        del request.constrained.forced[: len(taken)]
        self._count_tokens(request, len(taken), now_s)
        self._end(request, finish, now_s)
        return RowTokens(request, taken, -1)

    def check_integrity(self) -> None:
        """Asserts that queue, KV cache and requests agree."""
        self.kv.check_integrity(self._running)
        self.adapters.check_integrity(self._running, self._waiting)
        assert len(self._running) <= self.max_running, f"{len(self._running)} requests run"
        for request in self._running:
            assert request.finish is None, f"{request.request_id} has ended and runs"
            lacks = request.num_tokens - request.num_computed_tokens
            assert 0 < lacks <= request.num_tokens, f"{request.request_id} lacks {lacks} tokens"
        for request in self._waiting:
            assert request.finish is None, f"{request.request_id} has ended and waits"
            assert not request.num_computed_tokens, f"{request.request_id} waits with computed tokens"
        num_old = sum(self.uses_old(request) for request in (*self._waiting, *self._running))
        assert not self.num_old or self.num_old == num_old, f"old weights compute {num_old} requests"
        assert len({*self._waiting, *self._running}) == len(self._waiting) + len(self._running), "queued twice"

    def _start(self, row: ScheduledRow) -> None:
        """Takes in that a step computes a request: that it runs, and what the KV cache turned out to hold of it."""
        request = row.request
        if request not in self._running:
            self._waiting.remove(request)
            self._running[request] = None
            self.adapters.pin(request)
            if request.adapter is not None:
                self.statistics.count_adapter(request.adapter.name)
            request.num_cached_tokens = row.num_cached
            if row.num_cached and request.session is not None:
                # It goes on where positions behind may have been written already.
                request.num_written = request.session.num_written
            if self.kv.caches_prefixes or request.session is not None:
                self.statistics.looked_up_tokens += request.num_tokens
            self.statistics.cached_prompt_tokens += row.num_cached
            if request.session is not None:
                self.statistics.session_tokens += row.num_cached
        request.num_computed_tokens = row.num_cached
        request.num_written = max(request.num_written, row.start + row.num_tokens)

    def _list_startable(self) -> Sequence[Request]:
        """Lists the oldest waiting requests that may start now, oldest first: one that runs alone, or any others."""
        if not self._waiting or not self.is_admitting or any(request.runs_alone for request in self._running):
            return ()
        if self._waiting[0].runs_alone:
            return () if self._running else (self._waiting[0],)
        oldest = takewhile(lambda request: not request.runs_alone, self._waiting)
        max_starts = min(MAX_CANDIDATES, self.max_running - len(self._running))
        return tuple(islice(self.adapters.list_startable(oldest), max_starts))

    def _list_sides(self, waiting: Sequence[Request]) -> list[_Side]:
        """Divides requests by the weights that compute them: those that did not have the newest step come first."""
        if not self.num_old:
            return [_Side(self.policy, self._running, waiting)]
        sides = [
            _Side(policy, *([one for one in part if self.uses_old(one) is is_old] for part in (self._running, waiting)))
            for policy, is_old in ((self.policy, False), (self._old_policy, True))
        ]
        return sides if self._newest_policy is self._old_policy else sides[::-1]

    def _plan(self, side: _Side) -> StepPlan | None:
        """Plans a step of one set of weights; None if none of its requests can run."""
        has_company = len(side.running) < len(self._running)
        while True:
            plan = side.policy.plan(side.running, side.waiting, self.kv, has_company=has_company)
            if plan is not None:
                self._newest_policy = side.policy
            if plan is not None or not self._preempt(side):
                return plan

    def _preempt(self, side: _Side) -> bool:
        """Makes room for a request that could run: the newest one but the oldest starts anew; False if that helps none.

        It keeps the slot of its adapter, so that no running request ever waits for one. The oldest one of all never
        gives way, so that some request always goes on.
        """
        if all(request.stands_still for request in side.running):
            return False
        oldest = next(request for request in self._running if not request.stands_still)
        newest = next((one for one in reversed(self._running) if one.num_computed_tokens and one is not oldest), None)
        if newest is None:
            assert oldest not in side.running, f"{oldest.request_id} does not fit the KV cache alone"
            return False
        self._give_back(newest, self.kv.release)
        newest.num_computed_tokens = newest.num_written = 0
        self.statistics.preemptions += 1
        return True

    def _give_back(self, request: Request, give: Callable[[Request], int]) -> None:
        request.num_kv_blocks = max(request.num_kv_blocks, give(request))

    def _settle(self, row: ScheduledRow, given: Sequence[int], now_s: float) -> list[int]:
        """Takes in what a step computed of a row and the tokens that came out; returns those that the request took.

        It appends, counts, commits, and then removes what has ended: neither other requests nor the session get keys
        of tokens that the request does not have, however many the step computed.
        """
        request, taken, finish = row.request, list[int](), None
        if row.samples:
            taken, finish = request.take(given)
            # The newest one has not been an input yet, or has to be one again if none came out.
            request.num_computed_tokens = request.num_tokens - 1
        else:
            request.num_computed_tokens = row.start + row.num_tokens
        if taken:
            self._count_tokens(request, len(taken), now_s)
        self.kv.commit(request)
        self._end(request, finish, now_s)
        return taken

    def _end(self, request: Request, finish: Finish | None, now_s: float) -> None:
        """Takes out a request that its newest token ended."""
        if finish is not None:
            request.claim_finish(finish, now_s)
            self.remove(request)

    def _count_tokens(self, request: Request, count: int, now_s: float) -> None:
        timeline, statistics = request.timeline, self.statistics
        statistics.generated_tokens += count
        if timeline.newest_token_s is None:
            timeline.first_token_s = now_s
            statistics.prompt_tokens += len(request.prompt_token_ids)
            statistics.first_token_s.observe(now_s - timeline.arrived_s)
        else:
            statistics.inter_token_s.observe(now_s - timeline.newest_token_s)
        timeline.newest_token_s = now_s
