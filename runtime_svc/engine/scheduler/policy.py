"""Which requests compute how many of their tokens in the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from typing import Final

from bundle.abi.submodels import SUBMODELS
from runtime_svc.engine.config import ChunkLimits
from runtime_svc.engine.kv.manager import KvManager, Placement
from runtime_svc.engine.request import Request
from runtime_svc.engine.scheduler.buckets import STEP_TOKENS, BucketTable, CachedPrompt
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan

#: Weight of the newest step in the time of its size.
_SMOOTHING: Final = 0.5
#: Steps of prompts for which a measured time counts: what was slow once is tried again.
_MEMORY_STEPS: Final = 100


class ChunkSize:
    """Picks how many tokens of a prompt a step computes while sequences wait for their next token.

    It is the number of a compiled step, or a free one if steps skip padding. If there is a target, it is the largest
    one whose steps are expected to meet it, or else the smallest one. A number that has not run yet, or long ago, is
    expected to take the time per token of the next smaller one that has, or else of the next larger one; the smallest
    one comes first.
    """

    def __init__(self, buckets: BucketTable, limits: ChunkLimits) -> None:
        self._sizes = buckets.list_chunk_tokens(limits.max_tokens)
        self._skips_padding = buckets.skips_padding
        self._target_s = limits.target_s
        self._token_step_s = 0.0
        # Of steps by their tokens a row: the time, and how many steps of prompts had been measured by then.
        self._measured: dict[int, tuple[float, int]] = {}
        self._num_measured = 0
        #: The choice.
        self.tokens = self._sizes[-1] if limits.target_s is None else self._sizes[0]

    def observe(self, plan: StepPlan, duration_s: float) -> None:
        """Takes in how long the ranks took for a step."""
        if self._target_s is None:
            return
        if SUBMODELS[plan.executable.submodel].tokens == 1:
            self._token_step_s = _smooth(self._token_step_s or duration_s, duration_s)
        else:
            self._note_prompts(plan, duration_s)
        expected = [(size, self._expect(size)) for size in self._sizes[1:]]
        meeting = [size for size, step_s in expected if step_s and step_s + self._token_step_s <= self._target_s]
        self.tokens = max(meeting, default=self._sizes[0])

    def _note_prompts(self, plan: StepPlan, duration_s: float) -> None:
        longest = max(row.num_tokens for row in plan.rows)
        size = plan.executable.bucket[0]
        if self._skips_padding:
            size = next((one for one in self._sizes if one >= longest), longest)
        known_s, _ = self._measured.get(size, (0.0, 0))
        self._num_measured += 1
        # A step whose rows have room left may take less time than a chunk does.
        if longest == size or 0 < known_s < duration_s:
            self._measured[size] = _smooth(known_s or duration_s, duration_s), self._num_measured
        oldest = self._num_measured - _MEMORY_STEPS
        self._measured = {size: measured for size, measured in self._measured.items() if measured[1] > oldest}

    def _expect(self, size: int) -> float | None:
        """Returns the seconds that a step of so many tokens a row is expected to take; None before any is measured."""
        if not self._measured:
            return None
        smaller = [one for one in self._measured if one <= size]
        nearest = max(smaller) if smaller else min(self._measured)
        return self._measured[nearest][0] * size / nearest


def _smooth(known_s: float, newest_s: float) -> float:
    return known_s + _SMOOTHING * (newest_s - known_s)


class AlternatingSteps:
    """Alternates between context_encoding steps, which compute prompts, and token_generation steps, one token a row.

    Prompts go in order of arrival. Long ones are computed in chunks: as large as the executables allow while no
    sequence is ready for its next token, else as `ChunkSize` picks. Between two tokens of a ready sequence there is one
    such step, or several that together cost no more than one chunk: those behind the first compute whole prompts, or
    all that is left of them, so that each gives a first token. So neither long prompts nor a stream of short ones stall
    the running sequences. What no executable of context_encoding takes is computed token by token. A prompt lets others
    pass while one with which it can share a beginning is computed.
    """

    def __init__(self, buckets: BucketTable, chunks: ChunkLimits) -> None:
        self._buckets = buckets
        self.chunk_size = ChunkSize(buckets, chunks)
        self._max_tokens = chunks.max_tokens
        # What the context_encoding steps behind the newest token_generation step cost, in tokens.
        self._spent_tokens = 0
        # The last row of the newest token_generation step that had no room for all.
        self._served_last: Request | None = None

    def plan(
        self,
        running: Collection[Request],
        waiting: Collection[Request],
        kv: KvManager,
        *,
        has_company: bool = False,
    ) -> StepPlan | None:
        """Plans the next step, while none is in flight; None if no request can run, or if a running one lacks room.

        Every request lacks `num_tokens - num_computed_tokens` tokens in the KV cache, at least one. The step computes
        all of them or the first of them, behind those that the cache turns out to hold. It leaves out requests that are
        paused, or whose masks have not come. `running` and `waiting` have the oldest request first. With `has_company`,
        others that are in neither wait for their next step.

        `kv` makes room for the tokens of a request that the step computes. If the step can give several tokens, it
        computes all of them but the last. Every request that held none and that room is reserved for is in the step.
        """
        prompts: list[Request] = []
        ready: list[Request] = []
        for request in running:
            if not request.stands_still:
                (ready if self._is_ready(request) else prompts).append(request)
        plan = None
        num_left = min(self.chunk_size.tokens, self._max_tokens) - self._spent_tokens
        if (prompts or waiting) and (not ready or not self._spent_tokens or num_left > 0):
            # Nothing starts in the room of the next token of what runs: it would have to make room at once.
            if any(kv.reserve(request, 1) is None for request in ready):
                return None
            requests = chain(prompts, waiting)
            if ready and self._spent_tokens:
                plan = self._plan_prompts(requests, num_left, kv, only_whole=True)
            else:
                max_tokens = self.chunk_size.tokens if ready or has_company else self._buckets.max_chunk_tokens
                plan = self._plan_prompts(requests, max_tokens, kv, only_whole=False)
        if plan is None:
            self._spent_tokens = 0
            if ready:
                plan = self._plan_tokens(ready, kv)
        return plan

    def plan_behind(self, plan: StepPlan, running: Collection[Request], kv: KvManager) -> StepPlan | None:
        """Plans the step behind one that runs: the next token of the same rows, by the same executable.

        A row may end all the same, by its token or by its client. Then the step computes it in vain, and the next
        owner of its place in the KV cache runs after that. Returns None if the next step has to be another one.
        """
        rows = plan.rows
        if SUBMODELS[plan.executable.submodel].tokens != 1 or any(row.request.needs_newest_token for row in rows):
            return None
        if len(rows) != sum([not request.is_paused for request in running]):
            return None
        next_rows = []
        for row in rows:
            request = row.request
            if request.is_paused or request.finish is not None or not row.samples or request.num_missing_tokens == 1:
                return None
            placement = kv.reserve(request, row.num_tokens + 1)
            if placement is None:
                return None
            next_rows.append(ScheduledRow(row.row, request, row.start + 1, 1, placement, samples=True))
        if self._buckets.for_tokens(next_rows) is not plan.executable:
            return None
        return StepPlan(plan.executable, tuple(next_rows), depends_on_previous=True)

    def count_gainful(self, request: Request, num_running: int, kv: KvManager) -> int:
        """Counts the known tokens of a running request that one step of a prompt computes for less than one step each.

        While that step runs, `num_running` requests wait, itself included; they share the other steps. Costs are those
        of `BucketTable.count_tokens`. `kv` makes room for the tokens; without, none is counted.
        """
        start = request.num_computed_tokens
        count = min(len(request.known_tokens), self._buckets.find_room(start) - 1)
        if count < 1 or request.num_tokens - start > 1:
            # No step takes them, or one is due that gives the first of them.
            return 0
        prompt = CachedPrompt(1 + count, start)
        choice = self._buckets.for_prompts([prompt])
        assert choice is not None, "there is room"
        saved = count * (STEP_TOKENS + num_running)
        spent = num_running * (STEP_TOKENS + self._buckets.count_tokens(choice, [prompt]))
        return count if saved > spent and kv.reserve(request, 1 + count) is not None else 0

    def _is_ready(self, request: Request) -> bool:
        """Whether a running request goes on by token_generation."""
        num_computed = request.num_computed_tokens
        if num_computed and request.num_tokens - num_computed == 1 and not request.lacks_report:
            return True
        return not self._buckets.find_room(num_computed)

    def _plan_prompts(
        self, requests: Iterable[Request], max_tokens: int, kv: KvManager, *, only_whole: bool
    ) -> StepPlan | None:
        """Plans a step of prompts, `max_tokens` of each at most, and adds up its cost; None if none of them can run.

        The requests are in the order in which they run. With `only_whole`, takes only prompts of which the step
        computes all, and which together cost that much at most.
        """
        prompts: list[CachedPrompt] = []
        placed: list[tuple[Request, Placement]] = []
        choice = None
        for request in requests:
            if len(placed) == self._buckets.num_context_rows:
                break
            may_share = not request.num_computed_tokens and (request.report is None or not request.report.needs_all)
            start = kv.find_prefix(request) if may_share else request.num_computed_tokens
            if not self._buckets.find_room(start):
                start = 0
            if may_share and any(kv.will_find_more(request, start, other) for other, _ in placed):
                # It starts when it can share what this very step computes.
                continue
            num_lacking = request.num_tokens - start
            prompt = CachedPrompt(min(num_lacking, max_tokens, self._buckets.find_room(start)), start)
            wider = self._buckets.for_prompts([*prompts, prompt])
            if only_whole and (
                prompt.num_active < num_lacking
                or wider is None
                or self._buckets.count_tokens(wider, [*prompts, prompt]) > max_tokens
            ):
                break
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
        self._spent_tokens += self._buckets.count_tokens(choice, prompts) + STEP_TOKENS
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
