"""Who gets how many tokens in the next step.

A request whose prompt is not computed needs a context_encoding step; one whose newest token is not computed takes part
in every token_generation step. Prompts go first, in order of arrival, but never twice in a row while somebody waits for
its next token: neither long prompts nor a stream of short ones can stall the running sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from bundle.manifest import Executable
from runtime_svc.engine.buckets import BucketTable
from runtime_svc.engine.request import BucketKey, Finish, FinishReason, Request
from runtime_svc.engine.slots import SlotPool


class ScheduledRow(msgspec.Struct, frozen=True):
    """One request's part of a step.

    Attributes:
        row: Row of the executable's batch.
        slot: KV slot that it writes.
        request: Whose tokens they are.
        num_tokens: Tokens computed, from `request.num_computed_tokens` on.
    """

    row: int
    slot: int
    request: Request
    num_tokens: int


class StepPlan(msgspec.Struct, frozen=True):
    """One call of one executable; rows that are not listed idle.

    Attributes:
        executable: What is called.
        rows: Whom it computes.
        follows: It is planned while the step before it runs: each row is one token further than its request says, and
            that token is not known yet.
    """

    executable: Executable
    rows: tuple[ScheduledRow, ...]
    follows: bool = False


class Scheduler:
    """Moves requests from the queue through slots to their end."""

    def __init__(self, buckets: BucketTable, *, num_slots: int, ctx_batch_size: int) -> None:
        """Starts empty.

        Args:
            buckets: Executables to choose from.
            num_slots: Sequences that can run at once; token_generation row r is slot r.
            ctx_batch_size: Prompts that one context_encoding step computes.
        """
        self._buckets = buckets
        self._ctx_batch_size = ctx_batch_size
        self._slots = SlotPool(num_slots)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._prompt_ran_last = False
        #: While False, waiting requests get no slot.
        self.is_admitting = True

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without a slot, oldest first."""
        return self._waiting

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a slot, by slot."""
        return tuple(self._running[slot] for slot in sorted(self._running))

    @property
    def num_slots(self) -> int:
        """KV slots in all."""
        return self._slots.num_slots

    @property
    def num_used_slots(self) -> int:
        """KV slots that requests hold."""
        return self._slots.num_used

    def add(self, request: Request) -> None:
        """Queues a new request."""
        assert request.slot is None
        assert request.finish is None
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes an ended request out and frees its slot at once.

        Steps that are under way may still write the slot; the next owner's step runs after them.
        """
        if request.slot is None:
            self._waiting.remove(request)
            return
        del self._running[request.slot]
        self._slots.free(request.slot)
        request.slot = None

    def schedule(self) -> StepPlan | None:
        """Plans the next step; None where nothing can run."""
        ready = self._ready()
        can_admit = self.is_admitting and bool(self._waiting) and self._slots.num_free > 0
        self._prompt_ran_last = can_admit and not (ready and self._prompt_ran_last)
        if self._prompt_ran_last:
            return self._plan_prompts()
        return self._plan_tokens(ready) if ready else None

    def schedule_ahead(self, running: StepPlan) -> StepPlan | None:
        """Plans the step that follows one that runs, for the same rows; None where its result has to be known first.

        That is so where somebody waits for a slot, where a row comes to its limit or beyond its bucket, and where not
        all who are ready are in it. A row may end by its token all the same, or by its client: then it is computed once
        more for nothing, and whoever gets its slot runs after that.
        """
        rows = running.rows
        if self._waiting or running.executable.submodel != "token_generation":
            return None
        if [row.request for row in rows] != self._ready():
            return None
        if any(row.request.num_missing_tokens == 1 for row in rows):
            return None
        last_position = max([row.request.num_computed_tokens for row in rows]) + 1
        if self._buckets.for_position(last_position) is not running.executable:
            return None
        return StepPlan(running.executable, rows, follows=True)

    def update(self, plan: StepPlan, tokens: Sequence[int], now_s: float) -> tuple[ScheduledRow, ...]:
        """Takes in the result of a step: one new token a row.

        Requests that a stop token or their limit ends give back their slots.

        Args:
            plan: The step that ran.
            tokens: Result of every row of the batch, idle rows included.
            now_s: The time.

        Returns:
            Rows whose request got its token: those that had not ended while the step ran.
        """
        advanced = tuple(row for row in plan.rows if row.request.finish is None)
        for row in advanced:
            request = row.request
            self._count_bucket(plan.executable, row)
            request.num_computed_tokens += row.num_tokens
            request.output_token_ids.append(tokens[row.row])
            if request.timeline.first_token_s is None:
                request.timeline.first_token_s = now_s
            finish = _finish_by_tokens(request)
            if finish is not None and request.claim_finish(finish, now_s):
                self.remove(request)
        return advanced

    def check_integrity(self) -> None:
        """Asserts that queue, slots and requests agree."""
        self._slots.check_integrity(set(self._running))
        for slot, request in self._running.items():
            assert request.slot == slot, f"{request.request_id} runs in slot {slot} but holds {request.slot}"
            assert request.finish is None, f"{request.request_id} has ended and holds slot {slot}"
            missing = request.num_tokens - request.num_computed_tokens
            assert missing == 1 or request.num_computed_tokens == 0, f"{request.request_id} lacks {missing} tokens"
        for request in self._waiting:
            assert request.slot is None, f"{request.request_id} waits with slot {request.slot}"
            assert request.finish is None, f"{request.request_id} has ended and waits"
        queued = {id(request) for request in self._waiting} | {id(request) for request in self._running.values()}
        assert len(queued) == len(self._waiting) + len(self._running), "a request is queued twice"

    def _ready(self) -> list[Request]:
        """Requests whose newest token is to be computed, by slot."""
        return [one for one in self.running if one.num_computed_tokens and not one.is_paused]

    def _plan_prompts(self) -> StepPlan:
        count = min(self._ctx_batch_size, self._slots.num_free, len(self._waiting))
        rows = []
        for row in range(count):
            request = self._waiting.popleft()
            request.slot = self._slots.allocate()
            self._running[request.slot] = request
            rows.append(ScheduledRow(row, request.slot, request, request.num_tokens))
        return StepPlan(self._buckets.for_prompt(max(row.num_tokens for row in rows)), tuple(rows))

    def _plan_tokens(self, ready: list[Request]) -> StepPlan:
        rows = []
        for request in ready:
            slot = request.slot
            assert slot is not None
            rows.append(ScheduledRow(slot, slot, request, 1))
        executable = self._buckets.for_position(max([request.num_computed_tokens for request in ready]))
        return StepPlan(executable, tuple(rows))

    @staticmethod
    def _count_bucket(executable: Executable, row: ScheduledRow) -> None:
        key = BucketKey(executable.submodel, executable.bucket)
        row.request.bucket_steps[key] += 1
        if executable.submodel == "context_encoding":
            row.request.bucket_padding[key] += executable.bucket[0] - row.num_tokens


def _finish_by_tokens(request: Request) -> Finish | None:
    newest = request.output_token_ids[-1]
    if newest in request.stop.stop_token_ids:
        return Finish(FinishReason.STOP_TOKEN, stop_token_id=newest)
    if request.num_missing_tokens <= 0:
        return Finish(FinishReason.LENGTH)
    return None
