"""Async scheduling: the engine calls step N+1 while step N runs.

The ranks take the tokens of step N, which they know first, as inputs of step N+1, so that they need not wait for the
engine in between. This file has all of it but `StepPlan.depends_on_previous` and the tokens that the inputs of such a
step leave out. If it is off, the engine calls steps one by one and gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bundle.abi.submodels import SUBMODELS
from execution.step import StepResult
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan
from runtime_svc.engine.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step that the engine has called, and the awaitable of its result."""

    plan: StepPlan
    result: Awaitable[StepResult]


class AsyncScheduling:
    """Plans and calls the step behind the one that runs, if that lacks nothing but its tokens."""

    def __init__(
        self,
        scheduler: Scheduler,
        buckets: BucketTable,
        begin: Callable[[StepPlan], Awaitable[RunningStep]],
        *,
        is_on: bool,
    ) -> None:
        """Starts with no step called.

        Args:
            scheduler: Its requests run.
            buckets: Where its policy takes executables from.
            begin: Calls the ranks for a step.
            is_on: The switch.
        """
        self._scheduler = scheduler
        self._buckets = buckets
        self._begin = begin
        self._is_on = is_on
        self._in_flight: RunningStep | None = None

    async def begin_behind(self, running: RunningStep) -> None:
        """Calls the step behind a running one, unless the engine has to know its result first."""
        plan = self.plan_behind(running.plan) if self._is_on else None
        if plan is not None:
            self._in_flight = await self._begin(plan)

    def take(self) -> RunningStep | None:
        """The step that has been called behind the one that ended; None if there is none."""
        step, self._in_flight = self._in_flight, None
        return step

    def plan_behind(self, running: StepPlan) -> StepPlan | None:
        """Plans the step behind a running one: the next token of the same rows, by the same executable.

        A row may end all the same, by its token or by its client. Then the step computes it in vain, and the next
        owner of its place in the KV cache runs after that.

        Returns:
            None if a request waits to start, if a running one is paused or not in the step, if rows have more than one
            token or none of them new, if a row comes to its limit, grows out of its bucket or finds no room: the next
            step is another one then.
        """
        rows, scheduler = running.rows, self._scheduler
        if scheduler.waiting or SUBMODELS[running.executable.submodel].tokens != 1:
            return None
        if len(rows) != sum([not request.is_paused for request in scheduler.running]):
            return None
        next_rows = []
        for row in rows:
            request = row.request
            if request.is_paused or request.finish is not None or not row.samples or request.num_missing_tokens == 1:
                return None
            placement = scheduler.kv.reserve(request, row.num_tokens + 1)
            if placement is None:
                return None
            next_rows.append(ScheduledRow(row.row, request, row.start + 1, 1, placement, samples=True))
        if self._buckets.for_tokens(next_rows) is not running.executable:
            return None
        return StepPlan(running.executable, tuple(next_rows), depends_on_previous=True)
