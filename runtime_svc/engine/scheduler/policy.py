"""Which requests compute how many of their tokens in the next step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import Protocol

from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.request import Request
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan

#: `KvManager.reserve`.
Reserve = Callable[[Request, int], Placement | None]


class Policy(Protocol):
    """Picks rows, token counts and the executable of a step."""

    def plan(self, running: Collection[Request], waiting: Collection[Request], reserve: Reserve) -> StepPlan | None:
        """Plans the next step, while none is in flight.

        Every request lacks `num_tokens - num_computed_tokens` tokens in the KV cache, at least one. A policy plans all
        of them or the first of them. It skips requests that are paused.

        Args:
            running: Requests that have been planned before, oldest first.
            waiting: Requests that may start, oldest first.
            reserve: Makes room in the KV cache for the tokens of a request that the step computes. If the step can give
                several tokens, it computes all of them but the last. The policy plans every request that it reserves
                room for.

        Returns:
            The step; None if no request can run.
        """


class WholePrompts:
    """Computes a prompt in one context_encoding step, then its sequence token by token in token_generation steps.

    Prompts go first, in order of arrival, but never twice in a row while a sequence is ready for its next token:
    neither long prompts nor a stream of short ones stall the running sequences.
    """

    def __init__(self, buckets: BucketTable, *, ctx_batch_size: int) -> None:
        """Starts with no step planned.

        Args:
            buckets: Executables to choose from. Row r of token_generation reads and writes slot r.
            ctx_batch_size: Prompts that one context_encoding step computes.
        """
        self._buckets = buckets
        self._ctx_batch_size = ctx_batch_size
        self._prompts_ran_last = False

    def plan(self, running: Collection[Request], waiting: Collection[Request], reserve: Reserve) -> StepPlan | None:
        """Plans prompts or tokens; see `Policy`."""
        ready = [request for request in running if not request.is_paused]
        plan = None
        if waiting and not (ready and self._prompts_ran_last):
            plan = self._plan_prompts(waiting, reserve)
        self._prompts_ran_last = plan is not None
        if plan is None and ready:
            plan = self._plan_tokens(ready, reserve)
        return plan

    def _plan_prompts(self, waiting: Collection[Request], reserve: Reserve) -> StepPlan | None:
        rows: list[ScheduledRow] = []
        for request in islice(waiting, self._ctx_batch_size):
            placement = reserve(request, request.num_tokens)
            if placement is None:
                break
            rows.append(ScheduledRow(len(rows), request, 0, request.num_tokens, placement, samples=True))
        if not rows:
            return None
        return StepPlan(self._buckets.for_prompt(max([row.num_tokens for row in rows])), tuple(rows))

    def _plan_tokens(self, ready: list[Request], reserve: Reserve) -> StepPlan:
        rows = []
        for request in ready:
            start, placement = request.num_computed_tokens, reserve(request, 1)
            assert placement is not None, "a slot has room for the longest sequence"
            assert start + 1 == request.num_tokens, f"{request.request_id} lacks more than its newest token"
            rows.append(ScheduledRow(placement.blocks[0], request, start, 1, placement, samples=True))
        return StepPlan(self._buckets.for_position(max([row.start for row in rows])), tuple(rows))
