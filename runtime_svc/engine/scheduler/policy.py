"""Which requests compute how many of their tokens in the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from typing import Protocol

from runtime_svc.engine.kv.manager import KvManager, Placement
from runtime_svc.engine.request import Request
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan
from runtime_svc.engine.scheduler.prefix_buckets import CachedPrompt


class Policy(Protocol):
    """Picks rows, token counts and the executable of a step."""

    def plan(self, running: Collection[Request], waiting: Collection[Request], kv: KvManager) -> StepPlan | None:
        """Plans the next step, while none is in flight.

        Every request lacks `num_tokens - num_computed_tokens` tokens in the KV cache, at least one. A policy plans all
        of them or the first of them, behind those that the cache turns out to hold. It skips requests that are paused.

        Args:
            running: Requests that have been planned before, oldest first.
            waiting: Requests that may start, oldest first.
            kv: Makes room for the tokens of a request that the step computes. If the step can give several tokens, it
                computes all of them but the last. The policy plans every request that it reserves room for and that
                held none.

        Returns:
            The step; None if no request can run, or if a running one lacks room.
        """


class AlternatingSteps:
    """Alternates between context_encoding steps, which compute prompts, and token_generation steps, one token a row.

    Prompts go in order of arrival, but never twice in a row while a sequence is ready for its next token: neither long
    prompts nor a stream of short ones stall the running sequences. Long prompts are computed in chunks: as large as the
    executables allow while no sequence is ready, else of at most `max_chunk_tokens`. What no executable of
    context_encoding takes is computed token by token. A prompt lets others pass while one with which it can share a
    beginning is computed.
    """

    def __init__(self, buckets: BucketTable, *, max_chunk_tokens: int) -> None:
        """Starts with no step planned.

        Args:
            buckets: Executables to choose from.
            max_chunk_tokens: Tokens of a row that a context_encoding step computes between two tokens of a sequence, if
                there is an executable for so few.
        """
        self._buckets = buckets
        self._chunk_tokens = buckets.find_chunk_tokens(max_chunk_tokens)
        self._prompts_ran_last = False
        # The last row of the newest token_generation step that had no room for all.
        self._served_last: Request | None = None

    def plan(self, running: Collection[Request], waiting: Collection[Request], kv: KvManager) -> StepPlan | None:
        """Plans prompts or tokens; see `Policy`."""
        prompts: list[Request] = []
        ready: list[Request] = []
        for request in running:
            if not request.is_paused:
                (ready if self._is_ready(request) else prompts).append(request)
        plan = None
        if (prompts or waiting) and not (ready and self._prompts_ran_last):
            # Nothing starts in the room of the next token of what runs: it would have to make room at once.
            if any(kv.reserve(request, 1) is None for request in ready):
                return None
            max_tokens = self._chunk_tokens if ready else self._buckets.max_chunk_tokens
            plan = self._plan_prompts(chain(prompts, waiting), max_tokens, kv)
        self._prompts_ran_last = plan is not None
        if plan is None and ready:
            plan = self._plan_tokens(ready, kv)
        return plan

    def _is_ready(self, request: Request) -> bool:
        """Whether a running request goes on by token_generation."""
        num_computed = request.num_computed_tokens
        if num_computed and request.num_tokens - num_computed == 1:
            return True
        return not self._buckets.find_room(num_computed)

    def _plan_prompts(self, requests: Iterable[Request], max_tokens: int, kv: KvManager) -> StepPlan | None:
        prompts: list[CachedPrompt] = []
        placed: list[tuple[Request, Placement]] = []
        choice = None
        for request in requests:
            if len(placed) == self._buckets.num_context_rows:
                break
            start = request.num_computed_tokens or kv.find_prefix(request)
            if not self._buckets.find_room(start):
                start = 0
            if not request.num_computed_tokens and any(kv.will_find_more(request, start, other) for other, _ in placed):
                # It starts when it can share what this very step computes.
                continue
            num_lacking = request.num_tokens - start
            prompt = CachedPrompt(min(num_lacking, max_tokens, self._buckets.find_room(start)), start)
            wider = self._buckets.for_prompts([*prompts, prompt])
            # Room for all of the prompt, so that it is not given up half-way.
            num_cached = start - request.num_computed_tokens
            placement = None if wider is None else kv.reserve(request, num_lacking, num_cached=num_cached)
            if placement is None:
                break
            choice = wider
            prompts.append(prompt)
            placed.append((request, placement))
        if choice is None:
            return None
        rows = [
            ScheduledRow(
                index,
                request,
                prompt.num_cached - num_moved,
                prompt.num_active + num_moved,
                placement,
                samples=prompt.num_cached + prompt.num_active == request.num_tokens,
                num_moved=num_moved,
            )
            for index, ((request, placement), prompt, num_moved) in enumerate(
                zip(placed, prompts, choice.num_moved, strict=True)
            )
        ]
        return StepPlan(choice.executable, tuple(rows))

    def _plan_tokens(self, ready: list[Request], kv: KvManager) -> StepPlan | None:
        rows: list[ScheduledRow] = []
        turn = self._take_turn(ready)
        for request in turn:
            start, placement = request.num_computed_tokens, kv.reserve(request, 1)
            if placement is None:
                return None
            row = len(rows) if self._buckets.packs_rows else placement.blocks[0]
            rows.append(ScheduledRow(row, request, start, 1, placement, samples=start + 1 == request.num_tokens))
        self._served_last = turn[-1]
        return StepPlan(self._buckets.for_tokens(rows), tuple(rows))

    def _take_turn(self, ready: list[Request]) -> list[Request]:
        """Lists the requests whose turn it is if a step has no room for all."""
        num_rows = self._buckets.num_token_rows
        if len(ready) <= num_rows:
            return ready
        first = ready.index(self._served_last) + 1 if self._served_last in ready else 0
        return [*ready[first:], *ready[:first]][:num_rows]
